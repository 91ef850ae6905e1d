"""A format of 8-bit integers, which the package does not have, goes the way of every weight: it is
allocated, filled by its own tensors, finished, multiplied with, and accounted for."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import pytest
import tiny_checkpoints
import torch
from fake_context import FakeContext
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from paceline.core.errors import WeightsError
from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, Span
from paceline.layers.weights.dense import DENSE, DenseMatrix
from paceline.layers.weights.parameter import Placement, empty_scale
from paceline.layers.weights.weight_format import (
    LinearFormat,
    Named,
    WeightFormats,
    held_by,
    wholly,
)
from paceline.models import coverage
from paceline.models.causal_lm import CausalLM
from paceline.models.checkpoint import open_checkpoint
from paceline.models.config import parse_config
from paceline.models.loader import copy_weights, fill_dummy
from paceline.models.locate import locate
from paceline.models.registry import architecture

CPU = torch.device("cpu")
CASE = "llama-odd-heads-biases"
TABLES = ("embed_tokens", "norm", "lm_head")


class Int8Matrix(NamedTuple):
    codes: nn.Parameter  # [sum of parts, columns]  int8
    scale: nn.Parameter  # [parts]  float32  as it is stored: one number for a projection
    bias: nn.Parameter | None  # [sum of parts]
    by_row: Tensor  # [sum of parts, 1]  float32  derived from scale
    parts: tuple[Span, ...]


@dataclass(frozen=True)
class Int8Linear(LinearFormat[Int8Matrix]):
    """Codes times a scale for each projection, which `finish` spreads over its rows."""

    forgets: bool = False  # a bug: the last projection's scale is not spread
    shares: bool = False  # a bug: every projection's scale is written to one place

    def allocate(
        self, parts: Sequence[Span], columns: Span, *, bias: bool, placement: Placement
    ) -> Int8Matrix:
        rows = sum(part.size for part in parts)
        return Int8Matrix(
            codes=nn.Parameter(
                torch.empty(rows, columns.size, dtype=torch.int8), requires_grad=False
            ),
            scale=empty_scale(len(parts), placement=placement),
            bias=nn.Parameter(torch.empty(rows), requires_grad=False) if bias else None,
            by_row=empty_scale(rows, 1, placement=placement).data,
            parts=tuple(parts),
        )

    def fill(self, weight: Int8Matrix, names: Sequence[str]) -> Named:
        sizes = [part.size for part in weight.parts]
        scales = [weight.scale[0 if self.shares else at :][:1] for at in range(len(names))]
        named: Named = {}
        for name, codes, scale in zip(names, weight.codes.split(sizes), scales, strict=True):
            named |= {f"{name}.weight": wholly(codes), f"{name}.weight_scale": wholly(scale)}
        if weight.bias is not None:
            biases = weight.bias.split(sizes)
            named |= {
                f"{name}.bias": wholly(part) for name, part in zip(names, biases, strict=True)
            }
        return named

    def finish(self, weight: Int8Matrix) -> None:
        rows = weight.by_row.split([part.size for part in weight.parts])
        spread = list(zip(rows, weight.scale, strict=True))
        for part, scale in spread[:-1] if self.forgets else spread:
            part.fill_(scale)

    def scales(self, weight: Int8Matrix) -> tuple[Tensor, ...]:
        return weight.scale, weight.by_row

    def apply(self, x: Tensor, weight: Int8Matrix) -> Tensor:
        return nn.functional.linear(x, weight.codes * weight.by_row, weight.bias)


INT8 = DENSE._replace(linear=Int8Linear())


@dataclass(frozen=True)
class Stored:
    """A checkpoint of dense weights, and what it was made from."""

    folder: Path
    config: ModelConfig

    def tensors(self) -> dict[str, Tensor]:
        return load_file(self.folder / "model.safetensors")


@pytest.fixture
def stored(tmp_path: Path) -> Stored:
    tiny_checkpoints.save(CASE, tmp_path, max_shard_size="1GB")
    source = locate(str(tmp_path))
    return Stored(tmp_path, parse_config(source.config, source.generation_config))


def quantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Codes and a scale for every matrix that is no table."""
    result = {}
    for name, tensor in tensors.items():
        if tensor.dim() != 2 or any(table in name for table in TABLES):
            result[name] = tensor
            continue
        scale = tensor.abs().max().reshape(1) / 127
        result[name] = (tensor / scale).round().to(torch.int8)
        result[f"{name}_scale"] = scale
    return result


