"""Fused layers equal their unfused formulas, and checkpoint tensors cover them exactly."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.model.config import MoEConfig, NormKind
from paceline.core.parallel import Parallel, whole
from paceline.kernels.linear import add_linear
from paceline.kernels.packed_weight import FP8, Packing
from paceline.kernels.stand_in import StandIn
from paceline.layers import rank_sum
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.embedding import Embedding, LMHead, root_scale
from paceline.layers.linear import GateUpLinear, Linear, QKVLinear
from paceline.layers.mlp import GatedMLP
from paceline.layers.moe import SparseMLP
from paceline.layers.rank_sum import Product, ProductParts, add_, leave_sums, rows_of, total
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights import dense, packed
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Destination
from paceline.models import tensor_names

CPU = Placement(torch.device("cpu"), torch.float32, DENSE)
PARALLEL = Parallel()


def filled(module: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.normal_()
    return module


def held(target: Destination) -> Tensor:
    """What a stored tensor fills whole."""
    [block] = target.blocks
    return block.into


def qkv(bias: bool) -> QKVLinear:
    return QKVLinear(
        12, num_heads=3, num_kv_heads=1, head_dim=4, bias=bias, parallel=PARALLEL, placement=CPU
    )


EXPERTS = MoEConfig(
    layers=(True,),
    num_experts=3,
    experts_per_token=2,
    intermediate_size=5,
    renormalize=True,
    bias=False,
)
MODULES = {
    "linear": lambda: Linear(whole(6), whole(4), bias=True, placement=CPU),
    "qkv": lambda: qkv(bias=True),
    "gate_up": lambda: GateUpLinear(6, whole(8), activation="silu", bias=True, placement=CPU),
    "mlp": lambda: GatedMLP(6, 8, activation="silu", bias=True, parallel=PARALLEL, placement=CPU),
    "experts": lambda: SparseMLP(6, EXPERTS, parallel=PARALLEL, placement=CPU),
}
QKV = ("q_proj", "k_proj", "v_proj")
NAMED = {
    "linear": partial(tensor_names.name_linear, prefix="x"),
    "qkv": partial(tensor_names.name_rows, parts=QKV, prefix="x"),
    "gate_up": partial(tensor_names.name_rows, parts=("gate_proj", "up_proj"), prefix="x"),
    "mlp": partial(tensor_names.name_feed_forward, prefix="x"),
    "experts": partial(tensor_names.name_feed_forward, prefix="x"),
}


@pytest.mark.parametrize("name", sorted(MODULES))
def test_names_cover_every_element_exactly_once(name: str) -> None:
    module = MODULES[name]()
    for parameter in module.parameters():
        parameter.zero_()
    for target in NAMED[name](module).values():
        for block in target.blocks:
            block.into.add_(1.0)
    assert all((parameter == 1.0).all() for parameter in module.parameters())


@pytest.mark.parametrize("bias", [False, True])
def test_fused_qkv_equals_three_products(bias: bool) -> None:
    layer = filled(qkv(bias))
    named = tensor_names.name_rows(layer, QKV, "attn")
    x = torch.randn(5, 12)
    for out, name, heads in zip(layer(x), "qkv", (3, 1, 1), strict=True):
        weight, stored_bias = (named.get(f"attn.{name}_proj.{kind}") for kind in ("weight", "bias"))
        expected = F.linear(x, held(weight), held(stored_bias) if bias else None)
        torch.testing.assert_close(out, expected.view(5, heads, 4))


@pytest.mark.parametrize(
    ("activation", "formula"),
    [
        ("silu", F.silu),
        ("swish", F.silu),
        ("gelu", F.gelu),
        ("gelu_new", lambda g: F.gelu(g, approximate="tanh")),
        ("gelu_pytorch_tanh", lambda g: F.gelu(g, approximate="tanh")),
        ("relu", F.relu),
    ],
)
def test_mlp_gates_up_with_the_named_activation(activation: str, formula: object) -> None:
    layer = filled(
        GatedMLP(6, 8, activation=activation, bias=False, parallel=PARALLEL, placement=CPU)
    )
    named = tensor_names.name_mlp(layer, "mlp")
    x = torch.randn(5, 6)

    def product(name: str, value: Tensor) -> Tensor:
        return F.linear(value, held(named[f"mlp.{name}_proj.weight"]))

    expected = product("down", formula(product("gate", x)) * product("up", x))
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize(
    ("fits", "kind"), [("fits_parts", ProductParts), ("fits_add_linear", Product)]
)
def test_what_an_mlp_leaves_is_added_by_the_norm_behind_it(
    fits: str, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Left where somebody behind adds it; of some rows, too."""
    monkeypatch.setattr(dense, fits, lambda *operands: True)
    layer = filled(GatedMLP(6, 8, activation="silu", bias=False, parallel=PARALLEL, placement=CPU))
    norm = filled(RMSNorm(6, 1e-6, placement=CPU))
    x, residual = torch.randn(5, 6), torch.randn(5, 6)
    whole_sum = layer(x)
    assert isinstance(whole_sum, Tensor)
    leave_sums(layer.down)
    left = layer(x)
    assert isinstance(left, kind)
    torch.testing.assert_close(total(left), whole_sum)
    torch.testing.assert_close(add_(residual.clone(), left), residual + whole_sum)
    for rows in (torch.arange(5), torch.tensor([3, 1])):
        streams = residual[rows].clone(), residual[rows].clone()
        found = norm.add(rows_of(left, rows), streams[0])
        torch.testing.assert_close(found, norm.add(rows_of(whole_sum, rows), streams[1]))
        torch.testing.assert_close(*streams)


