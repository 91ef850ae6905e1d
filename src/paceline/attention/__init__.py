"""Attention: the backend contract, the layouts and the backends.

Here live the contract every backend fulfils, the layouts that derive its metadata once for all
backends that share a shape, the backends themselves (one file each, which never import one another)
and the registry that chooses.  What may not live here: models, padding rules, and any second
derivation of lengths or tables.
"""
