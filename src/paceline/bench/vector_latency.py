"""Latency of a model that makes vectors, or scores pairs: how long a batch of texts takes, tokens
per second, and which share of the products a device could do that is.

    python -m paceline bench latency --model bert-base --load-format dummy --dtype bfloat16 \
        --batch-size 64 --input-len 512

Checks first that a text twice gives the same numbers, then times `embed`, or `score_pairs`, of
whole batches, with the prefix cache off unless it was asked for.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from paceline.bench.page import Bars, bars
from paceline.bench.subject import attention_words, document
from paceline.core.errors import IntegrityError
from paceline.core.model.config import LayerSpec, ModelConfig
from paceline.core.model.lookback import most_visible
from paceline.core.progress import collect
from paceline.llm.prepare import Prepared
from paceline.models.size import weightless

Texts = Callable[[int, int], list[list[int]]]  # how many, and a salt -> token ids of each


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorResult:
    """One batch size; the best of some runs."""

    batch_size: int
    input_len: int
    batch_ms: float  # until every text of the batch has its vector, or its score
    tok_s: float  # batch x input_len / that time
    spread: float  # (best - worst) / best of the rates
    of_limit: float | None  # of the published peak of bfloat16 products; None: unknown


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
            f"{'batch':>6}{'input':>8}{'batch ms':>12}{'tok/s':>16}{'spread':>9}{'of limit':>10}",
        ]
        rows += [
            f"{each.batch_size:>6}{each.input_len:>8}{each.batch_ms:>12.2f}{each.tok_s:>16.1f}"
            f"{each.spread:>9.1%}{_share(each.of_limit):>10}"
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
    first, second = (_numbers(llm, texts(1, 1))[0] for _ in range(2))
    if not np.array_equal(first, second):
        raise IntegrityError.about(
            "what is made twice of one text",
            expected="equal",
            got=f"numbers up to {np.abs(first - second).max():.1e} apart",
            remedy="do not trust a timing of this configuration; try --enforce-eager",
        )


def _time(llm: Any, texts: Texts, batch_size: int, repeats: int) -> VectorResult:
    for _ in range(2):  # by then its shape has a graph, where it gets one
        _numbers(llm, texts(batch_size, 2))
    seconds = []
    for repeat in range(repeats):
        batch = texts(batch_size, 3 + repeat)
        began = time.perf_counter()
        _numbers(llm, batch)
        seconds.append(time.perf_counter() - began)
    best, worst = min(seconds), max(seconds)
    tokens, limit = sum(map(len, batch)), _limit(llm.prepared)
    flops = None if limit is None else text_flops(llm.prepared.config, len(batch[0]))
    return VectorResult(
        batch_size=batch_size,
        input_len=len(batch[0]),
        batch_ms=1e3 * best,
        tok_s=tokens / best,
        spread=1.0 - best / worst,
        of_limit=None if flops is None or limit is None else batch_size * flops / best / limit,
    )


def _numbers(llm: Any, batch: list[list[int]]) -> list[Any]:
    """What is made of each text: a vector, or of its halves as a pair the scores of labels."""
    if llm.prepared.config.label_act is None:
        return [each.vector for each in llm.embed(batch, use_tqdm=False)]
    middle = (len(batch[0]) + 1) // 2
    pairs = [ids[:middle] for ids in batch], [ids[middle:] for ids in batch]
    return [np.array(each.scores) for each in llm.score_pairs(*pairs, use_tqdm=False)]


def _limit(prepared: Prepared) -> float | None:
    """Products a second, of a device whose peak is published for the dtype that runs."""
    return None if prepared.options.dtype == "float32" else prepared.device.matmul_flops


def text_flops(config: ModelConfig, length: int) -> float | None:
    """Of one text: two for each number of its layers' matrices and token, and what attention does
    between the tokens that see one another.  None: of experts and states, which are not counted."""
    if config.moe is not None or config.has_states:
        return None
    layers = weightless(config, "bfloat16").decoder.layers
    weights = sum(each.numel() for each in layers.parameters() if each.ndim == 2)
    pairs = 0.0
    for spec in config.layers:
        dims = spec.heads.num_heads * (spec.heads.head_dim + spec.heads.v_head_dim)
        pairs += dims * seen_pairs(spec, length)
    return 2.0 * (weights * length + pairs)


def seen_pairs(spec: LayerSpec, length: int) -> int:
    """Of a query and a key that it sees, in one text."""
    window = min(most_visible(spec.window) or length, length)
    behind = window * length - window * (window - 1) // 2
    return behind if spec.causal else 2 * behind - length


def _share(of_limit: float | None) -> str:
    return "-" if of_limit is None else f"{of_limit:.1%}"
