"""Kernels: one module per operation over plain tensors; nothing here knows another room's objects.

`kernels/<op>.py` holds, from top to bottom, `<op>_reference` (eager torch, the definition), the
custom op `paceline::<op>` with its CPU implementation, and `<op>`, the launcher that checks and
allocates; an operation with more than one kernel is a folder of such modules, and the parts of a
fused one (`rope`, `write_kv`) keep definition and CPU path in files of their own.  An op without a
CPU implementation is for CUDA alone: the launcher runs the reference on a CPU.  The Triton kernel
is the file of the same name in `kernels/_triton/`, the only place that imports triton, and is
imported at the first CUDA launch.  Ops return nothing: outputs are caller-allocated arguments, so
that a recorded graph replays them on the same storages.  Backends and plans do not belong here.
"""
