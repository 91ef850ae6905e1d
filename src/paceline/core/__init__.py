"""Core: the words every room shares.

Here live Step and the forward modes, sampling parameters, model and engine configuration, device
facts, the padding constants, events and the error tree: values, frozen, without behaviour that
needs a device.  What may not live here: anything that imports another room of the package, and any
state that changes.
"""
