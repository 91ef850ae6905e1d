"""From a located model to a module on its device with weights in it.

The module is built first, uninitialised and on the device; each checkpoint tensor is then copied
from the mapped file straight into the (fused) parameter that holds it.  Nothing is built twice.
"""

import re
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from paceline.core.errors import WeightsError
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.options.engine_options import LOAD_FORMATS
from paceline.core.parallel import ALONE, Parallel
from paceline.core.progress import Progress
from paceline.kernels.all_reduce import Exchange
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, held_by
from paceline.models.architecture import Architecture
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import (
    SPELLED,
    PaddedTables,
    StoredTensors,
    WithModules,
    ZerosBehind,
    open_checkpoint,
)
from paceline.models.checkpoint_names import canonical_names, of_the_model
from paceline.models.coverage import require_filled_once
from paceline.models.locate import ModelSource
from paceline.models.packed_layers import PLAIN, Packings, build_model, packed_modules
from paceline.models.quantized.config import read_quantization
from paceline.models.quantized.repacked import Repacked, encoded
from paceline.models.quantized.stored import Dequantised
from paceline.models.registry import architecture
from paceline.models.stacked_experts import UnstackedExperts

DUMMY_STD = 0.02  # the initializer_range of most released configurations
_MAX_LISTED = 10
_FLOATS = ("F64", "F32", "F16", "BF16")  # any is cast to any
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_model(
    source: ModelSource,
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    load_format: str = "auto",
    progress: bool | None = None,
    max_positions: int | None = None,
    seed: int = 0,
    exchange: Exchange | None = None,
    packings: Packings = PLAIN,
) -> CausalLM:
    """The model, ready to run; of a rank its part, which alone is read.

    `load_format` "dummy" fills it with seeded noise instead of reading weights; `progress` None
    shows a bar on a terminal only; `max_positions` sizes the rope tables (None: the context limit).
    packings: which weights stay codes, or become them.  Raises WeightsError naming the tensors or
    the file at fault.
    """
    assert load_format in LOAD_FORMATS, f"{load_format} is none of {LOAD_FORMATS}"
    file = architecture(config.model_type)
    build = partial(
        build_model,
        config,
        packings,
        parallel=parallel,
        placement=Placement(device, dtype, DENSE, exchange),
        max_positions=max_positions,
    )
    if load_format == "dummy":
        model = build()
        if parallel.size == 1:
            fill_dummy(model, seed=seed)
        else:
            nowhere = Placement(torch.device("meta"), dtype, DENSE)
            whole = build(parallel=ALONE, placement=nowhere)
            fill_dummy_part(model, whole, device=device, seed=seed)
        return model
    with ExitStack() as files:
        stored = files.enter_context(open_numbers(source))
        model = build()
        if file.names_experts and not isinstance(stored, Dequantised):
            stored = UnstackedExperts(stored)
        checkpoint = _repacked(stored, model, file, packings, device=device, name=source.name)
        if source.dense:
            modules = {
                path: files.enter_context(open_checkpoint(weights_folder(source) / path))
                for path in source.dense
            }
            checkpoint = WithModules(checkpoint, modules)
        if file.names_experts and isinstance(stored, Dequantised):  # what is plain may be stacked
            checkpoint = UnstackedExperts(checkpoint)
        rows = config.stored_vocab_size
        if rows is not None:
            checkpoint = PaddedTables(checkpoint, stored=rows, rows=config.vocab_size)
        names = canonical_names(checkpoint.names, file, model=source.name, head=config.pooled_head)
        names = of_the_model(names, file, config.num_layers)
        if End.GENERATE not in config.ends:
            names.pop(_HEAD, None)  # it makes vectors alone
        elif config.tie_word_embeddings:
            names = _tie(checkpoint, names)
        destinations = model.destinations()
        if file.left_out is not None:
            absent = {
                name: target.shape
                for name, target in destinations.items()
                if name not in names and re.search(file.left_out, name)
            }
            checkpoint = ZerosBehind(checkpoint, absent)
            names |= {name: name for name in absent}
        names = without_idle(stored, names, destinations)
        copy_weights(
            checkpoint,
            names,
            destinations,
            module=model,
            model=source.name,
            progress=progress,
        )
    return model


@contextmanager
def open_numbers(source: ModelSource) -> Iterator[StoredTensors]:
    """The weights of `source`, codes as the numbers they stand for.  Raises WeightsError."""
    with open_checkpoint(weights_folder(source)) as checkpoint:
        quantization = read_quantization(source.config)
        if quantization is None:
            yield checkpoint
        else:
            yield Dequantised(checkpoint, quantization, model=source.name)