def dequantised(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: tensor * tensors[f"{name}_scale"] if tensor.dtype == torch.int8 else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }


def build(config: ModelConfig, formats: WeightFormats = DENSE) -> CausalLM:
    placement = Placement(CPU, torch.float32, formats)
    return architecture(config.model_type).build(config, parallel=Parallel(), placement=placement)


def load(tensors: dict[str, Tensor], model: CausalLM, folder: Path) -> CausalLM:
    """Fill `model` from a file of `tensors`, whose names are canonical."""
    save_file(tensors, folder / "model.safetensors")
    names = {name: name for name in tensors}
    with open_checkpoint(folder) as checkpoint:
        copy_weights(checkpoint, names, model.destinations(), module=model, model="tiny")
    return model


def logits(model: CausalLM, config: ModelConfig) -> Tensor:
    tokens = torch.arange(4, 24)
    hidden = model(tokens, torch.arange(20), FakeContext(config, model.attention_sinks())).hidden
    return model.logits(hidden)


class Moved(type(DENSE.linear)):
    """Puts each weight into other memory when it is filled."""

    def finish(self, weight: DenseMatrix) -> None:
        before = StorageWeakRef(weight.weight.untyped_storage())
        weight.weight.data = weight.weight.clone()
        assert before.expired(), "who filled it keeps a second copy"


def test_what_finish_replaces_is_given_back_at_once(stored: Stored) -> None:
    tensors, wanted = stored.tensors(), build(stored.config)
    load(tensors, wanted, stored.folder)
    moved = load(tensors, build(stored.config, DENSE._replace(linear=Moved())), stored.folder)
    assert torch.equal(logits(moved, stored.config), logits(wanted, stored.config))


def test_a_model_in_another_format_computes_what_its_weights_stand_for(stored: Stored) -> None:
    codes = quantised(stored.tensors())
    ours = load(codes, build(stored.config, INT8), stored.folder)
    dense = load(dequantised(codes), build(stored.config), stored.folder)
    layer = ours.decoder.layers[0]
    assert layer.attention.qkv.codes.dtype == layer.mlp.down.codes.dtype == torch.int8
    expected = logits(dense, stored.config)
    error = (logits(ours, stored.config) - expected).abs().max() / expected.abs().max()
    assert error < 1e-5


def test_a_scale_that_the_checkpoint_lacks_is_named(stored: Stored) -> None:
    codes = quantised(stored.tensors())
    del codes["model.layers.1.mlp.up_proj.weight_scale"]
    with pytest.raises(WeightsError, match=r"1 missing \(.*layers\.1\.mlp\.up_proj\.weight_scale"):
        load(codes, build(stored.config, INT8), stored.folder)


def test_a_scale_that_a_format_forgets_to_derive_is_seen(stored: Stored) -> None:
    forgetful = DENSE._replace(linear=Int8Linear(forgets=True))
    with pytest.raises(WeightsError) as caught:
        load(quantised(stored.tensors()), build(stored.config, forgetful), stored.folder)
    rows = stored.config.layers[0].heads.num_kv_heads * stored.config.layers[0].heads.head_dim
    assert str(caught.value) == (
        "scales of 'decoder.layers.0.attention.qkv' of 'tiny' must be numbers, all of them, got "
        f"{rows} that nothing wrote, or NaN; check that the checkpoint holds every scale of its "
        "quantised tensors"
    )


