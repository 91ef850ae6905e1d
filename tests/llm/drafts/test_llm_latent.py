"""A model of latent attention in the whole engine: drafts, trees, preemption, hits, memory."""

from pathlib import Path

import pytest
from draft_checkpoints import save_eagle3
from llm_cases import Checkpoint, make_checkpoint, make_llm
from speculative_cases import (
    LLAMA,
    Truth,
    accepted,
    check_metrics,
    check_served,
    drafting_llm,
    preemptions,
    save_relative,
    serve,
    truth_of,
)

from covers import Cell, slow_unless
from paceline.plan.explain import explain_model

CASE = "deepseek_v3-bias-groups"
KIND = "greedy"
BY_LOOKUP: Cell = {
    "drafter": "NGRAM",
    "topk": 1,
    "page_size": 16,
    "pool": "tight",
    "chunked_prefill_size": 7,
}
QUICK: list[Cell] = [
    {"drafter": "STANDALONE", "topk": 4, "page_size": 16, "pool": "tight"},
    {"drafter": "EAGLE3", "topk": 2, "page_size": 16, "pool": "tight"},
    BY_LOOKUP,
]
CELLS: list[Cell] = [
    *QUICK,
    {"drafter": "STANDALONE", "topk": 4, "page_size": 16, "pool": "tight", "stream": "deferred"},
    {"drafter": "STANDALONE", "topk": 1, "page_size": 1, "pool": "roomy", "enforce_eager": True},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint(CASE, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def truth(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("drafters")
    relative = save_relative(CASE, folder / "relative", noise=0.02)
    head = save_eagle3(make_checkpoint(LLAMA, folder / "llama"), folder / "head")
    return truth_of(checkpoint, {"STANDALONE": relative, "EAGLE3": head}, [KIND])


@pytest.mark.parametrize("cell", slow_unless(QUICK.__contains__, CELLS))
def test_drafts_change_no_text(truth: Truth, cell: Cell) -> None:
    with drafting_llm(truth, cell) as llm:
        num_draft_tokens = llm.report()["speculation"]["num_draft_tokens"]
        served = serve(llm, truth.jobs[KIND])
    check_served(truth, KIND, served)
    check_metrics(truth.jobs[KIND], served, num_draft_tokens=num_draft_tokens)
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")


def test_minicpm3_is_served_like_any_model(tmp_path: Path) -> None:
    """Chunks, prefix hits, preemption and prompt lookup, with multipliers and halves that turn."""
    truth = truth_of(make_checkpoint("minicpm3-multipliers", tmp_path), {}, [KIND])
    with drafting_llm(truth, BY_LOOKUP) as llm:
        served = serve(llm, truth.jobs[KIND])
    check_served(truth, KIND, served)
    assert accepted(served) > 0
    assert preemptions(served) > 0


def test_the_cache_is_one_row_of_a_latent_and_what_turns(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint, page_size=16, kv_cache_bytes=3 * 16 * 4 * 44 * 100) as llm:
        report = llm.report()["memory"]
        (group,) = llm.prepared.fit.groups
    assert group.page_bytes == 3 * 16 * 4 * (32 + 12)  # layers, tokens, bytes, numbers
    assert report["measured"]["KV"] == 100 * group.page_bytes
    assert report["measured"]["weights"] == report["planned"]["weights_bytes"]


def test_where_no_backend_has_latents_each_says_why(checkpoint: Checkpoint) -> None:
    plan = explain_model({"model": str(checkpoint.folder)}, gpu="h200")
    for phase in plan.phases:
        assert phase.backend is None
        ((_, reasons),) = phase.rejected.items()
        for said in ("triton: latent dims", "flashinfer: head dim", "fa4: head dim"):
            own = [reason for reason in reasons if reason.startswith(f"{said} must be")]
            assert own, f"{said}: {reasons}"
