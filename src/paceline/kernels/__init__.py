"""Kernels: one module per operation, and nothing that knows about layers, requests or steps.

`kernels/<op>.py` holds, from top to bottom, `<op>_reference` (eager torch, the definition), the
custom op `paceline::<op>` with its CPU implementation, and `<op>`, the launcher that checks and
allocates; an operation with more than one kernel is a folder of such modules.  Its Triton kernel
is the file of the same name in `kernels/_triton/`, the only place that imports triton, and is
imported at the first CUDA launch.  Ops return nothing: outputs are caller-allocated arguments, so
that a recorded graph replays them on the same storages.  Backends, plans and padding rules do not
belong here.
"""
