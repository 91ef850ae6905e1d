"""Rounds over the ends of chunks, chains and trees, change no text of a Llama 4."""

import pytest
from llm_cases import make_checkpoint
from speculative_cases import (
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

from covers import Cell

LLAMA4 = "llama4_text-chunk11"
GROUPS = {"NGRAM": 2, "STANDALONE": 4}  # full and in chunks, of the drafter too
QUICK = {"drafter": "NGRAM", "topk": 4, "page_size": 4, "pool": "tight", "chunked_prefill_size": 7}
DEAR = [
    {"drafter": "NGRAM", "topk": 1, "page_size": 16, "pool": "roomy", "enforce_eager": True},
    {"drafter": "STANDALONE", "topk": 1, "page_size": 16, "pool": "tight", "stream": "deferred"},
    {"drafter": "STANDALONE", "topk": 4, "page_size": 1, "pool": "roomy"},
]


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("llama4")
    target = make_checkpoint(LLAMA4, folder / "target")
    relative = save_relative(LLAMA4, folder / "relative", noise=0.02)
    return truth_of(target, {"STANDALONE": relative}, ["greedy"])


def name_of(cell: Cell) -> str:
    return f"{cell['drafter']}-{cell['topk']}"


@pytest.mark.parametrize(
    "cell", [QUICK, *(pytest.param(cell, marks=pytest.mark.slow) for cell in DEAR)], ids=name_of
)
def test_drafts_over_chunks_change_no_text(truth: Truth, cell: Cell) -> None:
    with drafting_llm(truth, cell, num_groups=GROUPS[cell["drafter"]]) as llm:
        num_draft_tokens = llm.report()["speculation"]["num_draft_tokens"]
        served = serve(llm, truth.jobs["greedy"])
    check_served(truth, "greedy", served)
    check_metrics(truth.jobs["greedy"], served, num_draft_tokens=num_draft_tokens)
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")
