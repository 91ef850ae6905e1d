"""The recorded graph keeps a CUDA graph's contract: frozen Python, frozen addresses, no host."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tiny_runner import Driver, TinyModel, random_prompts
from torch import Tensor, nn

from paceline.core.errors import GraphError, HostReadError
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention_cpu import paged_attention_cpu
from paceline.runner.host_reads import REFUSED_METHODS
from paceline.runner.recorded import RecordedGraph

REMEDY = "keep it in a device tensor, or split the step into segments before it"


def captured(function: Callable[[], Any], *, poison: bool = True) -> RecordedGraph:
    graph = RecordedGraph(poison=poison)
    graph.capture(function)
    return graph


def many_operators(x: Tensor, ids: Tensor, out: Tensor) -> Callable[[], None]:
    """A function over the kinds of operators a step holds: views, in place, out=, factories."""
    torch.manual_seed(3)
    linear, embedding = nn.Linear(16, 16), nn.Embedding(8, 16)

    def run() -> None:
        hidden = linear(x) + embedding(ids)
        hidden = nn.functional.rms_norm(hidden, (16,), None, 1e-5)
        heads = hidden.view(4, 2, 8).transpose(0, 1).reshape(2, 32).view(4, 16)
        added = torch.zeros(4, 16)
        added.index_add_(0, ids % 4, heads)
        ranked, order = heads.sort(-1, descending=True)
        first, second = ranked.chunk(2, -1)
        mixed = torch.where(heads > 0, added, ranked).masked_fill(order > 12, 0.5)
        mixed = torch.cat((mixed[:, :8] * first, mixed[:, 8:] + second), -1)
        top = mixed.topk(3, -1)
        out.copy_(mixed.softmax(-1) + torch.arange(16) + top.values.sum(-1, keepdim=True))
        out[:, :2] += torch.cumsum(heads, -1)[:, :2]
        torch.add(out, heads.to(torch.bfloat16).float(), out=out)

    return run


def test_replay_equals_eager_on_new_data_in_the_same_storages() -> None:
    x, ids, out = torch.randn(4, 16), torch.tensor([0, 1, 1, 7]), torch.zeros(4, 16)
    function = many_operators(x, ids, out)
    graph = captured(function)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        ids.copy_(torch.randint(0, 8, (4,)))
        with torch.no_grad():
            function()
        wanted = out.clone()
        out.fill_(-1.0)
        graph.replay()
        assert torch.equal(out, wanted)


def test_capture_executes_once() -> None:
    counter = torch.zeros(1)
    graph = captured(lambda: counter.add_(1))
    assert counter == 1
    graph.replay()
    graph.replay()
    assert counter == 3


def test_a_python_number_changed_after_capture_changes_nothing() -> None:
    x, out, factor = torch.ones(3), torch.zeros(3), [2.0]
    graph = captured(lambda: out.copy_(x * factor[0]))
    factor[0] = 100.0
    x.fill_(5.0)
    graph.replay()
    assert out.tolist() == [10.0, 10.0, 10.0]


def test_python_does_not_run_in_a_replay() -> None:
    x, out, calls = torch.ones(3), torch.zeros(3), []

    def run() -> None:
        calls.append(1)
        out.copy_(x + 1)

    graph = captured(run)
    graph.replay()
    assert len(calls) == 1


def test_a_rebound_input_is_not_seen() -> None:
    """Addresses are frozen: a fresh tensor under an old name is not what a replay reads."""
    box, out = {"x": torch.ones(3)}, torch.zeros(3)
    graph = captured(lambda: out.copy_(box["x"] + 1))
    box["x"] = torch.full((3,), 50.0)
    graph.replay()
    assert out.tolist() == [2.0, 2.0, 2.0]


def test_intermediates_are_reused_by_every_replay() -> None:
    x, seen = torch.ones(3), []
    graph = captured(lambda: seen.append((x * 2).exp()))
    address, held = seen[0].data_ptr(), graph.intermediate_bytes()
    x.fill_(0.5)
    graph.replay()
    assert len(seen) == 1
    assert torch.allclose(seen[0], torch.full((3,), 0.5).mul(2).exp())
    assert seen[0].data_ptr() == address
    assert graph.intermediate_bytes() == held == 2 * 3 * 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32, torch.int64])
def test_poison_makes_a_value_carried_over_from_an_earlier_replay_visible(
    dtype: torch.dtype,
) -> None:
    """The function reads a tensor it made before writing it: in a graph, the last replay's."""
    x, out = torch.ones(3, dtype=dtype), torch.zeros(3, dtype=dtype)

    def carries() -> None:
        scratch = torch.empty(3, dtype=dtype)
        out.copy_(scratch)
        scratch.copy_(x)

    clean = captured(carries, poison=False)
    x.fill_(5)
    clean.replay()
    assert (out == 1).all()
    poisoned = captured(carries, poison=True)
    poisoned.replay()
    assert out.isnan().all() if dtype.is_floating_point else (out > 1 << 29).all()


