"""Workers that start warm, as far as their start is not what a test is about."""

import multiprocessing
from collections.abc import Iterator
from multiprocessing import forkserver
from types import SimpleNamespace

import pytest

from paceline.proof.check import workers


@pytest.fixture(scope="session")
def server_of_forks() -> Iterator[SimpleNamespace]:
    """Stands for `multiprocessing`: each worker is a fork of a process that has imported torch
    and pytest, the main program of these: most of the CPU time of a short one."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "pytest"])
    yield SimpleNamespace(get_context=lambda method: context)
    forkserver._forkserver._stop()  # and waits for it: its CPU time is that of the tests


@pytest.fixture
def warm_workers(server_of_forks: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "multiprocessing", server_of_forks)
