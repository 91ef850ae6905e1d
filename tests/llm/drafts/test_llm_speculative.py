"""With any drafter the text is that of plain decoding, whatever else goes on in the engine."""

import pytest
from llm_cases import CONTEXT
from speculative_cases import (
    AXES,
    PARAMS,
    Truth,
    accepted,
    check_metrics,
    check_served,
    drafting_llm,
    llama_truth,
    preemptions,
    serve,
    with_chosen,
)

from covers import Cell, cell_name, every_cell, pairwise, slow_unless

FULL = ("drafter", "topk", "page_size", "enforce_eager", "pool")  # in every combination
PRODUCT = every_cell({name: AXES[name] for name in FULL} | {"params": ("greedy", "top-p")})
REST = {name: AXES[name] for name in AXES if name not in (*FULL, "params")}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("kind", PARAMS)
def test_the_jobs_end_in_every_way(truth: Truth, kind: str) -> None:
    """Of plain decoding: what the comparisons below compare with."""
    ends = {name: output.outputs[0] for name, output in truth.answers[kind].items()}
    assert isinstance(ends["stop-string"].stop_reason, str)
    assert isinstance(ends["stop-id"].stop_reason, int)
    assert len(ends["context-end"].token_ids) == CONTEXT - 100
    assert [len(ends[f"ends-at-{n}"].token_ids) for n in range(1, 9)] == list(range(1, 9))
    assert len({one.token_ids for one in truth.answers[kind]["siblings"].outputs}) == 1 + (
        kind != "greedy"
    )


def check_cell(truth: Truth, cell: Cell) -> None:
    kind = cell["params"]
    with drafting_llm(truth, cell) as llm:
        options = llm.report()["speculation"]
        served = serve(llm, truth.jobs[kind])
    check_served(truth, kind, served)
    check_metrics(truth.jobs[kind], served, num_draft_tokens=options["num_draft_tokens"])
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")


def is_quick(cell: Cell) -> bool:
    """Each model that drafts with a chain and with a tree, the lookup with a chain; one is
    poisoned, whose drafter has a cache of its own."""
    by_lookup, deferred = cell["drafter"] == "NGRAM", cell["stream"] == "deferred"
    narrow = cell["topk"] in ((1,) if by_lookup else (1, 4))
    return narrow and (not deferred or cell["drafter"] == "STANDALONE")


@pytest.mark.parametrize("cell", slow_unless(is_quick, pairwise(AXES)))
def test_drafts_change_no_text(truth: Truth, cell: Cell) -> None:
    check_cell(truth, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", with_chosen(PRODUCT, REST), ids=cell_name)
def test_drafts_change_no_text_in_the_full_cross(truth: Truth, cell: Cell) -> None:
    check_cell(truth, cell)
