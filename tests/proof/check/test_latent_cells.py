"""Cells of the vendors' backends for latents, on their emulators: every mode, pages of 64."""

import pytest
from named_cell import run_named

from paceline.proof.check.cell import Status

CELLS = (  # those of many keys or queries take 10 s and more on an emulator: in the full run alone
    "decode/eager/page64-ends",
    "decode/recorded/interleaved",
    pytest.param("extend/recorded/page64-ends", marks=pytest.mark.slow),
    "extend/eager/reversed",
    pytest.param("mixed/recorded/page64-mixed", marks=pytest.mark.slow),
    "target_verify/recorded/page64-chain3",
    "target_verify/recorded/page64-topk4",
    pytest.param("target_verify/eager/page64-chain17", marks=pytest.mark.slow),
    "draft_decode/recorded/page64-topk2-step3",
    "draft_decode/recorded/page64-frozen-kv-no-prefix",
    "draft_extend/recorded/page64-accepted",
    "draft_extend_v2/recorded/page64-fixed3-capture2x-scratch",
)


@pytest.mark.parametrize("cell", CELLS)
@pytest.mark.parametrize("name", ["flashmla", "flashinfer_mla"])
def test_a_cell_equals_the_oracle(name: str, cell: str) -> None:
    result = run_named(f"mla/{name}/{cell}")
    assert (result.status, result.reason) == (Status.EMULATED, None)


def test_pages_of_any_size_are_flashinfers() -> None:
    result = run_named("mla/flashinfer_mla/extend/recorded/page1")
    assert (result.status, result.reason) == (Status.EMULATED, None)
