"""Ranks that start warm, as far as their start is not what a test is about."""

import subprocess
from collections.abc import Iterator

import pytest

from warm_starts import warm_starts


@pytest.fixture(scope="session")
def warm_popen() -> Iterator[type[subprocess.Popen]]:
    with warm_starts() as popen:
        yield popen


@pytest.fixture(autouse=True)
def ranks_start_warm(warm_popen: type[subprocess.Popen], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", warm_popen)
