"""With any drafter the text is that of plain decoding, whatever else goes on in the engine."""

import pytest
from llm_cases import Cell, cell_name, every_cell, pairwise
from speculative_cases import (
    AXES,
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

FULL = ("drafter", "topk", "page_size", "enforce_eager", "pool")  # in every combination
PRODUCT = every_cell({name: AXES[name] for name in FULL} | {"params": ("greedy", "top-p")})
REST = {name: AXES[name] for name in AXES if name not in (*FULL, "params")}


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"))


def check_cell(truth: Truth, cell: Cell) -> None:
    kind = cell["params"]
    with drafting_llm(truth, cell) as llm:
        options = llm.report()["speculation"]
        served = serve(llm, truth.jobs[kind])
    check_served(truth, kind, served)
    check_metrics(truth.jobs[kind], served, num_draft_tokens=options["num_draft_tokens"])
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")


@pytest.mark.parametrize("cell", pairwise(AXES), ids=cell_name)
def test_drafts_change_no_text(truth: Truth, cell: Cell) -> None:
    check_cell(truth, cell)


@pytest.mark.slow
@pytest.mark.parametrize("cell", with_chosen(PRODUCT, REST), ids=cell_name)
def test_drafts_change_no_text_in_the_full_cross(truth: Truth, cell: Cell) -> None:
    check_cell(truth, cell)
