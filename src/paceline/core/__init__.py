"""Core: the words every room shares.

Here live Step and its masks, sampling parameters, model and engine configuration, device facts,
the padding constants, events and the error tree: values, frozen, without behaviour that needs a
device; and the hook that brings past bugs back, which must stand before all that it edits.  What
may not live here: anything that imports another room of the package, and any state that changes.
"""
