"""Settings every test shares; nothing here may import torch or triton before the first line."""

import gc
import logging
import os

# Triton decides when it is imported whether kernels are compiled or interpreted.  On a CUDA machine
# run with TRITON_INTERPRET=0 to test the compiled ones.
os.environ.setdefault("TRITON_INTERPRET", "1")
# Tensors are small and pytest-xdist has several workers: one thread of torch each.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import sys
from collections.abc import Generator, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import _pytest.logging
import pytest

import paceline  # it says how long threads spin, before torch is imported
from longest_first import longest_first
from patched_once import patch_once

gc.disable()  # until all tests are there: what their imports and their collection make stays
BEGUN = pytest.StashKey[set[Path]]()  # files of which a test has run
FROZEN = pytest.StashKey[int]()  # modules that were there when all was frozen last
MANY_MODULES = 20
YOUNG_OBJECTS = 20_000  # between collections: those at every 700 were a tenth of an engine's time


@pytest.fixture(autouse=True)
def threads_as_before() -> Iterator[None]:
    """An engine sets torch's threads for its process: the tests behind it get theirs back."""
    yield
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


@pytest.fixture(autouse=True)
def books_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine of a test checks its books whenever nothing is left to do."""
    if "torch" not in sys.modules:  # no test of the engine, which imports it
        return
    from paceline.engine.engine import Engine

    step = Engine.step

    def checked(engine: Engine) -> object:
        grown = step(engine)
        if not engine.has_work:
            engine.scheduler.check_integrity()
        return grown

    monkeypatch.setattr(Engine, "step", checked)


@pytest.fixture(autouse=True, scope="session")
def bundled_drafter_is_tested_once() -> Iterator[None]:
    """Its self-test is most of a start of the bundled model: once passed, it is not run again.
    Those of other drafters and bands are; one of drafts too shallow for it passes nothing."""
    boot = sys.modules.get("paceline.llm.boot")
    if boot is None:  # no test of the engine, which imports it
        yield
        return
    from paceline.engine.acceptance import read_band

    bundled = read_band(Path(paceline.__file__).parent / "models" / "bundled" / "eagle3")
    test, passed = boot.check_drafter, []

    def checked_once(engine, tokenizer, band, *given, **limits):  # type: ignore[no-untyped-def]
        if band == bundled and passed:
            return True
        found = test(engine, tokenizer, band, *given, **limits)
        if band == bundled and found:
            passed.append(band)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(boot, "check_drafter", checked_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def what_stays_is_not_looked_through() -> Iterator[None]:
    """An engine that is closed looks for garbage among what is young, as it is, and not through the
    engines of other tests; a bench or server that ends thaws nothing of modules and tests.  Not
    on a GPU: an engine that failed when it was old would keep its memory from the next."""
    machine, torch = sys.modules.get("paceline.plan.machine"), sys.modules.get("torch")
    if machine is None or torch is None or torch.cuda.is_available():
        yield
        return
    young = partial(gc.collect, 1)
    looks_at_young = SimpleNamespace(collect=young, freeze=lambda: None, unfreeze=lambda: None)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "gc", looks_at_young)
        yield


@pytest.fixture(autouse=True)
def kernels_are_interpreted_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """See patched_once."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    if interpreter is not None:
        patch_once(monkeypatch, interpreter)


class _CatchesAtRoot(_pytest.logging.catching_logs[_pytest.logging.LogCaptureHandler]):
    """pytest looks for loggers that do not propagate six times a test, and hands its handler to
    each: of 450, mostly of torch and transformers, that is half of what an empty test takes.  No
    test reads what those say."""

    __slots__ = ()

    def __enter__(self) -> _pytest.logging.LogCaptureHandler:
        if self.level is not None:  # --log-level
            return super().__enter__()
        logging.getLogger().addHandler(self.handler)
        return self.handler

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)
        logging.getLogger().removeHandler(self.handler)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """What is frozen when Python ends would be told as leaked.  Thawed behind the collections that
    pytest ends with, of which each would look through all there is."""
    config.add_cleanup(gc.unfreeze)
    patch = pytest.MonkeyPatch()
    patch.setattr(_pytest.logging, "catching_logs", _CatchesAtRoot)
    config.add_cleanup(patch.undo)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Every second worker collects from the end: in a fresh clone it finds half of the files
    compiled, and with their assertions written anew, which it would else do again."""
    report = yield
    is_second = os.environ.get("PYTEST_XDIST_WORKER", "").endswith(tuple("13579"))
    if is_second and isinstance(collector, pytest.Directory):
        report.result.reverse()
    return report


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long files first; skip tests marked gpu where there is no CUDA device."""
    longest_first(items)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def pytest_collection_finish() -> None:
    """Every engine that is closed looks for garbage: let it not look through all tests and modules
    each time, which takes longer than most tests.  What collection left behind is not looked for
    either."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 10, 10)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Nor through the modules that tests have imported: where a file begins nothing of the one
    before it is left.  At its 1st, 2nd, 4th, 8th ..., and wherever many modules are new."""
    begun = item.config.stash.setdefault(BEGUN, set())
    if item.path in begun:
        return
    begun.add(item.path)
    is_in_turn = len(begun) & (len(begun) - 1) == 0
    if is_in_turn or len(sys.modules) > item.config.stash[FROZEN] + MANY_MODULES:
        item.config.stash[FROZEN] = len(sys.modules)
        gc.collect()
        gc.freeze()