def _repacked(
    stored: StoredTensors,
    model: CausalLM,
    file: Architecture,
    packings: Packings,
    *,
    device: torch.device,
    name: str,
) -> StoredTensors:
    """`stored` with words for the weights that `model` keeps packed."""
    modules = packed_modules(model)
    if not modules:
        return stored
    found = {}
    for canonical, each in canonical_names(stored.names, file, model=name).items():
        module, _, last = canonical.rpartition(".")
        packing = packings.of(module)
        if last == "weight" and module in modules and packing is not None:
            found[each] = packing
    pack = stored.packed if isinstance(stored, Dequantised) else encoded(stored)
    return Repacked(stored, found, pack, device)


def weights_folder(source: ModelSource) -> Path:
    """Where the weights are.  Raises WeightsError for a shape, which has none."""
    if source.folder is None:
        raise WeightsError.about(
            f"model '{source.name}'",
            expected="a model with weights",
            got="a shape",
            remedy="add --load-format dummy, or name a folder or a hub id",
        )
    return source.folder


def copy_weights(
    checkpoint: StoredTensors,
    names: dict[str, str],
    destinations: Named,
    *,
    module: nn.Module,
    model: str,
    progress: bool | None = None,
) -> None:
    """Fill `destinations`, of `module`, from the tensors that `names` leads their canonical names
    to, and let formats finish.  Empties `destinations`, whose places keep memory that formats
    replace.

    Raises WeightsError, before anything is written, unless the two sets of names, the shapes and
    the dtypes agree and fill every parameter once; behind it, where a scale was not written.
    `model` is the name it speaks of.
    """
    _check_names(model, names, destinations)
    _check_tensors(checkpoint, names, destinations)
    require_filled_once(module, destinations, model=model)
    _copy(checkpoint, names, destinations, progress)
    destinations.clear()
    _finish(module, model)


def without_idle(
    stored: StoredTensors, names: dict[str, str], destinations: Named
) -> dict[str, str]:
    """`names` without biases of zeros that no layer takes, which tools that quantise write."""
    if not isinstance(stored, Dequantised):
        return names
    return {
        canonical: name
        for canonical, name in names.items()
        if canonical in destinations or not stored.is_idle(name)
    }


def _tie(checkpoint: StoredTensors, names: dict[str, str]) -> dict[str, str]:
    """The names of a model whose head is its embedding: either of the two, or both if equal."""
    if _HEAD not in names:
        return names
    others = {canonical: name for canonical, name in names.items() if canonical != _HEAD}
    if _EMBEDDING not in names:
        return others | {_EMBEDDING: names[_HEAD]}
    table, head = checkpoint.tensor(names[_EMBEDDING]), checkpoint.tensor(names[_HEAD])
    if not _equal(table, head):
        is_alike = table.shape == head.shape
        raise WeightsError.about(
            f"tensor '{names[_HEAD]}'",
            expected=f"equal to {names[_EMBEDDING]}, which config.json ties it to",
            got="other numbers" if is_alike else f"{list(head.shape)}, not {list(table.shape)}",
            remedy='write "tie_word_embeddings": false into config.json to use both',
        )
    return others


def _equal(table: Tensor, head: Tensor) -> bool:
    return table.shape == head.shape and torch.equal(table, head.to(table.dtype))


@torch.no_grad()
def fill_dummy(model: nn.Module, *, seed: int) -> None:
    """Deterministic noise in every parameter, on its own device; norms are the identity.  Formats
    finish what they derive."""
    device = next(model.parameters()).device
    generator = torch.Generator(device).manual_seed(seed)

    def normal(shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=device).normal_(0.0, DUMMY_STD, generator=generator)

    coded = [held.format.set_noise(held.weight, normal) for held in held_by(model).values()]
    skipped = {id(parameter) for parameters in coded for parameter in parameters}
    for parameter, noise in _noise(model, device, seed, skipped):
        if noise is not parameter:
            parameter.copy_(noise)
    _finish_dummy(model)


