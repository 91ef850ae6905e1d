"""The mapping of the public matrix: complete, once each, onto cells that exist."""

from collections import Counter

import pytest

from paceline.proof.check.cell import RunnerKind
from paceline.proof.check.docs_matrix import field_rows
from paceline.proof.suite.cases import cases

ROWS = field_rows()
PUBLIC = [row for row in ROWS if not row.is_area]
AREAS = [row for row in ROWS if row.is_area]
BACKENDS = {"triton", "flashinfer", "fa3", "fa4"}
LATENTS = {"flashinfer_mla", "flashmla"}
BLACKWELL = {"trtllm_mla", "tokenspeed_mla", "cutlass_mla", "cutedsl_mla"}  # of latents too
PASSING = {"triton": 82 + 44, "flashinfer": 70, "fa3": 58, "fa4": 50, "trtllm_mha": 24} | {
    "flashinfer_mla": 26,
    "flashmla": 23,
}


def test_every_public_cell_is_mapped_once():
    names = Counter((row.method, row.backend, row.runner, row.variant) for row in ROWS)
    assert [name for name, count in names.items() if count > 1] == []


def test_counts_are_those_of_the_public_matrix():
    assert Counter(row.status for row in PUBLIC) == {
        "pass": 260 + 49 + 44 + 24,
        "deferred": 96 + 10 + 19 + 17 + 1,
        "fail": 10 + 19,
        "n/a": 7 + 1 + 3,
        "blocked": 2 + 12 + 4 + 19,
        "hardware-gated": 49 + 3 + 1,
    }
    assert {row.backend for row in PUBLIC} == BACKENDS | LATENTS | BLACKWELL | {"trtllm_mha"}


def test_latents_are_of_the_latent_backends():
    alone = LATENTS | BLACKWELL
    assert {row.backend for row in PUBLIC if row.method == "mla"} == alone | {"triton", "fa3"}
    assert all(row.method == "mla" for row in PUBLIC if row.backend in alone)


@pytest.mark.parametrize("backend", sorted(PASSING))
def test_public_cells_that_pass_by_backend(backend):
    passing = [row for row in PUBLIC if row.status == "pass" and row.backend == backend]
    assert len(passing) == PASSING[backend]


def test_each_row_names_cells_of_its_method_and_backend():
    for row in ROWS:
        assert row.cells
        assert {tuple(cell.split("/")[:2]) for cell in row.cells} == {(row.method, row.backend)}
        assert len(set(row.cells)) == len(row.cells)


def test_every_mapped_cell_is_of_a_case_in_the_suite():
    known = {(case.method, case.mode.value, case.name) for case in cases()}
    runners = {runner.value for runner in RunnerKind}
    for row in ROWS:
        for cell in row.cells:
            method, _, mode, runner, variant = cell.split("/")
            assert (method, mode, variant) in known, cell
            assert runner in runners, cell


def test_vendor_rows_are_mapped_to_a_dtype_that_vendors_take():
    dtypes = {(case.method, case.mode.value, case.name): case.dtype for case in cases()}
    for row in ROWS:
        for cell in row.cells:
            method, _, mode, _, variant = cell.split("/")
            assert dtypes[method, mode, variant] in ("bfloat16", "float16"), cell


def test_public_graph_cells_are_mapped_to_graph_cells():
    graphs = ("cg_decode", "pcg_extend", "bcg_extend", "verify_cg", "de_cg", "de_v2_cg")
    for row in PUBLIC:
        if row.runner in graphs or row.runner.endswith("_runner"):
            assert all("/cuda_graph/" in cell for cell in row.cells), row


def test_areas_are_run_in_a_graph():
    assert all(any("/cuda_graph/" in cell for cell in row.cells) for row in AREAS)


def test_areas_cover_every_method_and_the_hybrid():
    assert {row.backend for row in AREAS} == BACKENDS | {"triton+flashinfer"}
    assert {row.method for row in AREAS} == {"dense", "swa"}
    assert {row.status for row in AREAS} == {"missing"}
