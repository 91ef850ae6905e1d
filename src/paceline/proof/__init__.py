"""Proof: what shows that the engine computes what it should, and that a mistake would be seen.

Here live the matrix of attention cells (suite, oracle, rig, check), emulators of vendor libraries,
the losslessness of speculation, and past bugs as data.  The oracle imports nothing of attention,
kernels or runner: a mistake there must not be shared.  What may not live here: anything the engine
needs to serve.
"""
