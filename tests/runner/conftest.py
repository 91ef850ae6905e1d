"""Session-wide tiny models, and counters of what runs."""

from collections import Counter
from typing import Any

import pytest
from tiny_runner import TinyModel, make_tiny

from paceline.runner import model_runner
from paceline.runner.buffers import StepBuffers
from paceline.runner.model_runner import _execute
from paceline.runner.recording.recorded import RecordedGraph
from paceline.runner.staging import StagingSlot


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of `fill`, `put`, `capture` and `replay`, and `_execute`d copies, from now on."""
    counter: Counter[str] = Counter()

    def count(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counter[name] += 1
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    count(StepBuffers, "fill")
    count(StagingSlot, "put")
    count(RecordedGraph, "capture")
    count(RecordedGraph, "replay")

    def execute(copies: list[Any]) -> None:
        counter["copies"] += len(copies)
        _execute(copies)

    monkeypatch.setattr(model_runner, "_execute", execute)
    return counter


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[RecordedGraph]:
    """The graphs replayed from now on, in order."""
    seen: list[RecordedGraph] = []
    original = RecordedGraph.replay

    def noted(graph: RecordedGraph) -> None:
        seen.append(graph)
        original(graph)

    monkeypatch.setattr(RecordedGraph, "replay", noted)
    return seen
