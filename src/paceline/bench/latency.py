"""Latency of one model on this machine: time to first token and decode rate.

    python -m paceline bench latency --model llama-3.1-8b --load-format dummy \
        --batch-size 1,8,64 --input-len 1024 --output-len 257

Checks first (the same prompt twice gives the same tokens; every count is exact; nobody was
preempted), then times.  Prompts are random ids of exact length from a seed, greedy, end tokens
ignored.  t(n) is the wall time of one `generate` of the whole batch for n tokens each;
t(1) is a run of its own on the same prompts, with the prefix cache off unless it was asked for.
Needs nothing beyond what the engine needs.
"""

import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from paceline.bench.latency_shape import LatencyShape
from paceline.bench.page import Bars, bars
from paceline.bench.subject import attention_words, document, drafter_words, forced_words
from paceline.bench.vector_latency import VectorReport, time_vectors
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.modes import End
from paceline.core.progress import collect
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.prepare import Prepared
from paceline.plan.machine import cache_state, kernel_cache, seconds_since_process_start

REPEATS = 3
CHECK_TOKENS = 16  # output tokens of the check


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyResult:
    """One batch size.  `decode_tok_s` and `ttft_ms` are the best of REPEATS runs."""

    batch_size: int
    input_len: int
    output_len: int
    ttft_ms: float  # t(1): until every request of the batch has its first token
    decode_tok_s: float  # batch x (output_len - 1) / (t(output_len) - t(1))
    spread: float  # (best - worst) / best of the decode rates
    mean_tokens_per_round: float | None  # of the last run, bonus tokens included; None: no rounds


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyCheck:
    """What held before anything was timed."""

    tokens_compared: int
    repeat_agrees: bool = True
    counts_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyReport:
    """What was found."""

    prepared: Prepared  # the engine that was timed
    boot_s: float
    first_token_s: float | None  # behind the start of the process; None: unknown
    kernel_cache: str
    check: LatencyCheck
    results: tuple[LatencyResult, ...]
    is_cut: bool  # by Ctrl-C

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return document(self)

    def table(self) -> str:
        """For people."""
        first = "unknown" if self.first_token_s is None else f"{self.first_token_s:.2f} s"
        rows = [
            f"{self.prepared.options.model} on {self.prepared.device.name}",
            f"boot {self.boot_s:.2f} s, first token {first} after process start, kernel cache "
            f"{self.kernel_cache}",
            attention_words(self.prepared),
            *self._speculation_rows(),
            f"{'batch':>6}{'input':>8}{'output':>8}{'ttft ms':>12}{'decode tok/s':>16}"
            f"{'spread':>9}",
        ]
        rows += [
            f"{each.batch_size:>6}{each.input_len:>8}{each.output_len:>8}"
            f"{each.ttft_ms:>12.2f}{each.decode_tok_s:>16.1f}{each.spread:>9.1%}"
            for each in self.results
        ]
        return "\n".join(rows)

    def drawings(self) -> list[Bars]:
        """Of each batch."""
        rows = [(f"batch {each.batch_size}", each) for each in self.results]
        return [
            bars("Time to first token [ms]", rows, "ttft_ms"),
            bars("Decode rate of the whole batch [tokens/s]", rows, "decode_tok_s"),
            bars("Tokens per round of one request", rows, "mean_tokens_per_round", form=".2f"),
        ]

    def _speculation_rows(self) -> list[str]:
        """Who drafts, and how many tokens a round gave; nothing where nobody does."""
        plan = self.prepared.speculation
        if plan is None:
            return []
        means = [each.mean_tokens_per_round for each in self.results]
        told = ", ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
        words = f"{drafter_words(plan)}: {told} tokens per round{forced_words(plan)}"
        return [f"speculation {words}"]


