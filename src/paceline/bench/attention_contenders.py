"""What the attention benchmarks time: contenders, checked against the definition first."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from paceline.attention.contract import AttentionConfig, GraphSupport, Part
from paceline.attention.registry import load_backend
from paceline.bench.attention_shape import AttentionShape
from paceline.bench.attention_workload import Workload, kv_dtype_of, make_workload
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.gpus import DeviceFacts, gib
from paceline.core.modes import MaskKind

L2_TIMES = 8  # the KV of all layers is this many times the L2 cache
CPU_SPAN_BYTES = 64 << 20
MOST_LAYERS = 64
LEAST_LAYERS = 2
# In the unit of Workload.worst_error; GPUs approximate exp2, which float32 shows.
ERROR_LIMITS = {"bfloat16": 2.0, "float16": 2.0, "float32": 8.0}
CHECKED_EXTENDS = 4  # requests of an extend that are compared; of a decode all are
Make = Callable[[Workload], Callable[[int], Tensor]]


def attention_config(
    shape: AttentionShape, *, device_type: str, cuda_arch: tuple[int, int] | None
) -> AttentionConfig:
    """What the shape asks of a backend."""
    return AttentionConfig(
        device_type=device_type,
        cuda_arch=cuda_arch,
        dtype=getattr(torch, shape.dtype),
        kv_dtype=kv_dtype_of(shape),
        page_size=shape.page_size,
        heads=(shape.heads,),
        window=False,
        soft_cap=False,
        sinks=False,
        masks=frozenset({MaskKind.CAUSAL}),
        needs_lse=False,
        graph=GraphSupport.DECODE if shape.extend_len == 1 else GraphSupport.UNIFORM,
        chunks=frozenset() if shape.chunk is None else frozenset({shape.chunk}),
    )


def our_make(name: str) -> Make:
    """A backend as the engine runs it: buffers once, one plan of the step, forward per layer."""

    def make(workload: Workload) -> Callable[[int], Tensor]:
        backend = load_backend(name)
        buffers = backend.make_buffers(workload.limits)
        if backend.capabilities.host_plan:
            backend.host_plan(workload.step, buffers)
        plan = backend.plan(workload.view, buffers)

        def run(index: int) -> Tensor:
            layer = workload.layers[index]
            return backend.forward(workload.q, workload.k, workload.v, layer, plan, Part.ALL)[0]

        return run

    return make


def wants_finite(name: str) -> bool:
    """Whether slots a backend may not read must hold numbers all the same."""
    return load_backend(name).capabilities.loads_dead_slots


def worst_errors(
    makes: Mapping[str, Make],
    shape: AttentionShape,
    device: torch.device,
    *,
    finite: bool = False,
) -> dict[str, float]:
    """Each contender's `Workload.worst_error`; finite: see `make_workload`.

    Raises IntegrityError where it is too large.
    """
    work = make_workload(shape, ragged_lens(shape), layers=1, device=device, seed=0, finite=finite)
    requests = range(shape.batch_size)
    if shape.extend_len > 1:
        requests = requests[:: -(-shape.batch_size // CHECKED_EXTENDS)]
    errors = {}
    for name, make in makes.items():
        errors[name] = error = work.worst_error(make(work)(0), requests)
        if not error <= ERROR_LIMITS[shape.dtype]:
            raise IntegrityError.about(
                f"attention of {name}",
                expected=f"the definition's, within {ERROR_LIMITS[shape.dtype]:g} of the unit",
                got=f"an error of {error:.3g}",
                remedy="do not time this shape; leave its library or backend out",
            )
    return errors


def ragged_lens(shape: AttentionShape) -> list[int]:
    """[batch_size] from extend_len to kv_len, evenly; a single one ends inside a page."""
    low, high = shape.extend_len, shape.kv_len
    if shape.batch_size == 1:
        return [max(low, high - 1)]
    steps = shape.batch_size - 1
    return [low + (high - low) * index // steps for index in range(shape.batch_size)]


def num_layers(shape: AttentionShape, device: DeviceFacts) -> int:
    """How many layers' K and V exceed the L2 cache L2_TIMES."""
    span = CPU_SPAN_BYTES
    if device.device_type == "cuda":
        span = L2_TIMES * torch.cuda.get_device_properties(0).L2_cache_size
    return max(LEAST_LAYERS, min(MOST_LAYERS, -(-span // shape.moved_bytes)))


def require_memory(shape: AttentionShape, layers: int, device: DeviceFacts) -> None:
    """Raises ConfigError when K and V, and one layer's random numbers, exceed the free memory."""
    numbers = 4 * shape.batch_size * shape.kv_len * shape.num_kv_heads * shape.head_dim
    needed = layers * shape.cache_bytes + 2 * numbers
    if needed > device.free_bytes:
        raise ConfigError.about(
            f"memory for {layers} layers' K and V on {device.name}",
            expected=f"at most {gib(device.free_bytes)}",
            got=gib(needed),
            remedy="lower --batch-size or --kv-len",
        )