@torch.no_grad()
def fill_dummy_part(model: CausalLM, whole: CausalLM, *, device: torch.device, seed: int) -> None:
    """A rank's part of what `fill_dummy` would write into `whole`, one process's model on the meta
    device.  No more of it is ever in memory than one parameter."""
    ours = model.destinations()
    filling: dict[int, Named] = {}  # by parameter of `whole`
    for name, target in whole.destinations().items():
        [owner] = {id(block.parameter) for block in target.blocks}
        filling.setdefault(owner, {})[name] = target
    for parameter, noise in _noise(whole, device, seed):
        held = torch.empty_like(parameter, device=device).copy_(noise)
        for name, target in filling[id(parameter)].items():
            stored = torch.empty(target.shape, dtype=target.dtype, device=device)
            for view, place in [(block.into, block.place) for block in target.blocks]:
                stored[place] = held.as_strided(view.shape, view.stride(), view.storage_offset())
            ours[name].copy_(stored)
    _finish_dummy(model)


def _noise(
    model: nn.Module, device: torch.device, seed: int, skipped: Collection[int] = ()
) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """What each parameter but norms', and those of `skipped` ids, gets, in order; in its place
    where it lies row by row, so that its layout says nothing of the numbers."""
    norms = {id(p) for module in _norms(model) for p in module.parameters()}
    generator = torch.Generator(device).manual_seed(seed)
    for parameter in model.parameters():
        if id(parameter) in norms or id(parameter) in skipped:
            continue
        is_in_place = parameter.device == device and parameter.is_contiguous()
        like: dict[str, Any] = {"dtype": parameter.dtype, "device": device}
        noise = parameter if is_in_place else torch.empty(parameter.shape, **like)
        yield parameter, noise.normal_(0.0, DUMMY_STD, generator=generator)


def _norms(model: nn.Module) -> list[RMSNorm | LayerNorm]:
    return [module for module in model.modules() if isinstance(module, RMSNorm | LayerNorm)]


def _finish_dummy(model: nn.Module) -> None:
    for norm in _norms(model):
        norm.neutral_()
    for held in held_by(model).values():
        held.format.finish(held.weight)


@torch.no_grad()
def _finish(module: nn.Module, model: str) -> None:
    for name, held in held_by(module).items():
        held.format.finish(held.weight)
        unwritten = sum(int(scale.isnan().sum()) for scale in held.format.scales(held.weight))
        if unwritten:
            raise WeightsError.about(
                f"scales of '{name}' of '{model}'",
                expected="numbers, all of them",
                got=f"{unwritten} that nothing wrote, or NaN",
                remedy="check that the checkpoint holds every scale of its quantised tensors",
            )


def _check_names(model: str, names: dict[str, str], destinations: Named) -> None:
    missing = [name for name in destinations if name not in names]
    unexpected = [names[name] for name in names if name not in destinations]
    if not missing and not unexpected:
        return
    parts = [
        f"{len(found)} {word} ({_listed(found)})"
        for word, found in (("missing", missing), ("unexpected", unexpected))
        if found
    ]
    raise WeightsError.about(
        f"weights of '{model}'",
        expected=f"the {len(destinations)} tensors its config.json implies",
        got=" and ".join(parts),
        remedy="check that config.json and the weights belong together",
    )


def _check_tensors(
    checkpoint: StoredTensors,
    names: dict[str, str],
    destinations: Named,
) -> None:
    for canonical, target in destinations.items():
        name = names[canonical]
        shape, stored = checkpoint.shape(name), checkpoint.dtype(name)
        kind = SPELLED[target.dtype]
        is_kind = stored in _FLOATS if kind in _FLOATS else stored == kind
        if shape != target.shape or not is_kind:
            wanted = "floating point" if kind in _FLOATS else kind
            raise WeightsError.about(
                f"tensor '{name}'",
                expected=f"{wanted} {list(target.shape)}",
                got=f"{stored} {list(shape)}",
                remedy="check that config.json and the weights belong together",
            )


@torch.no_grad()
def _copy(
    checkpoint: StoredTensors,
    names: dict[str, str],
    destinations: Named,
    progress: bool | None,
) -> None:
    bytes_of = {
        canonical: sum(block.into.nbytes for block in target.blocks)
        for canonical, target in destinations.items()
    }
    total = sum(bytes_of.values())
    with Progress("loading weights", total, unit="B", shown=progress) as bar:
        for canonical, name in names.items():
            if destinations[canonical].blocks:  # what a rank holds nothing of is not read
                destinations[canonical].copy_(checkpoint.tensor(name))
            bar.advance(bytes_of[canonical])


def _listed(names: list[str]) -> str:
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
