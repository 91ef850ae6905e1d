"""The flex backend is what its plan says, and a mask of one's own what torch and transformers make
of it; the cells of the suite are in tests/proof/check/test_cells.py."""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers
from attention_cases import Built, Case, Request, build, visible_keys
from attention_runs import LSE_TOLERANCE, TOLERANCE, assert_is_the_walk, difference, run
from example_mask import Strided
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_checkpoint,
    make_llm,
    shared_prompts,
    tokens_of,
)
from named_cell import CASES, run_named
from paged_cases import ancestors
from torch import Tensor

from paceline.attention.backends import flex_backend
from paceline.attention.backends.flex_backend import FlexBackend, FlexBuffers, FlexPlan
from paceline.attention.contract import AttentionConfig, GraphSupport, Part
from paceline.attention.flex_attention import key_tiles
from paceline.core.errors import BackendUnsupported
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView
from paceline.proof.check.cell import RunnerKind, Status
from paceline.proof.rig.contenders import Contender
from paceline.proof.rig.harness import run_cell

HERE = Path(__file__).parent
PAGE = HERE.parents[1] / "docs" / "python.md"
NAME = "example_mask:Strided"


def positions_of(request: Request) -> list[int]:
    """Of its rows in the step: in a tree by depth."""
    rows = range(request.extend)
    depths = [len(ancestors(request.tree, row)) - 1 if request.tree else row for row in rows]
    return [request.prefix + depth for depth in depths]


def placed(case: Case) -> Built:
    """The case with the positions that derive would write; padded rows are at 1."""
    built = build(case)
    positions = torch.ones_like(built.view.positions)
    live = [at for request in built.requests for at in positions_of(request)]
    positions[: len(live)] = torch.tensor(live)
    return replace(built, view=replace(built.view, positions=positions))


# --- its plan's own masks -------------------------------------------------------------------------

STEPS = [
    Case(window=4, soft_cap=0.5, v_head_dim=5, has_sinks=True),
    Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE, has_sinks=True),
    Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE, window=4, page_size=16),
    Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE, part=Part.STEP, window=3),
    Case(extend_lens=(5, 5, 5), mask=MaskKind.FULL, part=Part.STEP, heads=3, kv_heads=3),
    Case(extend_lens=(5, 5, 5), mask=MaskKind.TREE, part=Part.PREFIX, has_sinks=True),
    Case(part=Part.PREFIX, window=4, page_size=1),
    Case(part=Part.STEP, padded_reqs=2),
    Case(extend_lens=(1, 1, 1), dtype=torch.bfloat16, padded_reqs=1),
]


@pytest.mark.parametrize("case", STEPS, ids=lambda case: f"{case.mask.value}-{case.part.value}")
def test_it_equals_the_walk(case: Case) -> None:
    built = placed(case)
    assert_is_the_walk(built, *run(FlexBackend(), built), tolerance=TOLERANCE[case.dtype])


def test_tiles_hold_every_key_that_a_row_reaches() -> None:
    reach = torch.randint(0, 513, (2, 300), generator=torch.Generator().manual_seed(0))
    reach[1, :256] = 0
    dense = key_tiles(reach, 512, lambda *_: torch.tensor(True)).to_dense()  # [2, 1, 3, 4]
    rows = [part.amax(1) for part in reach.split(128, dim=1)]
    needed = torch.stack(rows, 1).unsqueeze(2) > torch.arange(0, 512, 128)
    assert torch.equal(dense[:, 0].bool(), needed)
    assert not dense[1, 0, :2].any()


class SeesItselfNot(FlexBackend):
    def plan(self, view: StepView, buffers: FlexBuffers) -> FlexPlan:
        plan = super().plan(view, buffers)
        return replace(plan, rows=replace(plan.rows, ends=plan.rows.ends - 1))


class BranchesByRow(FlexBackend):
    """Counts windows of a tree by rows."""

    def plan(self, view: StepView, buffers: FlexBuffers) -> FlexPlan:
        plan = super().plan(view, buffers)
        rows = torch.arange(view.max_extend_len)
        positions = view.prefix_lens.long().unsqueeze(1) + rows
        return replace(plan, rows=replace(plan.rows, positions=positions))