def test_booleans_of_an_earlier_replay_are_poisoned() -> None:
    out = torch.zeros(3, dtype=torch.bool)

    def carries() -> None:
        scratch = torch.empty(3, dtype=torch.bool)
        out.copy_(scratch)
        scratch.zero_()

    graph = captured(carries, poison=True)
    graph.replay()
    assert out.all()


# --- what a graph cannot hold ---------------------------------------------------------------------

METHODS: dict[str, tuple[Callable[[Tensor], Any], str]] = {
    "__array__": (lambda y: np.asarray(y), "Tensor.__array__"),
    "__bool__": (lambda y: bool(y.sum() > 0), "Tensor.__bool__"),
    "__complex__": (lambda y: complex(y.sum()), "Tensor.__complex__"),
    "__contains__": (lambda y: 3.0 in y, "Tensor.__contains__"),
    "__dlpack__": (lambda y: np.from_dlpack(y), "Tensor.__dlpack__"),
    "__float__": (lambda y: float(y.sum()), "Tensor.__float__"),
    "__format__": (lambda y: f"{y.sum():.3f}", "Tensor.__format__"),
    "__index__": (lambda y: [1, 2, 3][y.sum().long()], "Tensor.__index__"),
    "__int__": (lambda y: int(y.sum()), "Tensor.__int__"),
    "__repr__": (lambda y: str(y), "Tensor.__repr__"),
    "cpu": (lambda y: y.cpu(), "Tensor.cpu"),
    "cuda": (lambda y: y.cuda(), "Tensor.cuda"),
    "item": (lambda y: y.sum().item(), "Tensor.item"),
    "numpy": (lambda y: y.numpy(), "Tensor.numpy"),
    "tolist": (lambda y: y.tolist(), "Tensor.tolist"),
}


def refused(function: Callable[[Tensor], Any]) -> str:
    y = torch.zeros(4)
    with pytest.raises(HostReadError) as caught:
        captured(lambda: function(y))
    return str(caught.value)


