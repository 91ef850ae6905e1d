"""LLM: the engine as a Python object.

from paceline import LLM, SamplingParams

llm = LLM("bundled")
print(llm.generate("def fibonacci(n):", SamplingParams(temperature=0.0))[0].outputs[0].text)
"""

import gc
from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

import torch

from paceline.core.errors import ModelError, PacelineError, RequestError, message
from paceline.core.options import known
from paceline.core.sampling_params import SamplingParams
from paceline.engine.boot import Booted, Knobs, boot
from paceline.engine.budget_table import compare
from paceline.engine.engine import Engine
from paceline.engine.inputs import Params, Prompt, as_batch, as_params
from paceline.engine.machine import versions
from paceline.engine.outputs import RequestOutput
from paceline.engine.processors import check_extra_args
from paceline.engine.teacher import Teacher
from paceline.engine.tokenizer import Tokenizer
from paceline.engine.tracker import Tracker


class LLM:
    """A model that is loaded and ready.  Options are the fields of core.options.EngineOptions.

    Raises ConfigError or ModelError when it cannot be built.  Not thread-safe.
    """

    def __init__(
        self, model: str = "bundled", *, knobs: Knobs | None = None, **options: Any
    ) -> None:
        self._booted: Booted | None = boot({"model": model, **options}, knobs=knobs)
        self._num_requests = 0

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[False] = False,
    ) -> list[RequestOutput]: ...

    @overload
    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: Literal[True],
    ) -> Iterator[RequestOutput]: ...

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: Params | Sequence[Params] | None = None,
        *,
        stream: bool = False,
    ) -> list[RequestOutput] | Iterator[RequestOutput]:
        """Complete one prompt or many, given as text or token ids.

        params: one for all prompts, or one each; a mapping is read as SamplingParams.from_dict.
        Returns finished outputs in the order of the prompts.  With stream=True an iterator of
        snapshots, whose text and ids accumulate, as they come; leaving it early (dropping it, or
        its close()) aborts the rest.
        Raises RequestError before anything runs when a prompt or parameter is wrong.
        """
        trackers = self.submit(prompts, params)
        if stream:
            return _Stream(self, trackers)
        try:
            while not all(tracker.is_finished for tracker in trackers):
                self._live.engine.step()
        finally:
            self._abort_all(trackers)
        return [tracker.snapshot() for tracker in trackers]

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields a last snapshot.  False when it has ended already."""
        return self._live.engine.abort(request_id)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError for a model that brought none."""
        if self._live.tokenizer is None:
            raise ModelError(
                message(
                    "tokenizer",
                    expected="a model with tokenizer.json",
                    got="one without",
                    remedy="pass prompts as token ids",
                )
            )
        return self._live.tokenizer

    @property
    def resolution_table(self) -> str:
        """The resolved configuration, each value with its origin."""
        return self._live.resolution.table()

    def report(self) -> dict[str, Any]:
        """What was booted: versions, device, options, drafter, memory budget, events."""
        booted = self._live
        return {
            "versions": versions(),
            "device": booted.device.name,
            "vocab_size": booted.config.vocab_size,
            "boot_s": booted.boot_s,
            "options": booted.resolution.to_json(),
            "attention": {"name": booted.attention.name, "why": booted.attention.why},
            "speculation": None if booted.speculation is None else booted.speculation.to_json(),
            "memory": {"planned": booted.fit.to_json(), "measured": dict(booted.measured)},
            "events": [
                {"reason": event.reason, "detail": event.detail, "count": count}
                for event, count in booted.events.counts().items()
            ],
        }

    def memory_table(self) -> str:
        """Planned and measured bytes side by side."""
        return compare(self._live.fit, self._live.measured)

    @property
    def engine(self) -> Engine:
        """The engine below, for tools that drive single turns."""
        return self._live.engine

    def teacher(self) -> Teacher:
        """The target alone, for tools that compare engines.  Raises PacelineError when busy."""
        booted = self._live
        scheduler = booted.engine.scheduler
        is_busy = scheduler.num_running or scheduler.num_waiting
        while booted.engine.has_work and not is_busy:  # what is in flight has ended already
            booted.engine.step()
        if is_busy:
            raise PacelineError(
                message(
                    "engine",
                    expected="idle",
                    got="busy with requests",
                    remedy="finish or abort them first",
                )
            )
        most = known(booted.resolution.options.max_num_batched_tokens)
        return Teacher(booted.runner.parts, scheduler.cache, max_step_tokens=most)

    def close(self) -> None:
        """Abort what runs and give the memory back; closing twice is harmless."""
        if self._booted is not None:
            self._booted.engine.drain()
            self._booted = None
            # Graphs, programs and buffers refer to each other; free them before the next engine.
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _live(self) -> Booted:
        if self._booted is None:
            raise PacelineError(
                message("LLM", expected="open", got="closed", remedy="build a new one")
            )
        return self._booted

    def submit(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None
    ) -> list[Tracker]:
        """Check everything, then queue everything; the caller turns `engine.step`.

        Raises RequestError, and queues nothing then.
        """
        batch = as_batch(prompts)
        wanted = as_params(params, len(batch))
        checked = []
        for prompt, each in zip(batch, wanted, strict=True):
            ids = self._prompt_ids(prompt)
            self._check_params(each, prompt_len=len(ids))
            checked.append((ids, each))
        trackers: list[Tracker] = []
        try:
            for prompt, (ids, each) in zip(batch, checked, strict=True):
                text = prompt if isinstance(prompt, str) else None
                name = f"request-{self._num_requests}"
                seed = each.seed if each.seed is not None else self._seed()
                self._num_requests += 1
                trackers.append(
                    self._live.engine.add(name, ids, replace(each, seed=seed), prompt=text)
                )
        except RequestError:
            self._abort_all(trackers)
            raise
        return trackers

    def _abort_all(self, trackers: list[Tracker]) -> None:
        for tracker in trackers:
            if self._booted is not None:
                self._booted.engine.abort(tracker.request.request_id)

    def _prompt_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        vocab_size = self._live.config.vocab_size
        for index, token in enumerate(prompt):
            is_id = isinstance(token, int) and not isinstance(token, bool)
            if not is_id or not 0 <= token < vocab_size:
                raise RequestError(
                    message(
                        f"prompt token id {index}",
                        expected=f"an integer from 0 to {vocab_size - 1}",
                        got=repr(token),
                        remedy="encode the prompt with this model's tokenizer",
                    )
                )
        return list(prompt)

    def _check_params(self, params: SamplingParams, *, prompt_len: int) -> None:
        if params.stop and self._live.tokenizer is None:
            raise RequestError(
                message(
                    "stop",
                    expected="empty for a model without a tokenizer",
                    got=repr(params.stop),
                    remedy="use stop_token_ids",
                )
            )
        vocab_size = self._live.config.vocab_size
        params.check_vocabulary(vocab_size)
        check_extra_args(
            self._live.processors,
            params,
            vocab_size=vocab_size,
            prompt_len=prompt_len,
            stop_ids=params.all_stop_ids(self._live.config.eos_token_ids),
        )

    def _seed(self) -> int:
        """A seed of its own for each request that brings none; repeatable for an engine."""
        return (self._live.resolution.options.seed + self._num_requests) % 2**63


