"""Rounds over the ends of chunks, chains and trees, change no text of a Llama 4."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
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
from paceline.attention.backends.fa4_backend import FlashAttention4Backend, FlashAttention4Library
from paceline.proof.emulators import flash_attn

LLAMA4 = "llama4_text-chunk11"
GROUPS = {"NGRAM": 2, "STANDALONE": 4}  # full and in chunks, of the drafter too
QUICK = {"drafter": "NGRAM", "topk": 4, "page_size": 4, "pool": "tight", "chunked_prefill_size": 7}
SOME = ("first", "repeats", "one-token-prompt", "shared-prefix", "leaves", "context-end")
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


class VirtualRequests(FlashAttention4Backend):
    """FlashAttention 4, which knows no chunks, on its emulator: in float32, with heads of any
    width."""

    capabilities = replace(
        FlashAttention4Backend.capabilities,
        device_types=frozenset({"cpu"}),
        min_cuda_arch=None,
        dtypes=frozenset({torch.float32}),
        kv_dtypes=frozenset({torch.float32}),
        head_dims=None,
    )

    def __init__(self) -> None:
        library = SimpleNamespace(flash_attn_varlen_func=_of_any_width)
        super().__init__(library=cast(FlashAttention4Library, library))


def _of_any_width(*args: Any, **options: Any) -> Any:
    return flash_attn._attend_paged(*args, **options)


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_virtual_requests_change_no_text(truth: Truth, topk: int) -> None:
    """Chunks of 11 pages of a token, in steps of prompts, of rounds and behind hits."""
    cell = {"drafter": "NGRAM", "topk": topk, "page_size": 1, "pool": "tight"}
    backend = "test_llm_chunks:VirtualRequests"
    with drafting_llm(truth, cell, num_groups=2, attention_backend=backend) as llm:
        served = serve(llm, {name: truth.jobs["greedy"][name] for name in SOME})
    check_served(truth, "greedy", served)
    assert accepted(served) > 0
