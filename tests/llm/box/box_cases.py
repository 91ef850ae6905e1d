"""Engines with a black box, and what it wrote."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from llm_cases import GREEDY, Checkpoint, make_llm

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs
from paceline.llm.box.record import Record, read_record
from paceline.llm.box.replay import ReplayOutcome, replay
from paceline.llm.llm import LLM


@contextmanager
def boxed(
    checkpoint: Checkpoint, folder: Path, *, kept_steps: int = 256, **options: Any
) -> Iterator[LLM]:
    """An engine whose box is in `folder`."""
    knobs = Knobs(kept_steps=kept_steps)
    with make_llm(checkpoint, knobs=knobs, black_box_dir=str(folder), **options) as llm:
        yield llm


def written(folder: Path) -> list[Record]:
    """Every file of a folder, oldest first."""
    return [read_record(path) for path in sorted(folder.iterdir())]


def tripping(token: int, **more: Any) -> SamplingParams:
    """Greedy, until that token has been said."""
    return SamplingParams(
        temperature=0.0, ignore_eos=True, extra_args={"trip": token}, max_tokens=40, **more
    )


def trip_token(llm: LLM, prompt: Sequence[int], at: int) -> int:
    """What is said at `at`, or a little later, and not before."""
    [output] = llm.generate([list(prompt)], GREEDY)
    said = output.outputs[0].token_ids
    return next(token for i, token in enumerate(said) if i >= at and token not in said[:i])


def replayed_as_it_was(record: Record, **asked: Any) -> ReplayOutcome:
    """A record of an engine that did not fail: every token is said again."""
    found = replay(record, asked)
    assert found.difference is None, found.difference
    assert found.num_steps == len(record.steps)
    assert found.end == f"all {len(record.steps)} steps ended"
    assert not found.is_reproduced
    return found