def test_a_scale_of_a_fused_layer_that_overwrites_another_is_seen(stored: Stored) -> None:
    sharing = DENSE._replace(linear=Int8Linear(shares=True))
    text = r"parameter 'decoder\.layers\.0\.attention\.qkv\.scale' of 'tiny' .*, got some that none"
    with pytest.raises(WeightsError, match=text):
        load(quantised(stored.tensors()), build(stored.config, sharing), stored.folder)


def test_numbers_of_another_format_are_not_cast(stored: Stored) -> None:
    codes = quantised(stored.tensors())
    name = "model.layers.0.mlp.up_proj.weight"
    codes[name] = codes[name].float()
    with pytest.raises(WeightsError, match=r"up_proj\.weight' must be I8 \[.*got F32 \["):
        load(codes, build(stored.config, INT8), stored.folder)


def test_noise_is_finished_as_weights_are(stored: Stored) -> None:
    finished: list[Tensor] = []

    @dataclass(frozen=True)
    class Watched(type(DENSE.linear)):
        def finish(self, weight: NamedTuple) -> None:
            finished.append(weight.weight)
            assert not torch.equal(weight.weight, torch.zeros_like(weight.weight))

    model = build(stored.config, DENSE._replace(linear=Watched()))
    fill_dummy(model, seed=0)
    assert len(finished) == 4 * stored.config.num_layers  # qkv, out, gate and up, down
    assert len(held_by(model)) == len(finished) + 2  # the tables


def without_one(named: Named) -> None:
    del named["model.layers.1.self_attn.k_proj.weight"]


def twice(named: Named) -> None:
    [block] = named["model.layers.1.self_attn.k_proj.weight"].blocks
    named["again"] = wholly(block.into[2:3])


def swapped(named: Named) -> None:
    """As many numbers as there are, but some twice and some never."""
    layer = "model.layers.1.self_attn"
    named[f"{layer}.k_proj.weight"] = named[f"{layer}.v_proj.weight"]


def every_second_row(named: Named) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    [block] = named[name].blocks
    named[name] = wholly(block.into[::2])


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (without_one, "some that none fills"),
        (twice, "some that 2 fill"),
        (swapped, "some that none fills"),
        (every_second_row, "some that none fills"),
    ],
)
@pytest.mark.parametrize("by_columns", [True, False])
def test_a_parameter_that_is_not_filled_once_is_named(
    stored: Stored, change: Callable[[Named], None], got: str, by_columns: bool
) -> None:
    dtype = torch.float32 if by_columns else torch.float16
    model = architecture(stored.config.model_type).build(
        stored.config, parallel=Parallel(), placement=Placement(CPU, dtype, DENSE)
    )
    assert model.decoder.layers[0].attention.qkv.weight.is_contiguous() is not by_columns
    named = model.destinations()
    coverage.require_filled_once(model, named, model="tiny")
    change(named)
    with pytest.raises(WeightsError) as caught:
        coverage.require_filled_once(model, named, model="tiny")
    assert str(caught.value) == (
        "parameter 'decoder.layers.1.attention.qkv.weight' of 'tiny' must be each number filled by "
        f"one tensor of the checkpoint, got {got}; name the tensors of this part in models/ as its "
        "format holds them"
    )


@pytest.mark.parametrize("case", sorted(tiny_checkpoints.CASES))
def test_every_architectures_names_fill_every_parameter_once(case: str) -> None:
    config = parse_config(tiny_checkpoints.make(case).config.to_dict())
    model = build(config)
    for parameter in model.parameters():
        parameter.zero_()
    for target in model.destinations().values():
        for block in target.blocks:
            block.into.add_(1.0)
    assert all((parameter == 1.0).all() for parameter in model.parameters())
    coverage.require_filled_once(model, model.destinations(), model=case)
