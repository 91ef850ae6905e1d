"""Who runs the layers that mix otherwise than by attention, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from example_state_backend import PART, SumBackend
from tiny_runner import make_tiny
from torch import Tensor

from paceline.attention import mixers
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import GraphSupport
from paceline.attention.linear.inputs import GdnInputs, Mamba2Inputs, made_rates
from paceline.attention.registry import Choice
from paceline.attention.states import StateConfig, unsupported_reasons
from paceline.cache.pool import KVFormat
from paceline.core.errors import BackendUnsupported, ConfigError, ModelError
from paceline.core.model.config import Heads, LayerSpec, RowPart
from paceline.core.modes import MaskKind
from paceline.core.parallel import Parallel
from paceline.kernels.gated_norm import Gate, GatedRows, gated_rows_reference
from paceline.layers.decoders.mixer_layer import MixerLayer
from paceline.layers.mixers.gated_delta import GatedDeltaNet
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.rank_sum import Delta, Unscaled, total
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.config import parse_config
from paceline.speculate.draft_cache import DraftCache

ATTENDS = LayerSpec(heads=Heads(2, 1, 8, 8))
SUMS = LayerSpec(mixer="sum", state=(RowPart(PART, (3,), dtype="float32"),))


class Halving(SumBackend):
    def __init__(self) -> None:
        super().__init__(0.5)


class Strange(Halving):
    kind = "twist"


class HasNoTrees(Halving):
    name = "no-trees"
    capabilities = replace(SumBackend.capabilities, masks=frozenset({MaskKind.CAUSAL}))


OURS, NO_TREES = f"{__name__}:Halving", f"{__name__}:HasNoTrees"


def wanted(layer: LayerSpec) -> StateConfig:
    """Rounds of trees in float32 on a CPU."""
    return StateConfig(
        device_type="cpu",
        dtype=torch.float32,
        masks=frozenset({MaskKind.TREE}),
        parts=layer.state,
        state_every=8,
        graph=GraphSupport.NEVER,
    )


def register(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    monkeypatch.setitem(mixers.REGISTRIES, "sum", targets)


def test_one_backend_runs_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, ours=OURS)
    chosen = mixers.choose_mixers([ATTENDS, SUMS, SUMS], None, wanted)
    found = mixers.load_mixers(chosen)
    assert list(found) == ["sum"]
    assert type(found["sum"]).__name__ == "Halving"


def test_a_model_that_attends_alone_has_none() -> None:
    assert mixers.choose_mixers([ATTENDS, ATTENDS], None, wanted) == {}


def test_a_kind_without_a_backend_is_refused() -> None:
    with pytest.raises(
        ModelError, match=r"mixer of layer 1 must be one of softmax, gdn, mamba2, got 'sum'; "
    ):
        mixers.choose_mixers([ATTENDS, SUMS], "auto", wanted)


def test_auto_takes_the_first_that_can_run_and_says_why_not_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    register(monkeypatch, bare=NO_TREES, ours=OURS, spare=OURS)
    found = mixers.choose_mixers([SUMS], "auto", wanted)["sum"]
    assert found == Choice(
        name="ours",
        why="first of bare, ours, spare that can run on cpu",
        rejected={"bare": ["mask tree, of causal"], "spare": ["auto prefers ours"]},
    )


def test_where_none_can_run_every_reason_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, bare=NO_TREES)
    with pytest.raises(BackendUnsupported) as caught:
        mixers.choose_mixers([SUMS], None, wanted)
    assert str(caught.value) == (
        "linear attention backend 'auto' cannot run here:\n"
        "  - bare: mask tree, of causal\n"
        "name one that can with --linear-attention-backend, or change what is asked of it"
    )


@pytest.mark.parametrize("name", ["ours", OURS])
def test_one_that_is_named_runs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, ours=OURS)
    found = mixers.choose_mixers([SUMS], name, wanted)
    assert found["sum"] == Choice(name=name, why="asked for", rejected={})
    assert type(mixers.load_mixers(found)["sum"]).__name__ == "Halving"


def test_one_that_is_named_and_cannot_run_is_refused() -> None:
    with pytest.raises(BackendUnsupported) as caught:
        mixers.choose_mixers([SUMS], NO_TREES, wanted)
    assert caught.value.reasons == ["mask tree, of causal"]
    assert "or 'auto' to let the engine choose" in str(caught.value)


def test_an_unknown_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, ours=OURS)
    with pytest.raises(ConfigError) as caught:
        mixers.choose_mixers([SUMS], "our", wanted)
    assert str(caught.value) == (
        "linear attention backend of mixer sum must be ours, package.module:Class, got 'our'; "
        "did you mean ours?"
    )


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"device_types": frozenset({"cuda"})}, "device cpu, of cuda"),
        ({"dtypes": frozenset({torch.float16})}, "dtype torch.float32, of torch.float16"),
        ({"masks": frozenset({MaskKind.CAUSAL})}, "mask tree, of causal"),
        (
            {"graph": GraphSupport.UNIFORM},
            "graphs of always steps, of uniform: --enforce-eager runs without",
        ),
        (
            {"part_dtypes": frozenset({torch.bfloat16, torch.float16})},
            "part 'state' of torch.float32, of torch.bfloat16, torch.float16",
        ),
        ({"max_conv_width": 4}, "convolution over 5 tokens, of up to 4"),
        (
            {"chunk": 64},
            "states kept every 96 tokens, of multiples of its chunk of 64: set "
            "--state-checkpoint-every to one",
        ),
    ],
    ids=["device", "dtype", "mask", "graph", "state dtype", "convolution", "interval"],
)
def test_each_reason_against_a_backend(change: dict[str, Any], reason: str) -> None:
    asked = StateConfig(
        device_type="cpu",
        dtype=torch.float32,
        masks=frozenset({MaskKind.TREE}),
        parts=(RowPart("conv", (6, 4)), RowPart("state", (2, 3, 4), dtype="float32")),
        state_every=96,
        graph=GraphSupport.ALWAYS,
    )
    can = replace(
        SumBackend.capabilities,
        part_dtypes=frozenset({torch.float32}),
        max_conv_width=5,
        chunk=32,
    )
    assert unsupported_reasons(can, asked) == []
    assert unsupported_reasons(replace(can, **change), asked) == [reason]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            f"{__name__}:Strange",
            f"backend ours of mixer sum must be of kind sum, got {__name__}:Strange of kind "
            "twist; name one of the kind of the model's layers, and register it under its own",
        ),
        (
            "paceline.attention.backends.torch_backend:TorchBackend",
            "state backend must be a subclass of StateBackend, got "
            "'paceline.attention.backends.torch_backend:TorchBackend', a ABCMeta; "
            "derive it from paceline.attention.states.StateBackend",
        ),
    ],
    ids=["another mixer", "attention"],
)
def test_a_backend_of_the_wrong_kind_is_refused(
    target: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, ours=target)
    with pytest.raises(ConfigError) as caught:
        mixers.choose_mixers([SUMS], None, wanted)
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (SUMS, "sum, whose cache group is of kind state"),
        (
            LayerSpec(heads=Heads(1, 1, 8, 8), reads_encoder=True),
            "softmax, whose cache group is of kind encoder",
        ),
    ],
)
def test_a_drafter_with_such_a_layer_is_refused(layer: LayerSpec, got: str, tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path)
    with pytest.raises(
        ModelError,
        match=f"mixer of layer 0 of the drafter must be softmax over its own tokens, got {got}",
    ):
        DraftCache(
            replace(tiny.config, layers=(layer,)),
            (),
            (),
            TorchBackend(),
            max_reqs=1,
            max_tokens=1,
            length=1,
            num_passes=1,
            kv=KVFormat(dtype=torch.float32),
            dtype=torch.float32,
            device=torch.device("cpu"),
            sinks=(),
        )


def test_rates_have_memory_of_their_own() -> None:
    """Where each key head has one value head, what a product gives is a view with strides."""
    config = parse_config(
        {"model_type": "qwen3_next", "hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1}
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "num_experts": 1}
        | {"num_experts_per_tok": 1}
        | {"linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 4}
        | {"linear_value_head_dim": 4, "layer_types": ["linear_attention"]}
    )
    given: list[GdnInputs] = []

    class Context:
        def mix(self, layer_id: int, inputs: GdnInputs) -> Tensor:
            given.append(inputs)
            return torch.zeros(3, 2, 4)

    placement = Placement(torch.device("cpu"), torch.float32, DENSE)
    layer = GatedDeltaNet(config, 0, parallel=Parallel(), placement=placement)
    layer(torch.zeros(3, 8), torch.arange(3), Context())
    [inputs] = given
    for made in made_rates(inputs.rates):
        assert made.is_contiguous()


@pytest.mark.parametrize(
    ("changed", "dtype", "is_left"),
    [
        ({}, torch.bfloat16, True),
        ({}, torch.float16, False),  # which rows without a scale may exceed
        ({"n_groups": 2}, torch.bfloat16, False),
        ({"use_bias": True}, torch.bfloat16, False),
    ],
)
def test_a_scale_is_left_to_the_norm_behind_where_it_is_as_good_there(
    changed: dict[str, object], dtype: torch.dtype, is_left: bool
) -> None:
    """And where the backend gates at once: the same numbers as where it does not."""
    sizes = {"model_type": "mamba2", "hidden_size": 8, "vocab_size": 9, "num_hidden_layers": 1}
    sizes |= {"num_heads": 4, "head_dim": 4, "state_size": 4, "n_groups": 1, "use_bias": False}
    config = parse_config(sizes | {"layer_norm_epsilon": 0.25} | changed)
    placement = Placement(torch.device("cpu"), dtype, DENSE)
    mixer = Mamba2(config, 0, parallel=Parallel(), placement=placement)
    layer = MixerLayer(config, mixer, parallel=Parallel(), placement=placement)
    source = torch.Generator().manual_seed(0)
    for parameter in layer.parameters():
        parameter.copy_(torch.rand(parameter.shape, generator=source))

    class Context:
        def __init__(self, *, gates: bool) -> None:
            self.gates = gates

        def mix(self, layer_id: int, inputs: Mamba2Inputs) -> Tensor:
            return inputs.xbc[:, :16].unflatten(1, (4, 4))

        def mix_gated(self, layer_id: int, inputs: Mamba2Inputs, gate: Gate) -> GatedRows | None:
            return gated_rows_reference(inputs.xbc[:, :16], gate) if self.gates else None

    def deltas(*, gates: bool) -> list[Delta]:
        """Of all rows and of two of them."""
        stream = torch.randn(3, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
        args = (None, stream, torch.arange(3), Context(gates=gates))
        return [layer(*args, rows).delta for rows in (None, torch.tensor([2, 0]))]

    found, plain = deltas(gates=True), deltas(gates=False)
    assert [isinstance(each, Unscaled) for each in found] == [is_left] * 2
    for mine, theirs in zip(found, plain, strict=True):
        assert isinstance(theirs, Tensor)
        torch.testing.assert_close(total(mine), theirs, rtol=0.04, atol=0.04)
