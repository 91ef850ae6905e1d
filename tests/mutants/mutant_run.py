"""Runs jobs in children forked from a process that has imported what is slow, a few at a time."""

import gc
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

# What is slow to import, once for every child.
import hypothesis
import numpy  # noqa: F401
import torch
import transformers
import triton.language  # noqa: F401
from mutant_child import Killers, Verdict, collect, start

WORKERS = 2
LIMIT_S = 120  # CPU seconds of a job: a hang is a death, a slow machine is none


class Job(Protocol):
    """Edited modules and what is to notice."""

    @property
    def sources(self) -> Mapping[str, str]: ...  # by module

    @property
    def killers(self) -> Killers: ...


J = TypeVar("J", bound=Job)


def run(jobs: Sequence[J]) -> Iterator[tuple[J, Verdict]]:
    """The verdict of each job as it comes, WORKERS at a time."""
    waiting, running = list(reversed(jobs)), dict[int, tuple[J, int]]()
    while waiting or running:
        while waiting and len(running) < WORKERS:
            job = waiting.pop()
            child, pipe = start(job.sources, job.killers, limit_s=LIMIT_S)
            running[child] = job, pipe
        child, status = os.wait()
        job, pipe = running.pop(child)
        yield job, collect(pipe, status)


def warm_up() -> None:
    """Load what the libraries above load late, before the first fork."""
    assert "paceline" not in sys.modules
    phases = [phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.shrink]
    hypothesis.settings.register_profile("mutants", phases=phases)
    hypothesis.settings.load_profile("mutants")  # a death need not be pretty
    transformers.LlamaForCausalLM  # noqa: B018
    torch.zeros(2, 2) @ torch.zeros(2, 2)
    gc.freeze()  # no child looks through all of this for garbage