class _Stream(Iterator[RequestOutput]):
    """Snapshots of some requests as they grow, whoever turns the loop.  Owns their end: closed or
    dropped, even before its first snapshot, it aborts those that still run.
    """

    def __init__(self, llm: LLM, trackers: list[Tracker]) -> None:
        self._llm = llm
        self._trackers = trackers
        self._snapshots = _follow(llm, trackers)  # holds no reference to self: see __del__

    def __next__(self) -> RequestOutput:
        return next(self._snapshots)

    def close(self) -> None:
        """Abort what still runs; there is nothing more to come."""
        self._snapshots.close()
        self._llm._abort_all(self._trackers)  # for a generator that never started

    def __del__(self) -> None:
        self.close()


def _follow(llm: LLM, trackers: list[Tracker]) -> Generator[RequestOutput, None, None]:
    """Turn the loop until every request has ended; interrupted, abort the rest at once."""
    left = dict.fromkeys(trackers, 0)  # tokens shown
    try:
        while left:
            grown = [each for each, shown in left.items() if _has_news(each, shown)]
            if not grown:
                llm._live.engine.step()
            for tracker in grown:
                left[tracker] = tracker.num_tokens
                if tracker.is_finished:
                    del left[tracker]
                yield tracker.snapshot()
    finally:
        llm._abort_all(trackers)


def _has_news(tracker: Tracker, num_shown: int) -> bool:
    return tracker.is_finished or tracker.num_tokens > num_shown