class OnePageShort(FlexBackend):
    def plan(self, view: StepView, buffers: FlexBuffers) -> FlexPlan:
        plan = super().plan(view, buffers)
        return replace(plan, width=plan.width - 1)


PLANTED = [
    (SeesItselfNot, "dense/flex/extend/eager/tiny", "layer 0: error"),
    (BranchesByRow, "swa/flex/target_verify/eager/tiny-window3-topk2", "layer 0: error"),
    (OnePageShort, "dense/flex/decode/eager/tiny-page16", "layer 0: error"),
]


@pytest.mark.parametrize(("fault", "cell", "text"), PLANTED, ids=lambda each: str(each))
def test_a_planted_fault_is_found_by_a_cell(fault: type, cell: str, text: str) -> None:
    method, _, mode, runner, variant = cell.split("/")
    who = Contender(name="flex", backend=fault(), is_emulated=False)
    case = CASES[method, mode, variant]
    result = run_cell(case, who, RunnerKind(runner), torch.device("cpu"))
    assert result.status is Status.FAILING
    assert text in (result.reason or "")


def test_values_that_nobody_sees_are_cleared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of 0 leaves the NaN of a dead slot."""
    monkeypatch.setattr(flex_backend, "_clear", lambda *_: None)
    result = run_named("dense/flex/decode/eager/tiny-page16")
    assert result.status is Status.FAILING
    assert "layer 0: error inf" in (result.reason or "")


# --- a mask of one's own --------------------------------------------------------------------------


def is_shown(head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The example's mask in other words, of positions."""
    hidden = (key >= 4) & (key <= query - 16) & ~((head % 2).bool() & key.remainder(8).eq(0))
    return ~hidden


def by_sdpa(built: Built, shown: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """[live tokens, heads, v_head_dim] float64, by torch's own product under an explicit mask."""
    return torch.cat([_request_by_sdpa(built.case, each, shown) for each in built.requests])


def _request_by_sdpa(
    case: Case, request: Request, shown: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> Tensor:
    queries = torch.tensor(positions_of(request))
    keys = torch.cat((torch.arange(request.prefix), queries))
    allowed = torch.zeros(request.extend, len(keys), dtype=torch.bool)
    for row in range(request.extend):
        allowed[row, visible_keys(case, request, row)] = True
    heads = torch.arange(case.heads)[:, None, None]
    group = case.heads // case.kv_heads
    out = F.scaled_dot_product_attention(
        request.queries.transpose(0, 1),
        request.keys.transpose(0, 1).repeat_interleave(group, 0),
        request.values.transpose(0, 1).repeat_interleave(group, 0),
        attn_mask=allowed & shown(heads, queries[:, None], keys),
        scale=build(case).paged.scale,
    )
    return out.transpose(0, 1)


@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE])
def test_its_mask_is_that_of_sdpa_in_positions(mask: MaskKind) -> None:
    built = placed(Case(prefix_lens=(0, 17, 39), extend_lens=(9, 9, 9), mask=mask))
    out, _ = run(Strided(), built)
    assert difference(out, by_sdpa(built, is_shown)) < TOLERANCE[torch.float32]
    everything = by_sdpa(built, lambda head, query, key: key >= 0)
    assert difference(out, everything) > 2 * TOLERANCE[torch.float32]


def test_a_mask_shows_no_key_that_the_plan_hides() -> None:
    class Everything(FlexBackend):
        mask_mod = staticmethod(lambda batch, head, q_idx, kv_idx: kv_idx >= 0)

    built = placed(Case(window=4))
    ours, lse = run(Everything(), built)
    plain, plain_lse = run(FlexBackend(), built)
    assert torch.equal(ours, plain)
    assert lse is not None
    assert plain_lse is not None
    assert difference(lse, plain_lse) <= LSE_TOLERANCE


# --- an engine ------------------------------------------------------------------------------------


def test_the_page_shows_the_tested_file() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert (HERE / "example_mask.py").read_text() in blocks


