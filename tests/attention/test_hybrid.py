"""One backend for prefill, another for decode: who gets which step, and that all is forwarded."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from attention_cases import Case, build, walk
from attention_runs import difference, run
from composed_cases import NoTree, facts, heard_by, hooks, listener

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.cascade import cascade
from paceline.attention.contract import (
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    Part,
)
from paceline.attention.hybrid import (
    MAX_DECODE_ROWS,
    HybridBuffers,
    HybridPlan,
    hybrid,
    may_serve,
    serves_decode,
)
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout, padded_step
from paceline.kernels.step_view import StepView
from paceline.runner.extents import PaddedSize

WANTED = AttentionConfig(
    device_type="cpu",
    cuda_arch=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=16,
    heads=(Heads(4, 2, 64, 64),),
    window=False,
    soft_cap=False,
    sinks=False,
    masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
    needs_lse=False,
    graph=GraphSupport.ALWAYS,
)
BASE = build(Case()).view


def a_step(
    extends: tuple[int, ...], *, is_ragged: bool = False, mask: MaskKind = MaskKind.CAUSAL
) -> Step:
    layout = StepLayout(
        rows=tuple(range(1, len(extends) + 1)),
        extend_lens=extends,
        emits=(True,) * len(extends),
        parents=tuple((-1, *range(extend - 1)) for extend in extends)
        if mask is MaskKind.TREE
        else None,
    )
    return Step(
        epoch=1,
        layout=layout,
        is_ragged=is_ragged,
        mask=mask,
        prefix_lens_bound=(3,) * len(extends),
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=(),
    )


def view_of(step: Step, size: PaddedSize) -> StepView:
    """A view of this padded shape; nobody reads what is in it."""
    return replace(
        BASE,
        row_ids=torch.empty(size.reqs),
        positions=torch.empty(size.tokens),
        mask=step.mask,
        max_extend_len=size.max_extend_len,
    )


def sizes(step: Step) -> Iterator[PaddedSize]:
    """Every shape a runner may give a step: as it is, and padded as its like is padded."""
    layout = step.layout
    yield PaddedSize.exact(layout)
    for more in range(3):
        if not step.is_ragged:
            yield PaddedSize.uniform(layout.num_reqs + more, layout.extend_lens[0])
            continue
        for tokens in (0, 1, 4, 7):
            if more or not tokens:  # what is left over needs a row
                yield PaddedSize.ragged(layout.num_reqs + more, layout.num_tokens + tokens)


def every_step() -> Iterator[Step]:
    lengths = (1, 2, 5, MAX_DECODE_ROWS, MAX_DECODE_ROWS + 1)
    for reqs in (1, 2, 3):
        for extends in itertools.product(lengths, repeat=reqs):
            yield a_step(extends, is_ragged=True)
            if len(set(extends)) == 1:
                yield from (a_step(extends, mask=mask) for mask in MaskKind)


def test_who_gets_a_step_has_planned_it_on_the_host() -> None:
    """Of every kind, at every shape; and who cannot get it plans it in one case only."""
    num_decode = num_prefill = 0
    for step in every_step():
        for size in sizes(step):
            padded = padded_step(step, size.pad_lens(step.layout))
            is_decode = serves_decode(view_of(step, size))
            for_prefill, for_decode = may_serve(padded)
            assert for_decode if is_decode else for_prefill, (step, size)
            if for_prefill and for_decode:
                assert step.is_ragged
                assert len(set(step.layout.extend_lens)) == 1
            num_decode += is_decode
            num_prefill += not is_decode
    assert num_decode > 100
    assert num_prefill > 100


@pytest.mark.parametrize(
    ("extends", "is_ragged", "mask", "decodes"),
    [
        ((1, 1, 1), False, MaskKind.CAUSAL, True),
        ((4, 4), False, MaskKind.CAUSAL, True),
        ((4, 4), False, MaskKind.TREE, True),
        ((100, 100), False, MaskKind.TREE, True),
        ((128,), False, MaskKind.FULL, True),
        ((4, 4), False, MaskKind.BLOCK, False),
        ((7, 3), True, MaskKind.CAUSAL, False),
        ((1, 1, 9), True, MaskKind.CAUSAL, False),
        ((500,), True, MaskKind.CAUSAL, False),
    ],
    ids=str,
)
def test_few_rows_for_every_request_decode_and_prompts_prefill(
    extends: tuple[int, ...], is_ragged: bool, mask: MaskKind, decodes: bool
) -> None:
    step = a_step(extends, is_ragged=is_ragged, mask=mask)
    assert serves_decode(view_of(step, PaddedSize.exact(step.layout))) == decodes


def test_a_ragged_step_padded_to_tokens_is_a_prefill_however_its_requests_look() -> None:
    step = a_step((2, 2, 2), is_ragged=True)
    size = PaddedSize.ragged(3, 6)
    assert not serves_decode(view_of(step, size))
    assert may_serve(padded_step(step, size.pad_lens(step.layout))) == (True, True)


@pytest.mark.parametrize(
    "case",
    [
        Case(),
        Case(extend_lens=(1, 1, 1)),
        Case(extend_lens=(4, 4, 4), has_sinks=True),
        Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE),
        Case(window=4, padded_reqs=2),
    ],
    ids=["ragged", "decode", "verify", "tree", "padded"],
)
def test_both_answer_as_a_walk_over_the_keys(case: Case) -> None:
    built = build(case)
    out, _ = run(hybrid(NoTree(), TorchBackend()), built)
    assert difference(out, walk(built)[0]) < 2e-4


def test_each_backend_runs_its_own_steps_alone() -> None:
    prefill, decode = NoTree(), NoTree()
    backend = hybrid(prefill, decode)
    run(backend, build(Case()))
    assert (prefill.parts, decode.parts) == ([Part.ALL], [])
    run(backend, build(Case(extend_lens=(1, 1, 1))))
    assert (prefill.parts, decode.parts) == ([Part.ALL], [Part.ALL])


def test_a_cascade_may_be_one_of_two_and_two_may_be_under_a_cascade() -> None:
    built = build(Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE))
    for backend in (hybrid(NoTree(), cascade(NoTree())), cascade(hybrid(NoTree(), NoTree()))):
        out, _ = run(backend, built)
        assert difference(out, walk(built)[0]) < 2e-4
    assert cascade(hybrid(NoTree(), NoTree())).name == "cascade(no-tree+no-tree)"


# --- forwarding -----------------------------------------------------------------------------------

RAGGED = a_step((2, 3), is_ragged=True)
DECODE = a_step((1, 1))
RAGGED_VIEW = view_of(RAGGED, PaddedSize.exact(RAGGED.layout))
DECODE_VIEW = view_of(DECODE, PaddedSize.exact(DECODE.layout))
BUFFERS = HybridBuffers(prefill="for prefill", decode="for decode")
CAUSAL = replace(WANTED, masks=frozenset({MaskKind.CAUSAL}))


def _forward(backend: Any) -> None:
    for half in (backend.prefill, backend.decode):
        backend.forward("q", "k", "v", "layer", HybridPlan(backend=half, plan="p"), Part.PREFIX)


def _twice(name: str, *given: tuple[object, ...]) -> Callable[[Any], None]:
    def call(backend: Any) -> None:
        for arguments in given:
            getattr(backend, name)(*arguments)

    return call


FORWARDED = ("q", "k", "v", "layer", "p", Part.PREFIX)
# hook -> calls for a step of either kind; what the prefill backend hears; what the other hears
CALLS: dict[str, tuple[Callable[[Any], None], tuple[object, ...], tuple[object, ...]]] = {
    "unsupported_reasons": (_twice("unsupported_reasons", (WANTED,)), (CAUSAL,), (WANTED,)),
    "make_buffers": (_twice("make_buffers", ("limits",)), ("limits",), ("limits",)),
    "buffer_bytes": (_twice("buffer_bytes", ("limits",)), ("limits",), ("limits",)),
    "plan": (
        _twice("plan", (RAGGED_VIEW, BUFFERS), (DECODE_VIEW, BUFFERS)),
        (RAGGED_VIEW, "for prefill"),
        (DECODE_VIEW, "for decode"),
    ),
    "host_plan": (
        _twice("host_plan", (RAGGED, BUFFERS), (DECODE, BUFFERS)),
        (RAGGED, "for prefill"),
        (DECODE, "for decode"),
    ),
    "forward": (_forward, FORWARDED, FORWARDED),
}


@pytest.mark.parametrize("name", hooks())
def test_every_hook_is_forwarded_to_both(name: str) -> None:
    """A hook the contract gains later has no row here and fails."""
    prefill, decode = listener("prefill"), listener("decode")
    call, for_prefill, for_decode = CALLS[name]
    call(hybrid(prefill(), decode()))
    assert heard_by(prefill, name) == [for_prefill]
    assert heard_by(decode, name) == [for_decode]


def test_a_backend_that_does_not_plan_on_the_host_is_not_asked_to() -> None:
    backend = hybrid(NoTree(), listener("decode")())
    backend.host_plan(RAGGED, BUFFERS)
    backend.host_plan(DECODE, BUFFERS)


def test_the_plan_names_the_backend_that_runs() -> None:
    backend = hybrid(listener("prefill")(), listener("decode")())
    assert backend.plan(RAGGED_VIEW, BUFFERS).backend.name == "prefill"
    assert backend.plan(DECODE_VIEW, BUFFERS).backend.name == "decode"
    assert backend.plan(DECODE_VIEW, BUFFERS).plan == "plan of decode"


# --- capabilities ---------------------------------------------------------------------------------


def test_reasons_of_both_are_given_with_the_name_of_each() -> None:
    pages = {"capabilities": replace(NoTree.capabilities, page_sizes=frozenset({4}))}
    small = type("Small", (NoTree,), {"name": "small", **pages})
    assert hybrid(small(), TorchBackend()).unsupported_reasons(WANTED) == [
        "small: page size must be [4], got 16"
    ]
    assert hybrid(TorchBackend(), small()).unsupported_reasons(WANTED) == [
        "small: page size must be [4], got 16",
        "small: mask kind must be ['causal'], got ['causal', 'tree']",
    ]


def _can(**changes: object) -> Capabilities:
    return replace(TorchBackend.capabilities, **changes)  # type: ignore[arg-type]


BOTH_DTYPES = frozenset({torch.float16, torch.bfloat16})
COMMON: list[tuple[str, object, object, object]] = [  # field, of prefill, of decode, of both
    ("device_types", frozenset({"cpu", "cuda"}), frozenset({"cuda"}), {"cuda"}),
    ("min_cuda_arch", (8, 0), (9, 0), (9, 0)),
    ("min_cuda_arch", None, (8, 0), (8, 0)),
    ("min_cuda_arch", None, None, None),
    ("max_cuda_arch", (9, 9), (11, 9), (9, 9)),
    ("max_cuda_arch", None, (9, 9), (9, 9)),
    ("max_cuda_arch", None, None, None),
    ("dtypes", BOTH_DTYPES, frozenset({torch.bfloat16}), {torch.bfloat16}),
    ("kv_dtypes", frozenset({torch.float16}), BOTH_DTYPES, {torch.float16}),
    ("page_sizes", None, frozenset({16}), {16}),
    ("page_sizes", frozenset({1, 16}), frozenset({16, 64}), {16}),
    ("head_dims", frozenset({64}), None, {64}),
    ("head_dims", None, None, None),
    ("v_head_dim_differs", True, False, False),
    (
        "masks",
        frozenset({MaskKind.CAUSAL}),
        frozenset(MaskKind),
        set(MaskKind) - {MaskKind.BLOCK},  # blocks are the prefill backend's
    ),
    (
        "masks",
        frozenset({MaskKind.CAUSAL, MaskKind.BLOCK}),
        frozenset({MaskKind.CAUSAL}),
        {MaskKind.CAUSAL, MaskKind.BLOCK},
    ),
    ("masks", frozenset({MaskKind.FULL}), frozenset({MaskKind.CAUSAL}), set()),
    ("window", True, False, False),
    ("soft_cap", False, True, False),
    ("sinks", False, True, False),
    ("returns_lse", True, True, True),
    ("graph", GraphSupport.ALWAYS, GraphSupport.DECODE, GraphSupport.DECODE),
    ("host_plan", False, True, True),
    ("loads_dead_slots", True, False, True),
    ("tree_windows", False, True, True),  # trees are the decode backend's
    ("tree_windows", True, False, False),
    ("shares_prefixes", False, True, True),  # decodes are the decode backend's
    ("shares_prefixes", True, False, False),
    ("step_alone", True, False, False),
    ("chunks", ChunkSupport.ALWAYS, ChunkSupport.NEVER, ChunkSupport.NEVER),
    ("chunks", ChunkSupport.WHOLE_PAGES, ChunkSupport.ALWAYS, ChunkSupport.WHOLE_PAGES),
    ("scaled_latents", True, False, False),
    ("latent_dims", None, frozenset({(64, 16)}), {(64, 16)}),
]


@pytest.mark.parametrize(
    ("field", "prefill", "decode", "common"),
    COMMON,
    ids=[f"{row[0]}-{index}" for index, row in enumerate(COMMON)],  # a set has no order
)
def test_what_both_can_do_together(
    field: str, prefill: object, decode: object, common: object
) -> None:
    halves = [
        type("Half", (NoTree,), {"capabilities": _can(**{field: value})})()
        for value in (prefill, decode)
    ]
    assert getattr(hybrid(*halves).capabilities, field) == common


def test_every_capability_has_a_rule() -> None:
    assert {field for field, *_ in COMMON} == {field.name for field in fields(Capabilities)}


def test_every_fact_of_the_class_is_stated() -> None:
    """A fact the contract gains later is not in the class and fails."""
    halves = [type("Half", (NoTree,), {"kept_fields": frozenset({kept})})() for kept in "ab"]
    assert facts() <= vars(hybrid(*halves)).keys()
    assert hybrid(*halves).kept_fields == {"a", "b"}


def test_its_name_is_prefill_plus_decode() -> None:
    assert hybrid(listener("a")(), listener("b")()).name == "a+b"
