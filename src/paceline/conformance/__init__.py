"""Conformance: the matrix of attention cells, its oracle, and the report of a run.

Here live cases as data, the float64 oracle with its wrong twins, the harness that runs a case
through the real runner, emulators of vendor libraries, and what prints the result.  The oracle
imports nothing of attention, kernels or runner: a mistake there must not be shared.  What may not
live here: anything the engine needs to serve.
"""