class LatencyBench:
    """Builds one engine, checks it, and times it.  Raises ConfigError when no step can hold the
    largest batch.
    """

    def __init__(
        self,
        asked: Mapping[str, object],
        shape: LatencyShape,
        *,
        make_llm: Callable[..., Any],
    ) -> None:
        rows = asked.get("max_num_seqs")
        if isinstance(rows, int) and rows < max(shape.batch_sizes):
            raise ConfigError.about(
                "max_num_seqs",
                expected=f"at least {max(shape.batch_sizes)}, the largest batch",
                got=rows,
                remedy="raise --max-num-seqs, leave it out, or lower --batch-size",
            )
        self._shape = shape
        self._asked = {
            "enable_prefix_cache": False,
            "max_num_seqs": max(shape.batch_sizes),
            **asked,
        }
        self._make_llm = make_llm

    def run(self) -> LatencyReport | VectorReport:
        """Boot, check, time; of a model that generates nothing how it makes vectors.  Raises
        IntegrityError from a check."""
        entries_before = kernel_cache().entries
        began = time.perf_counter()
        llm = self._make_llm(**self._asked)
        boot_s = time.perf_counter() - began
        try:
            prepared: Prepared = llm.prepared
            if End.GENERATE not in prepared.config.ends:
                return time_vectors(
                    llm,
                    partial(self._prompts, llm),
                    self._shape.batch_sizes,
                    repeats=REPEATS,
                    boot_s=boot_s,
                    kernel_cache=cache_state(prepared.device.device_type, entries_before),
                )
            self._generate(llm, batch_size=1, output_len=1, salt=0)
            first_token_s = seconds_since_process_start()
            check = self._check(llm)
            sizes = self._shape.batch_sizes
            timed = (self._time(llm, size) for size in sizes)
            results, is_cut = collect("batch sizes", timed, total=len(sizes), unit="size")
        finally:
            llm.close()
        return LatencyReport(
            prepared=prepared,
            boot_s=boot_s,
            first_token_s=first_token_s,
            kernel_cache=cache_state(prepared.device.device_type, entries_before),
            check=check,
            results=tuple(results),
            is_cut=is_cut,
        )

    def _check(self, llm: Any) -> LatencyCheck:
        length = min(CHECK_TOKENS, self._shape.output_len)
        first, second = (
            _tokens(self._generate(llm, batch_size=1, output_len=length, salt=1)[1])
            for _ in range(2)
        )
        if first != second:
            raise IntegrityError.about(
                "two greedy runs of one prompt",
                expected=f"equal tokens {first[0]}",
                got=second[0],
                remedy="do not trust a timing of this configuration; try --enforce-eager",
            )
        return LatencyCheck(tokens_compared=length)

    def _time(self, llm: Any, batch_size: int) -> LatencyResult:
        shape = self._shape
        for _ in range(2):  # by then its shape has a graph, where it gets one
            self._generate(llm, batch_size=batch_size, output_len=shape.output_len, salt=2)
        first_s, rates, outputs = [], [], list[RequestOutput]()
        for repeat in range(REPEATS):
            salt = 3 + repeat
            one, _ = self._generate(llm, batch_size=batch_size, output_len=1, salt=salt)
            full, outputs = self._generate(
                llm, batch_size=batch_size, output_len=shape.output_len, salt=salt
            )
            first_s.append(one)
            rates.append(batch_size * (shape.output_len - 1) / max(full - one, 1e-9))
        return LatencyResult(
            batch_size=batch_size,
            input_len=shape.input_len,
            output_len=shape.output_len,
            ttft_ms=1e3 * min(first_s),
            decode_tok_s=max(rates),
            spread=(max(rates) - min(rates)) / max(rates),
            mean_tokens_per_round=Acceptance.total(
                output.metrics.acceptance for output in outputs if output.metrics is not None
            ).mean_tokens_per_round,
        )

    def _prompts(self, llm: Any, batch_size: int, salt: int) -> list[list[int]]:
        return random_prompts(
            batch_size,
            self._shape.input_len,
            llm.prepared.config.vocab_size,
            seed=self._shape.prompt_seed * 1009 + salt,
        )

    def _generate(
        self, llm: Any, *, batch_size: int, output_len: int, salt: int
    ) -> tuple[float, list[RequestOutput]]:
        """(seconds, output of each request) of one batch; every count is verified."""
        prompts = self._prompts(llm, batch_size, salt)
        params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
        began = time.perf_counter()
        outputs: list[RequestOutput] = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        counts = [len(ids) for ids in _tokens(outputs)]
        if counts != [output_len] * batch_size:
            raise _count_error("output tokens per request", output_len, counts)
        preemptions = sum(output.metrics.preemptions for output in outputs if output.metrics)
        if preemptions:
            raise _count_error("preemptions", 0, preemptions)
        return seconds, outputs


def bench_latency(
    asked: Mapping[str, object],
    shape: LatencyShape,
    *,
    make_llm: Callable[..., Any] | None = None,
) -> LatencyReport | VectorReport:
    """Run the benchmark on the engine (or on `make_llm`'s)."""
    return LatencyBench(asked, shape, make_llm=make_llm or partial(_load, shape)).run()


def _load(shape: LatencyShape, **asked: object) -> Any:
    """The engine.  Raises ConfigError for a shape beyond its context, before weights are read."""
    from paceline.llm.llm import LLM
    from paceline.llm.prepare import prepare

    prepared = prepare(asked)
    generates = End.GENERATE in prepared.config.ends
    needed = shape.input_len + (shape.output_len if generates else 0)
    context_len = prepared.admission.context_len
    if needed > context_len:
        raise ConfigError.about(
            "input_len and output_len" if generates else "input_len",
            expected=f"at most {context_len} tokens{' together' * generates}, the context",
            got=needed,
            remedy="lower one, or raise --max-model-len if the model allows it",
        )
    return LLM(prepared)


def random_prompts(
    batch_size: int, input_len: int, vocab_size: int, *, seed: int
) -> list[list[int]]:
    """`batch_size` prompts of exactly `input_len` uniform random ids, the same for a seed."""
    source = random.Random(seed)
    return [[source.randrange(vocab_size) for _ in range(input_len)] for _ in range(batch_size)]


def _count_error(name: str, expected: object, got: object) -> IntegrityError:
    remedy = "do not trust a timing of this configuration; lower --batch-size"
    return IntegrityError.about(name, expected=expected, got=got, remedy=remedy)


def _tokens(outputs: Sequence[RequestOutput]) -> list[tuple[int, ...]]:
    """[num_requests] token ids."""
    return [output.outputs[0].token_ids for output in outputs]
