"""Session-wide tiny models, and counters of what runs."""

from collections import Counter
from typing import Any

import pytest
from tiny_runner import TinyModel, make_tiny

from paceline.runner.buffers import StepBuffers
from paceline.runner.recorded import RecordedGraph
from paceline.runner.staging import StagingSlot


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def tiny_gemma(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("gemma3", tmp_path_factory.mktemp("gemma3"))


@pytest.fixture
def counts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Calls of `fill`, `put`, `capture` and `replay` from now on."""
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
    return counter
