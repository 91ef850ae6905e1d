"""Latency of a model that makes vectors: how long a batch of texts takes, and tokens per second.

    python -m paceline bench latency --model path/to/bert --batch-size 64 --input-len 512

Checks first that a text twice gives the same vector, then times `embed` of whole batches, with the
prefix cache off unless it was asked for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.page import Bars, bars
from paceline.bench.subject import attention_words, document
from paceline.core.errors import IntegrityError
from paceline.core.progress import collect
from paceline.llm.prepare import Prepared

Texts = Callable[[int, int], list[list[int]]]  # how many, and a salt -> token ids of each


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorResult:
    """One batch size; the best of some runs."""

    batch_size: int
    input_len: int
    batch_ms: float  # until every text of the batch has its vector
    tok_s: float  # batch x input_len / that time
    spread: float  # (best - worst) / best of the rates


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorReport:
    """What was found."""

    prepared: Prepared  # the engine that was timed
    boot_s: float
    kernel_cache: str
    repeat_agrees: bool  # before anything was timed
    results: tuple[VectorResult, ...]
    is_cut: bool  # by Ctrl-C

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self)

    def table(self) -> str:
        """For people."""
        rows = [
            f"{self.prepared.options.model} on {self.prepared.device.name}",
            f"boot {self.boot_s:.2f} s, kernel cache {self.kernel_cache}",
            attention_words(self.prepared),
            f"{'batch':>6}{'input':>8}{'batch ms':>12}{'tok/s':>16}{'spread':>9}",
        ]
        rows += [
            f"{each.batch_size:>6}{each.input_len:>8}{each.batch_ms:>12.2f}{each.tok_s:>16.1f}"
            f"{each.spread:>9.1%}"
            for each in self.results
        ]
        return "\n".join(rows)

    def drawings(self) -> list[Bars]:
        """Of each batch."""
        rows = [(f"batch {each.batch_size}", each) for each in self.results]
        return [
            bars("Time of the whole batch [ms]", rows, "batch_ms"),
            bars("Rate of the whole batch [tokens/s]", rows, "tok_s"),
        ]


def time_vectors(
    llm: Any,
    texts: Texts,
    batch_sizes: tuple[int, ...],
    *,
    repeats: int,
    boot_s: float,
    kernel_cache: str,
) -> VectorReport:
    """Check and time an open engine.  Raises IntegrityError from the check."""
    _require_repeatable(llm, texts)
    timed = (_time(llm, texts, size, repeats) for size in batch_sizes)
    results, is_cut = collect("batch sizes", timed, total=len(batch_sizes), unit="size")
    return VectorReport(
        prepared=llm.prepared,
        boot_s=boot_s,
        kernel_cache=kernel_cache,
        repeat_agrees=True,
        results=tuple(results),
        is_cut=is_cut,
    )


def _require_repeatable(llm: Any, texts: Texts) -> None:
    first, second = (llm.embed(texts(1, 1), use_tqdm=False)[0].vector for _ in range(2))
    if not np.array_equal(first, second):
        raise IntegrityError.about(
            "two vectors of one text",
            expected="equal",
            got=f"numbers up to {np.abs(first - second).max():.1e} apart",
            remedy="do not trust a timing of this configuration; try --enforce-eager",
        )


def _time(llm: Any, texts: Texts, batch_size: int, repeats: int) -> VectorResult:
    for _ in range(2):  # by then its shape has a graph, where it gets one
        llm.embed(texts(batch_size, 2), use_tqdm=False)
    seconds = []
    for repeat in range(repeats):
        batch = texts(batch_size, 3 + repeat)
        began = time.perf_counter()
        llm.embed(batch, use_tqdm=False)
        seconds.append(time.perf_counter() - began)
    best, worst = min(seconds), max(seconds)
    return VectorResult(
        batch_size=batch_size,
        input_len=len(batch[0]),
        batch_ms=1e3 * best,
        tok_s=sum(map(len, batch)) / best,
        spread=1.0 - best / worst,
    )