@pytest.fixture(scope="module")
def masked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Checkpoint]:
    """A llama whose transformers model attends under the example's mask."""
    checkpoint = make_checkpoint("llama-gqa2-untied", tmp_path_factory.mktemp("llama"))
    llama = transformers.models.llama.modeling_llama
    plain = llama.eager_attention_forward

    def attend(module, q, k, v, attention_mask, **how):
        keys, rows = torch.arange(k.shape[2]), q.shape[2]
        queries = keys[-rows:, None]
        heads = torch.arange(q.shape[1])[:, None, None]
        seen = (keys <= queries) & is_shown(heads, queries, keys)
        bias = torch.zeros(seen.shape).masked_fill(~seen, torch.finfo(q.dtype).min)
        return plain(module, q, k, v, bias.unsqueeze(0), **how)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama, "eager_attention_forward", attend)
        yield checkpoint


EAGER = {"enforce_eager": True, "page_size": 4, "chunked_prefill_size": 7}
DRAFTS = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}


@pytest.mark.parametrize("drafts", [{}, DRAFTS], ids=["plain", "drafts"])
def test_answers_under_a_mask_are_those_of_transformers(drafts: dict, masked: Checkpoint) -> None:
    """In chunks, in one batch, and behind a prefix hit; other than without the mask."""
    prompts = shared_prompts()[3:5]
    params = replace(GREEDY, max_tokens=12)
    with make_llm(masked, attention_backend=Strided, **EAGER, **drafts) as llm:
        assert llm.prepared.attention.name == NAME
        fresh, [cached] = llm.generate(prompts, params), llm.generate(prompts[1:], params)
        assert_idle(llm)
    assert cached.metrics.cached_tokens
    assert bool(drafts) == any(each.metrics.drafted_tokens for each in [*fresh, cached])
    for prompt, ours in zip([*prompts, prompts[1]], tokens_of([*fresh, cached]), strict=True):
        assert_same_or_tie(ours, masked.generate(prompt, 12), masked.gap(prompt))


def test_without_its_mask_answers_are_those_of_the_torch_backend(masked: Checkpoint) -> None:
    prompts = shared_prompts()[3:5]
    found = {}
    for name in ("flex", "torch"):
        with make_llm(masked, attention_backend=name, **EAGER) as llm:
            found[name] = tokens_of(llm.generate(prompts, replace(GREEDY, max_tokens=12)))
    assert found["flex"] == found["torch"]
    assert found["torch"][1] != masked.generate(prompts[1], 12)


# --- what it refuses ------------------------------------------------------------------------------

PLAIN = AttentionConfig(
    device_type="cpu",
    cuda_arch=None,
    dtype=torch.float32,
    kv_dtype=torch.float32,
    page_size=16,
    heads=(Heads(4, 2, 64, 64),),
    window=True,
    soft_cap=True,
    sinks=True,
    masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE}),
    needs_lse=True,
    graph=GraphSupport.NEVER,
)
ON_CUDA = replace(PLAIN, device_type="cuda", cuda_arch=(9, 0))
AHEAD = replace(PLAIN, masks=PLAIN.masks | {MaskKind.BLOCK})


def test_it_says_what_it_cannot() -> None:
    assert not FlexBackend().unsupported_reasons(replace(AHEAD, encoder=True))
    wide = replace(ON_CUDA, heads=(Heads(4, 1, 576, 512, v_in_k=True), Heads(4, 4, 8, 8)))
    assert FlexBackend().unsupported_reasons(wide) == [
        f"head dim must be 16 to 256 on cuda, got {dim}" for dim in (8, 512, 576)
    ]
    assert FlexBackend().unsupported_reasons(replace(PLAIN, graph=GraphSupport.DECODE)) == [
        "graph support must be at least DECODE, got NEVER"
    ]


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (AHEAD, "steps must look back alone under a mask of one's own, got ['block']"),
        (
            replace(PLAIN, cache_free=True),
            "steps must look back alone under a mask of one's own, got ['cache-free steps']",
        ),
        (
            replace(PLAIN, encoder=True),
            "keys must have positions under a mask of one's own, got an encoder's",
        ),
    ],
)
def test_a_mask_refuses_what_it_has_no_meaning_for(asked: AttentionConfig, reason: str) -> None:
    assert not Strided().unsupported_reasons(PLAIN)
    assert Strided().unsupported_reasons(asked) == [reason]


def test_an_engine_with_graphs_is_told_to_leave_them_out(masked: Checkpoint) -> None:
    with pytest.raises(BackendUnsupported, match="add --enforce-eager"):
        make_llm(masked, attention_backend=Strided)