def test_every_refused_method_is_tried_below() -> None:
    assert set(METHODS) == set(REFUSED_METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_reads_on_the_host_is_refused_by_name(method: str) -> None:
    function, name = METHODS[method]
    assert refused(function) == (
        f"a recorded region must be device-only with static shapes, got '{name}' "
        f"(reads a device value on the host); {REMEDY}"
    )


OPERATORS: dict[str, tuple[Callable[[Tensor], Any], str, str]] = {
    "mask index": (lambda y: y[y > 0], "aten::index", "mask index depends on data"),
    "byte mask index": (
        lambda y: torch.ops.aten.index(y, [y.byte()]),
        "aten::index",
        "mask index depends on data",
    ),
    "mask assignment": (
        lambda y: torch.ops.aten.index_put_(y, [y > 0], y[:1]),
        "aten::index_put_",
        "mask index depends on data",
    ),
    "mask assignment of a number": (
        lambda y: y.__setitem__(y > 0, 1.0),
        "aten::",
        "mask index depends on data|host data enters the region",
    ),
    "masked_select": (
        lambda y: y.masked_select(y > 0),
        "aten::masked_select",
        "its shape depends on data",
    ),
    "nonzero": (lambda y: y.nonzero(), "aten::nonzero", "its shape depends on data"),
    "argwhere": (lambda y: y.argwhere(), "aten::nonzero", "its shape depends on data"),
    "one-argument where": (
        lambda y: torch.where(y > 0),
        "aten::nonzero",
        "its shape depends on data",
    ),
    "repeat_interleave by tensor": (
        lambda y: y.repeat_interleave(y.long()),
        "aten::repeat_interleave",
        "its shape depends on data",
    ),
    "unique": (lambda y: y.unique(), "aten::_unique2", "its shape depends on data"),
    "unique_consecutive": (
        lambda y: y.unique_consecutive(),
        "aten::unique_consecutive",
        "its shape depends on data",
    ),
    "bincount": (
        lambda y: y.long().bincount(),
        "aten::bincount",
        "its shape depends on data",
    ),
    "equal": (lambda y: torch.equal(y, y + 1), "aten::equal", "its result is a host value"),
    "allclose": (
        lambda y: torch.allclose(y, y + 1),
        "aten::",
        "its result is a host value",
    ),
    "is_nonzero": (
        lambda y: torch.is_nonzero(y.sum()),
        "aten::",
        "its result is a host value",
    ),
    "a 0-dim tensor as an index": (
        lambda y: y[y.sum().long()],
        "aten::_local_scalar_dense",
        "its result is a host value",
    ),
    "tensor of a list": (
        lambda y: y.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "tensor of an array": (
        lambda y: y.add_(torch.from_numpy(np.ones(4, dtype=np.float32))),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "as_tensor of a list": (
        lambda y: y.add_(torch.as_tensor([1.0, 2.0, 3.0, 4.0])),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "rand": (lambda y: torch.rand(4), "aten::rand", "its random state would be frozen"),
    "rand_like": (
        lambda y: torch.rand_like(y),
        "aten::rand_like",
        "its random state would be frozen",
    ),
    "in-place noise": (
        lambda y: y.normal_(),
        "aten::normal_",
        "its random state would be frozen",
    ),
    "multinomial": (
        lambda y: torch.multinomial(y + 1, 1),
        "aten::multinomial",
        "its random state would be frozen",
    ),
    "dropout": (
        lambda y: nn.functional.dropout(y, 0.5),
        "aten::",
        "its random state would be frozen",
    ),
    "a copy to another device": (
        lambda y: y.to("meta"),
        "aten::_to_copy",
        "it mixes devices ['cpu', 'meta']",
    ),
    "a copy from another device": (
        lambda y: y.copy_(torch.empty(4, device="meta")),
        "aten::copy_",
        "it mixes devices ['cpu', 'meta']",
    ),
}


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator_no_graph_can_hold_is_refused_by_name(case: str) -> None:
    function, name, why = OPERATORS[case]
    text = refused(function)
    assert f"must be device-only with static shapes, got '{name}" in text
    assert any(part in text for part in why.split("|")), text
    assert text.endswith(REMEDY)


def test_the_refusal_is_a_graph_error_and_leaves_nothing_switched_on() -> None:
    y = torch.arange(4.0)
    with pytest.raises(GraphError):
        captured(lambda: y.tolist())
    assert y.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert y[y > 1].numel() == 2


def test_host_numbers_of_a_shape_are_no_host_read() -> None:
    y, out = torch.arange(12.0).view(3, 4), torch.zeros(3)
    graph = captured(lambda: out.copy_(y.sum(-1) * y.shape[0] + y.numel() + len(y)))
    y.fill_(1.0)
    graph.replay()
    assert out.tolist() == [4.0 * 3 + 12 + 3] * 3


def test_integer_indices_are_allowed_and_replayed() -> None:
    y, index, out = torch.arange(8.0), torch.tensor([1, 3]), torch.zeros(8)

    def run() -> None:
        out.zero_()
        out[index] = y[index] * 2
        out[0] = y[5]

    graph = captured(run)
    index.copy_(torch.tensor([6, 2]))
    y.add_(1)
    graph.replay()
    assert out.tolist() == [6.0, 0, 6.0, 0, 0, 0, 14.0, 0]


def test_attention_without_dropout_draws_nothing_and_is_allowed() -> None:
    q, out = torch.randn(1, 2, 3, 8), torch.zeros(1, 2, 3, 8)
    attend = nn.functional.scaled_dot_product_attention
    graph = captured(lambda: out.copy_(attend(q, q, q)))
    q.normal_()
    graph.replay()
    assert torch.allclose(out, attend(q, q, q), atol=1e-6)


def test_an_opaque_operator_may_read_lengths() -> None:
    """Attention on the CPU is one operator: replayed whole, with the lengths of that moment."""
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 2, 8), torch.randn(4, 4, 1, 8), torch.randn(4, 4, 1, 8)
    pages = torch.tensor([[2, 1, 3]], dtype=torch.int32)
    prefix = torch.tensor([3], dtype=torch.int32)
    offsets = torch.tensor([0, 1], dtype=torch.int32)
    out = torch.zeros(1, 2, 8)

    def attend() -> Tensor:
        found, _ = paged_attention_cpu(
            q,
            k,
            v,
            pages,
            prefix,
            offsets,
            mask=MaskKind.CAUSAL,
            tree_mask=None,
            scale=0.3,
            window=None,
            soft_cap=None,
            prefix_only=False,
            wants_lse=False,
        )
        return found

    graph = captured(lambda: out.copy_(attend()))
    short = out.clone()
    prefix.fill_(9)
    graph.replay()
    assert torch.equal(out, attend())
    assert not torch.equal(out, short)


def test_a_decode_replay_does_not_call_the_model(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = random_prompts([9])
    driver = Driver(tiny)
    driver.prefill({1: prompt})
    driver.decode([1], steps=3)  # eager once, then captured

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("the model's Python ran")

    for module in (tiny.ours, tiny.ours.decoder, tiny.ours.head):
        monkeypatch.setattr(type(module), "forward", refuse)
    driver.decode([1], steps=16)
    assert driver.tokens[1] == tiny.greedy(prompt, 20)


def test_a_weight_rebound_after_capture_is_not_seen_and_one_written_in_place_is(
    tiny: TinyModel,
) -> None:
    x, out = torch.randn(2, 64), torch.zeros(2, 64)
    norm = copy.deepcopy(tiny.ours.decoder.norm)
    graph = captured(lambda: out.copy_(norm(x)))
    before = out.clone()
    norm.weight.data.mul_(2)
    graph.replay()
    assert torch.allclose(out, before * 2)