def test_a_layers_products_are_in_the_stream_that_it_hands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of the rows that go on alone."""
    mixed, fed = (Product(torch.randn(5, 3), torch.randn(4, 3)) for _ in range(2))
    made: list[int] = []

    class Layer(DecoderLayer):
        def mix(self, delta, residual, positions, ctx):
            return mixed

        def feed(self, mixed, residual, ctx, rows):
            assert mixed is None
            return fed if rows is None else rows_of(fed, rows)

    def added(x: Tensor, weight: Tensor, stream: Tensor) -> None:
        made.append(x.shape[0])
        add_linear(x, weight, stream)

    monkeypatch.setattr(rank_sum, "add_linear", added)
    stream = torch.randn(5, 4)
    whole = stream + total(mixed) + total(fed)
    for rows in (torch.tensor([3, 1]), None):
        delta, residual = Layer()(None, stream.clone(), torch.arange(5), None, rows)
        assert delta is None
        torch.testing.assert_close(residual, whole if rows is None else whole[rows])
    assert made == [2, 2, 5, 5]


def test_a_bias_is_added_to_a_whole_product(monkeypatch: pytest.MonkeyPatch) -> None:
    for fits in ("fits_parts", "fits_add_linear"):
        monkeypatch.setattr(dense, fits, lambda *operands: True)
    layer = filled(GatedMLP(6, 8, activation="silu", bias=True, parallel=PARALLEL, placement=CPU))
    leave_sums(layer.down)
    assert isinstance(layer(torch.randn(5, 6)), Tensor)


def test_norm_adds_into_the_residual_and_neutral_is_the_identity_factor() -> None:
    for kind in NormKind:
        norm = RMSNorm(16, 1e-6, placement=CPU, kind=kind)
        norm.neutral_()
        delta, residual = torch.randn(3, 16), torch.randn(3, 16)
        expected = delta + residual
        out = norm.add(delta, residual)
        torch.testing.assert_close(residual, expected)
        torch.testing.assert_close(out, F.rms_norm(expected, (16,), None, 1e-6))


def test_gemmas_embedding_scale_is_rounded_to_the_dtype_of_the_table() -> None:
    placement = Placement(torch.device("cpu"), torch.bfloat16, DENSE)
    scale = root_scale(3072, torch.bfloat16)
    assert scale == 55.5
    embedding = filled(Embedding(9, 8, scale=scale, placement=placement))
    ids = torch.tensor([3, 0, 8])
    assert torch.equal(embedding(ids), embedding.weight[ids] * scale)


def test_a_tied_head_shares_the_table_and_owns_nothing() -> None:
    embedding = filled(Embedding(9, 4, scale=None, placement=CPU))
    head = LMHead(9, 4, tied=embedding, soft_cap=None, parallel=PARALLEL, placement=CPU)
    assert not list(head.parameters())
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(head(hidden), F.linear(hidden, embedding.weight))


def test_the_head_caps_logits_smoothly_in_float32() -> None:
    placement = Placement(torch.device("cpu"), torch.bfloat16, DENSE)
    head = filled(LMHead(9, 4, tied=None, soft_cap=2.0, parallel=PARALLEL, placement=placement))
    hidden = torch.randn(3, 4, dtype=torch.bfloat16) * 4
    logits = head(hidden)
    raw = F.linear(hidden, head.weight).float()
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, 2.0 * torch.tanh(raw / 2.0))


def test_the_head_leaves_uncapped_logits_in_the_dtype_of_the_model() -> None:
    placement = Placement(torch.device("cpu"), torch.bfloat16, DENSE)
    head = filled(LMHead(9, 4, tied=None, soft_cap=None, parallel=PARALLEL, placement=placement))
    hidden = torch.randn(3, 4).bfloat16()
    assert torch.equal(head(hidden), torch.nn.functional.linear(hidden, head.weight))
    assert head(hidden).dtype == torch.bfloat16


@pytest.mark.parametrize(("rows", "is_rounded"), [((256, 128), True), ((64, 64), False)])
def test_parts_that_end_within_a_block_are_multiplied_as_numbers(
    rows: tuple[int, int], is_rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    monkeypatch.setattr(packed, "scaled_linear", lambda x, *weight: taken.append(x) or x)
    blocks = Packing(FP8, 128, False, torch.float32, shared_rows=128, rounds_inputs=True)
    placement = Placement(torch.device("meta"), torch.bfloat16, DENSE)
    layer = packed.PackedLinear(blocks)
    with StandIn("cuda", None, (9, 0)):
        weight = layer.allocate(
            [whole(n) for n in rows], whole(512), bias=False, placement=placement
        )
        layer.apply(torch.empty(65, 512, dtype=torch.bfloat16, device="meta"), weight)
    assert bool(taken) == is_rounded
