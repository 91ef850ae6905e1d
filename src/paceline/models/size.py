"""How much the weights of a model are: its modules are built on the meta device, and counted.

There is no formula that a new layer could be missing from.
"""

from collections import Counter
from dataclasses import replace
from functools import cache

import torch
from torch import nn

from paceline.core.dtypes import ELEMENT_BYTES
from paceline.core.errors import ModelError
from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, Parallel
from paceline.kernels.all_reduce import Exchange, exchange_memory, peer_table
from paceline.kernels.stand_in import StandIn
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import ExpertsFormat, held_by
from paceline.models.causal_lm import CausalLM
from paceline.models.packed_layers import PLAIN, Packings, build_model, packed_modules

META = torch.device("meta")
_PACKING_BYTES = 10  # of a code: it, its number in float32, and what turns one into the other


def empty_model(
    config: ModelConfig,
    *,
    dtype: torch.dtype,
    max_positions: int,
    parallel: Parallel = ALONE,
    exchange: Exchange | None = None,
    packings: Packings = PLAIN,
) -> CausalLM:
    """The modules of a model, or of a rank's part, on the meta device.  max_positions: rows of its
    rope tables."""
    return build_model(
        config,
        packings,
        parallel=parallel,
        placement=Placement(META, dtype, DENSE, exchange),
        max_positions=max_positions,
    )


def empty_exchange(parallel: Parallel, capacity: int, *, dtype: torch.dtype) -> Exchange | None:
    """A rank's, on the meta device; None of one process.  capacity: see `exchange_memory`."""
    if parallel.size == 1:
        return None
    memory = exchange_memory(parallel.size, capacity, dtype=dtype, device=META)
    return Exchange(parallel.rank, *memory, peer_table((), META))


def empty_part(
    config: ModelConfig, parallel: Parallel, packings: Packings, *, dtype: torch.dtype
) -> CausalLM:
    """A rank's part on the meta device, to count: without positions, and nothing to exchange."""
    return empty_model(
        config,
        dtype=dtype,
        max_positions=1,
        parallel=parallel,
        exchange=empty_exchange(parallel, 0, dtype=dtype),
        packings=packings,
    )


def as_built(packings: Packings, config: ModelConfig, parallel: Parallel) -> Packings:
    """Of `packings` of a checkpoint those that layers of the model, or of a rank's part, keep; all
    others become plain numbers, and are counted so."""
    if not packings.by_module:
        return packings
    model = empty_part(config, parallel, packings, dtype=torch.bfloat16)
    modules = packed_modules(model)
    kept = {name: each for name, each in packings.by_module.items() if name in modules}
    lost = len(packings.by_module) - len(kept)
    return replace(packings, by_module=kept, num_unread=packings.num_unread + lost)


def weight_bytes(module: nn.Module | None) -> int:
    """Bytes of a module's own parameters and buffers; of None none."""
    if module is None:
        return 0
    return sum(tensor.nbytes for tensor in (*module.parameters(), *module.buffers()))


def bytes_by_format(model: CausalLM) -> dict[str, int]:
    """Of what layers multiply with, by the format that they hold it in; all else as "other"."""
    found: dict[str, int] = {}
    for held in held_by(model).values():
        kind = str(held.format)
        size = sum(each.nbytes for each in held.weight if isinstance(each, nn.Parameter))
        found[kind] = found.get(kind, 0) + size
    return found | {"other": weight_bytes(model) - sum(found.values())}


def expert_shares(config: ModelConfig, parallel: Parallel, packings: Packings) -> dict[str, int]:
    """What a rank holds of the experts of a layer, and in how many layers."""
    if config.moe is None:
        return {}
    model = empty_part(config, parallel, packings, dtype=torch.bfloat16)
    of_experts = [
        held for held in held_by(model).values() if isinstance(held.format, ExpertsFormat)
    ]
    return dict(Counter(held.format.share(held.weight) for held in of_experts))


def packing_bytes(model: CausalLM, packings: Packings) -> int:
    """The most that a weight takes beside those that are there, while it is packed: ten bytes for
    each of its codes (`models.quantized.repacked`)."""
    most = 0
    for name, target in model.destinations().items():
        module, _, last = name.rpartition(".")
        packing = packings.of(module)
        if last == "words" and packing is not None:
            most = max(most, target.shape[0] * target.shape[1] * 32 // packing.bits)
    return _PACKING_BYTES * most


@cache
def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights in `dtype` ("bfloat16", "float16" or "float32"); a tied head counts
    once.  Raises ModelError for another dtype."""
    return weight_bytes(weightless(config, dtype))


def weightless(config: ModelConfig, dtype: str) -> CausalLM:
    """A model on the meta device to count; without positions: rope tables are no weights."""
    with StandIn("cpu", None):
        return empty_model(config, dtype=torch_dtype(dtype), max_positions=1)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of weights called `name`.  Raises ModelError for one that is none."""
    if name not in ELEMENT_BYTES:
        raise ModelError.about(
            "dtype",
            expected=f"one of {', '.join(ELEMENT_BYTES)}",
            got=repr(name),
            remedy="choose with --dtype",
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype
