"""LLM: the engine as a Python object.

from paceline import LLM, SamplingParams

llm = LLM("bundled")
print(llm.generate("def fibonacci(n):", SamplingParams(temperature=0.0))[0].outputs[0].text)
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, overload

from paceline.core.errors import ConfigError, ModelError, PacelineError, RequestError, message
from paceline.core.sampling_params import SamplingParams
from paceline.engine.boot import Booted, Knobs, boot
from paceline.engine.fit import compare
from paceline.engine.machine import versions
from paceline.engine.outputs import RequestOutput
from paceline.engine.tokenizer import Tokenizer
from paceline.engine.tracker import Tracker

Prompt = str | Sequence[int]
Params = SamplingParams | Mapping[str, Any]


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
        snapshots, whose text and ids accumulate, as they come; leaving it early aborts the rest.
        Raises RequestError before anything runs when a prompt or parameter is wrong.
        """
        trackers = self._submit(prompts, params)
        if stream:
            return self._stream(trackers)
        for _ in self._stream(trackers):
            pass
        return [tracker.snapshot() for tracker in trackers]

    def abort(self, request_id: str) -> bool:
        """End a request; its stream yields a last snapshot.  False when it has ended already."""
        return self._live.engine.abort(request_id)

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError for a shape, which has none."""
        if self._live.tokenizer is None:
            raise ModelError(
                message(
                    "tokenizer",
                    expected="a model with tokenizer.json",
                    got="a shape",
                    remedy="pass prompts as token ids",
                )
            )
        return self._live.tokenizer

    @property
    def resolution_table(self) -> str:
        """The resolved configuration, each value with its origin."""
        return self._live.resolution.table()

    def report(self) -> dict[str, Any]:
        """What was booted: versions, device, options, memory planned and measured, events."""
        booted = self._live
        return {
            "versions": versions(),
            "device": booted.device.name,
            "boot_s": booted.boot_s,
            "options": booted.resolution.to_json(),
            "attention": {"name": booted.attention.name, "why": booted.attention.why},
            "memory": {"planned": booted.fit.to_json(), "measured": dict(booted.measured)},
            "events": [
                {"reason": event.reason, "detail": event.detail, "count": count}
                for event, count in booted.events.counts().items()
            ],
        }

    def memory_table(self) -> str:
        """Planned and measured bytes side by side."""
        return compare(self._live.fit, self._live.measured)

    def close(self) -> None:
        """Abort what runs and give the memory back; closing twice is harmless."""
        if self._booted is not None:
            self._booted.engine.drain()
            self._booted = None

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

    def _submit(
        self, prompts: Prompt | Sequence[Prompt], params: Params | Sequence[Params] | None
    ) -> list[Tracker]:
        """Check everything, then queue everything."""
        batch = _as_batch(prompts)
        wanted = _as_params(params, len(batch))
        checked = [
            (self._prompt_ids(prompt), self._checked(each, prompt))
            for prompt, each in zip(batch, wanted, strict=True)
        ]
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

    def _stream(self, trackers: list[Tracker]) -> Iterator[RequestOutput]:
        """Turn the loop until every tracker has ended; yields a snapshot whenever one grew."""
        mine = {id(tracker) for tracker in trackers}
        told: set[int] = set()
        try:
            while len(told) < len(trackers):
                touched = {id(tracker) for tracker in self._live.engine.step()}
                for tracker in trackers:
                    key = id(tracker)
                    if key in told or not (key in touched or tracker.is_finished):
                        continue
                    if tracker.is_finished:
                        told.add(key)
                    yield tracker.snapshot()
        finally:
            self._abort_all([tracker for tracker in trackers if id(tracker) in mine - told])

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

    def _checked(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        if params.stop and self._live.tokenizer is None:
            raise RequestError(
                message(
                    "stop",
                    expected="empty for a model without a tokenizer",
                    got=repr(params.stop),
                    remedy="use stop_token_ids",
                )
            )
        params.check_vocabulary(self._live.config.vocab_size)
        params.all_stop_ids(self._live.config.eos_token_ids)
        return params

    def _seed(self) -> int:
        """A seed of its own for each request that brings none; repeatable for an engine."""
        return (self._live.resolution.options.seed + self._num_requests) % 2**63


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    items = list(prompts)
    if items and all(isinstance(item, int) for item in items):
        return [items]  # type: ignore[list-item]
    for item in items:
        if isinstance(item, bytes) or not isinstance(item, str | Sequence):
            raise RequestError(
                message(
                    "prompt",
                    expected="text or a sequence of token ids",
                    got=type(item).__name__,
                    remedy="pass a str or a list of int",
                )
            )
    return items  # type: ignore[return-value]


def _as_params(params: Params | Sequence[Params] | None, count: int) -> list[SamplingParams]:
    if params is None:
        params = SamplingParams()
    if isinstance(params, SamplingParams | Mapping):
        params = [params] * count
    if len(params) != count:
        raise ConfigError(
            message(
                "params",
                expected=f"one for all or one for each of {count} prompts",
                got=f"{len(params)}",
                remedy="pass a single SamplingParams",
            )
        )
    return [
        each if isinstance(each, SamplingParams) else SamplingParams.from_dict(each)
        for each in params
    ]
