"""Cells of kernels for Blackwell GPUs, on their emulators: a few of each; the rest is slow."""

import pytest
from named_cell import run_named

from paceline.proof.check.cell import Status

LATENTS = (
    "trtllm_mla/draft_extend/recorded/page64-accepted",
    "trtllm_mla/draft_extend_v2/recorded/page64-fixed3-capture2x-scratch",
    "cutedsl_mla/target_verify/eager/page64-topk4",
    "tokenspeed_mla/decode/recorded/page32",
    "tokenspeed_mla/target_verify/recorded/page64-topk2",
    "cutlass_mla/decode/eager/page128",
    "cutlass_mla/target_verify/recorded/page128-chain3",
)
DENSE = (
    "dense/trtllm_mha/decode/recorded/mqa8",
    "dense/trtllm_mha/extend/recorded/ragged-edges",
    "dense/trtllm_mha/target_verify/eager/topk4-sinks",
    "dense/trtllm_mha/draft_decode/recorded/frozen-kv-no-prefix",
    "swa/trtllm_mha/decode/eager/full-and-windows",
)


@pytest.mark.parametrize("cell", [*(f"mla/{cell}" for cell in LATENTS), *DENSE])
def test_a_cell_equals_the_oracle(cell: str) -> None:
    result = run_named(cell)
    assert (result.status, result.reason) == (Status.EMULATED, None)


def test_trees_over_a_kernel_without_a_log_sum_exp_are_refused() -> None:
    result = run_named("mla/cutlass_mla/target_verify/recorded/page64-topk4")
    assert result.status is Status.REFUSED
    assert "mask kind must be ['causal'], got ['tree']" in (result.reason or "")
