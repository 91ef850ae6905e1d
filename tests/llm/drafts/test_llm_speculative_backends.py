"""Drafts change no text on other attention: windows, kernels under the interpreter, host plans."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from draft_checkpoints import save_eagle, save_eagle3, save_relative, soften
from llm_cases import make_checkpoint, make_head64_checkpoint
from speculative_cases import (
    Served,
    Truth,
    accepted,
    check_served,
    drafting_llm,
    preemptions,
    serve,
    truth_of,
)

from covers import Cell, cell_name, every_cell, pairwise, slow_unless
from paceline.attention.backends.flashinfer_backend import FlashInferBackend
from paceline.proof.emulators import flashinfer, flashinfer_ragged

WINDOWED = "gemma3-untied-full-rope-linear"
WINDOW_AXES: dict[str, tuple[Any, ...]] = {
    "drafter": ("STANDALONE", "NGRAM"),
    "topk": (1, 2, 8),
    "page_size": (1, 16, 64),
    "enforce_eager": (False, True),
    "params": ("greedy", "top-p"),
    "pool": ("roomy", "tight"),
    "chunked_prefill_size": (1024, 7),
    "stream": ("inline", "deferred"),
}
INTERPRETED: list[Cell] = [
    {"drafter": "EAGLE3", "topk": 1, "page_size": 16, "enforce_eager": False},
    {"drafter": "EAGLE3", "topk": 2, "page_size": 1, "enforce_eager": True},
    {"drafter": "STANDALONE", "topk": 2, "page_size": 64, "enforce_eager": True},
    {"drafter": "NGRAM", "topk": 4, "page_size": 16, "enforce_eager": True},
]
PLANNED: dict[str, tuple[Any, ...]] = {
    "drafter": ("EAGLE", "EAGLE3", "STANDALONE", "NGRAM"),
    "topk": (1, 4),
    "page_size": (1, 16),
    "enforce_eager": (False, True),
    "overlap": (True, False),
    "params": ("greedy", "top-p"),
}
KINDS = ("greedy", "top-p")
# Where a round can end is asked of the other model, at every length.
WINDOWED_JOBS = (
    *("first", "context-end", "one-token-prompt", "repeats", "plain", "stop-string", "stop-id"),
    *("leaves", "siblings", "shared-prefix", "ends-at-2", "ends-at-5"),
)


class HostPlanned(FlashInferBackend):
    """FlashInfer on its emulator, in float32."""

    capabilities = replace(
        FlashInferBackend.capabilities,
        device_types=frozenset({"cpu"}),
        min_cuda_arch=None,
        dtypes=frozenset({torch.float32}),
        kv_dtypes=frozenset({torch.float32}),
    )

    def __init__(self, library: Any = flashinfer) -> None:
        super().__init__(library=library)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    folder = tmp_path_factory.mktemp("gemma")
    target = make_checkpoint(WINDOWED, folder / "target")
    relative = save_relative(WINDOWED, folder / "relative", noise=0.03)
    return truth_of(target, {"STANDALONE": relative}, KINDS)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    """With heads of 64, which kernels take."""
    folder = tmp_path_factory.mktemp("head64")
    target = make_head64_checkpoint(folder / "target")
    soften(target.theirs)
    target.theirs.save_pretrained(target.folder)
    drafters = {
        "EAGLE": save_eagle(target, folder / "eagle"),
        "EAGLE3": save_eagle3(target, folder / "eagle3"),
        "STANDALONE": target.folder,
    }
    return truth_of(target, drafters, KINDS)


def some(truth: Truth, cell: Cell, names: Sequence[str], **options: Any) -> Served:
    """A few of the jobs in the engine of a cell, with their text checked."""
    kind = cell.get("params", "top-p")
    with drafting_llm(truth, cell, **options) as llm:
        served = serve(llm, {name: truth.jobs[kind][name] for name in names})
    check_served(truth, kind, served)
    return served


def is_quick(cell: Cell) -> bool:
    """Each drafter's narrow tree, and a chain where room is short."""
    is_narrow = cell["topk"] == 2 or (cell["topk"] == 1 and cell["pool"] == "tight")
    return is_narrow and cell["stream"] == "inline"


@pytest.mark.parametrize("cell", slow_unless(is_quick, pairwise(WINDOW_AXES)))
def test_drafts_change_no_text_of_a_windowed_model(windowed: Truth, cell: Cell) -> None:
    groups = 4 if cell["drafter"] == "STANDALONE" else 2
    served = some(windowed, cell, WINDOWED_JOBS, num_groups=groups)
    assert accepted(served) > 0
    assert (preemptions(served) > 0) == (cell["pool"] == "tight")


@pytest.mark.slow
@pytest.mark.parametrize("cell", every_cell(WINDOW_AXES), ids=cell_name)
def test_drafts_change_no_text_of_a_windowed_model_in_the_full_cross(
    windowed: Truth, cell: Cell
) -> None:
    groups = 4 if cell["drafter"] == "STANDALONE" else 2
    some(windowed, cell, WINDOWED_JOBS, num_groups=groups)


@pytest.mark.parametrize("cell", slow_unless(lambda cell: cell["page_size"] == 1, INTERPRETED))
def test_drafts_change_no_text_on_the_triton_interpreter(wide: Truth, cell: Cell) -> None:
    """Two requests that share their rounds; the interpreter is slow."""
    options = {"max_num_seqs": 2, "max_num_batched_tokens": 32, "cuda_graph_max_tokens": 16}
    jobs = {name: replace(wide.jobs["top-p"][name], turn=0) for name in ("ends-at-4", "ends-at-6")}
    with drafting_llm(wide, cell, attention_backend="triton", **options) as llm:
        served = serve(llm, jobs)
    check_served(wide, "top-p", served)
    assert cell["drafter"] == "NGRAM" or accepted(served) > 0


@pytest.mark.parametrize(
    "cell",
    slow_unless(lambda cell: cell["drafter"] in ("EAGLE3", "NGRAM"), pairwise(PLANNED)),
)
def test_drafts_change_no_text_where_the_host_plans(
    wide: Truth, cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounds of a request then do not overlap, which is told; the twin decides as late."""
    for module in (flashinfer, flashinfer_ragged):
        monkeypatch.setattr(module, "_DTYPES", (torch.float32,))
    names = ("first", "repeats", "one-token-prompt", "plain", "stop-string", "leaves", "siblings")
    backend = "test_llm_speculative_backends:HostPlanned"
    served = some(wide, cell, names, attention_backend=backend)
    assert accepted(served) > 0
    told = {reason for output in served.values() for reason in output.metrics.fallbacks}
    assert told == {"host_plan_sync"}


@pytest.mark.parametrize("topk", [pytest.param(1, marks=pytest.mark.slow), 4])
def test_drafts_change_no_text_by_cascade(wide: Truth, topk: int) -> None:
    cell = {"drafter": "EAGLE3", "topk": topk, "page_size": 16}
    served = some(wide, cell, tuple(wide.jobs["top-p"]), attention_backend="cascade(torch)")
    assert accepted(served) > 0
