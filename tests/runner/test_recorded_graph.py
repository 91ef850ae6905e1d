"""The recorded graph keeps a CUDA graph's contract: frozen Python, frozen addresses, no host."""

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from refused_cases import METHODS, OPERATORS, REMEDY
from tiny_runner import Driver, TinyModel, random_prompts
from torch import Tensor, nn

from paceline.core.errors import GraphError, HostReadError
from paceline.kernels.paged_attention import PagedCache, PagedCall, PagedRows, Weighing
from paceline.kernels.paged_attention_cpu import paged_attention_cpu
from paceline.runner.recording.arena import Arena
from paceline.runner.recording.host_reads import (
    INDEX_OPERATORS,
    REFUSED_METHODS,
    REFUSED_OPERATORS,
    check_operator,
)
from paceline.runner.recording.recorded import GraphTooLarge, RecordedGraph


def held_bytes(graph: RecordedGraph) -> int:
    """Of all storages the capture allocated."""
    return sum(piece.nbytes for piece in graph._pieces)


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
    address, held = seen[0].data_ptr(), held_bytes(graph)
    x.fill_(0.5)
    graph.replay()
    assert len(seen) == 1
    assert torch.allclose(seen[0], torch.full((3,), 0.5).mul(2).exp())
    assert seen[0].data_ptr() == address
    assert held_bytes(graph) == held == 2 * 3 * 4


def test_graphs_of_one_arena_answer_in_any_order() -> None:
    """Each lies over the others, and the arena grows below those laid before."""
    arena, graphs, outs, functions = Arena(), [], [], []
    x, ids = torch.randn(4, 16), torch.tensor([0, 1, 1, 7])
    for size in (3, 700, 40):
        wide, sums = torch.ones(size, dtype=torch.float64), torch.zeros(size, dtype=torch.float64)
        outs += [torch.zeros(4, 16), sums]
        functions += [
            many_operators(x, ids, outs[-2]),
            lambda wide=wide, sums=sums: sums.copy_((wide * x.sum()).cumsum(0)),
        ]
    for function in functions:
        graphs.append(RecordedGraph(poison=True, arena=arena))
        graphs[-1].capture(function)
    assert arena.nbytes >= max(held_bytes(graph) for graph in graphs)
    assert arena.nbytes < sum(held_bytes(graph) for graph in graphs)
    for order in ([0, 1, 2, 3, 4, 5], [5, 3, 1, 4, 2, 0]):
        x.normal_()
        with torch.no_grad():
            for function in functions:
                function()
        wanted = [out.clone() for out in outs]
        for index in order:
            outs[index].zero_()
            graphs[index].replay()
            assert torch.equal(outs[index], wanted[index])


def test_a_result_that_is_kept_is_that_of_the_last_replay() -> None:
    """What a function hands out lies in the arena too: views of it, and other dtypes."""
    x, kept = torch.ones(6), []
    graph = captured(lambda: kept.extend([(x * 2), (x * 2).view(2, 3)[1], x.bfloat16() + 1]))
    x.fill_(4.0)
    graph.replay()
    assert [each.tolist() for each in kept] == [[8.0] * 6, [8.0] * 3, [5.0] * 6]


def test_a_graph_beyond_the_limit_of_its_arena_is_refused_and_takes_nothing() -> None:
    arena, x = Arena(limit_bytes=100), torch.ones(20)
    graph = RecordedGraph(poison=False, arena=arena)
    wanted = (
        "bytes of a recorded graph's intermediates must be at most 100, got 160 and more; run the "
        "step without a graph"
    )
    with pytest.raises(GraphTooLarge, match=re.escape(wanted)):
        graph.capture(lambda: (x * 2).exp())
    assert arena.nbytes == 0


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
    clean.replay()
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


def refused(function: Callable[[Tensor], Any]) -> str:
    y = torch.zeros(4)
    with pytest.raises(HostReadError) as caught:
        captured(lambda: function(y))
    return str(caught.value)


def test_every_refused_method_is_tried_below() -> None:
    assert set(METHODS) == set(REFUSED_METHODS)


@pytest.mark.parametrize("method", METHODS)
def test_a_method_that_reads_on_the_host_is_refused_by_name(method: str) -> None:
    assert refused(METHODS[method]) == (
        f"a recorded region must be device-only with static shapes, got 'Tensor.{method}' "
        f"(reads a device value on the host); {REMEDY}"
    )


@pytest.mark.parametrize("case", OPERATORS)
def test_an_operator_no_graph_can_hold_is_refused_by_name(case: str) -> None:
    function, name, why = OPERATORS[case]
    text = refused(function)
    assert f"must be device-only with static shapes, got '{name}" in text
    assert any(part in text for part in why.split("|")), text
    assert text.endswith(REMEDY)


def test_every_operator_refused_by_name_is_tried_above() -> None:
    assert {name for _, name, _ in OPERATORS.values()} >= {*REFUSED_OPERATORS, *INDEX_OPERATORS}


def operators_tagged(tag: torch.Tag) -> list[Any]:
    """Every aten operator that torch marks with `tag`."""
    found = []
    for full_name in torch._C._dispatch_get_all_op_names():
        namespace, _, name = full_name.partition("::")
        packet, _, overload = name.partition(".")
        if namespace == "aten" and hasattr(torch.ops.aten, packet):
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default", None)
            if operator is not None and tag in operator.tags:
                found.append(operator)
    return found


@pytest.mark.parametrize(
    ("tag", "why"),
    [
        (torch.Tag.data_dependent_output, "its result is a host value"),
        (torch.Tag.dynamic_output_shape, "its shape depends on data"),
        (torch.Tag.nondeterministic_seeded, "its random state would be frozen"),
    ],
    ids=str,
)
def test_every_operator_that_torch_tags_is_refused(tag: torch.Tag, why: str) -> None:
    operators = operators_tagged(tag)
    tried = {name for _, name, reason in OPERATORS.values() if reason == why}
    assert tried & {operator._schema.name for operator in operators}, "no case above has the tag"
    for operator in operators:
        if operator._schema.name in INDEX_OPERATORS:
            continue  # refused with a mask alone
        arguments = {argument.name for argument in operator._schema.arguments}
        options = {"dropout_p": 0.1} if "dropout_p" in arguments else {}
        with pytest.raises(HostReadError, match=why):
            check_operator(operator, (), options)


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
        found = torch.empty_like(q)
        rows = PagedRows(pages, prefix, prefix + 1, offsets, max_extend_len=1)
        paged_attention_cpu(PagedCall(q, PagedCache(k, v), rows, Weighing(0.3), found, None))
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


def test_intermediates_made_in_inference_mode_move_into_the_arena():
    """A library may plan in that mode; its tensors take no write outside of it."""
    given, result = torch.arange(4.0), torch.empty(4)

    def function():
        with torch.inference_mode():
            doubled = given * 2
        result.copy_(doubled + 1)

    graph = RecordedGraph(poison=True)
    graph.capture(function)
    given.add_(1)
    graph.replay()
    assert result.tolist() == [3.0, 5.0, 7.0, 9.0]
