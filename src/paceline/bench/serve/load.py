"""A load: checked texts, warm-up, then requests in an open or a closed loop, each answer timed."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from paceline.bench.serve.asks import (
    NO_USAGE,
    Ask,
    Bodies,
    Scale,
    ServedModel,
    find_served_model,
    measure,
    plan_asks,
    sample,
    token_usage,
)
from paceline.bench.serve.client import AnswerError, Client, Document, Place
from paceline.bench.serve.shape import LoadShape
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.progress import Progress

_CHECKED_LEN = 32  # tokens of an answer that is compared


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one request.  Seconds behind the begin of the load."""

    due_s: float
    sent_s: float  # the client itself may be late
    came_s: tuple[float, ...]  # of every event with text
    ended_s: float
    wanted: int | None  # tokens; None: it may end by itself
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt; 0 also where the server does not say
    output_tokens: int = 0
    queue_s: float | None = None  # until the engine began it; None: the server does not say
    error: str | None = None  # its kind; errors are counted by it
    details: str = ""  # of the error

    @property
    def is_good(self) -> bool:
        return self.error is None

    @property
    def ttft_s(self) -> float | None:
        """From when it was due."""
        return self.came_s[0] - self.due_s if self.came_s else None

    @property
    def e2e_s(self) -> float:
        return self.ended_s - self.due_s

    @property
    def inter_token_s(self) -> float | None:
        """Per token behind the first, its mean; None of one token."""
        if self.output_tokens < 2 or len(self.came_s) < 2:
            return None
        return (self.came_s[-1] - self.came_s[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What a run brought."""

    target: ServedModel
    scale: Scale
    num_asked: int
    answers: tuple[Answer, ...]  # as they ended
    seconds: float  # until the last end
    is_cut: bool  # by Ctrl-C


class LoadRun:
    """Owns what has come of a load so far; Ctrl-C leaves it."""

    def __init__(self, shape: LoadShape) -> None:
        self._shape = shape
        self._answers: list[Answer] = []
        self._began = 0.0
        self._found: tuple[ServedModel, Scale, Sequence[Ask]] | None = None

    def run(self, base_url: str, *, model: str | None, api_key: str | None) -> Load:
        """Raises ConfigError for a server that cannot be measured, IntegrityError for texts that
        differ or a warm-up that fails, KeyboardInterrupt when it comes before any answer.
        """
        is_cut = False
        try:
            asyncio.run(self._run(base_url, model, api_key))
        except KeyboardInterrupt:
            if not self._answers:
                raise
            is_cut = True
        assert self._found is not None, "an answer has come"
        target, scale, asks = self._found
        return Load(
            target=target,
            scale=scale,
            num_asked=len(asks),
            answers=tuple(self._answers),
            seconds=max(answer.ended_s for answer in self._answers),
            is_cut=is_cut,
        )

    async def _run(self, base_url: str, model: str | None, api_key: str | None) -> None:
        shape = self._shape
        client = Client(Place.of(base_url), api_key=api_key, timeout=shape.timeout)
        try:
            target = await find_served_model(client, base_url, model)
            bodies = Bodies(target=target, shape=shape)
            try:
                scale = await measure(client, bodies, sample(shape))
                warmups, asks = plan_asks(shape, target, scale)
                self._found = target, scale, asks
                await _check_texts(client, bodies, [ask.text for ask in (warmups + asks)])
                await self._warm_up(client, bodies, warmups)
            except AnswerError as error:
                raise _unfit(error.kind, str(error)) from error
            await self._send_all(client, bodies, asks)
        finally:
            client.close()

    async def _warm_up(self, client: Client, bodies: Bodies, asks: Sequence[Ask]) -> None:
        self._began = time.perf_counter()
        with Progress("warm-up", len(asks), unit="request") as bar:
            for number, ask in enumerate(asks):
                answer = await self._answer(client, bodies, ask, number)
                if answer.error is not None:
                    raise _unfit(answer.error, answer.details)
                bar.advance()

    async def _send_all(self, client: Client, bodies: Bodies, asks: Sequence[Ask]) -> None:
        left = iter(enumerate(asks, self._shape.warmups))
        self._began = time.perf_counter()
        with Progress("load", len(asks), unit="request") as bar:

            async def send(number: int, ask: Ask) -> None:
                if ask.due_s is not None:
                    await asyncio.sleep(self._began + ask.due_s - time.perf_counter())
                self._answers.append(await self._answer(client, bodies, ask, number))
                bar.note(self._words())
                bar.advance()

            async def send_in_turn() -> None:
                for number, ask in left:
                    await send(number, ask)

            async with asyncio.TaskGroup() as group:
                if self._shape.concurrency is None:
                    for number, ask in left:
                        group.create_task(send(number, ask))
                else:
                    for _ in range(min(self._shape.concurrency, len(asks))):
                        group.create_task(send_in_turn())

    def _words(self) -> str:
        failed = sum(not answer.is_good for answer in self._answers)
        tokens = sum(answer.output_tokens for answer in self._answers)
        rate = tokens / (time.perf_counter() - self._began)
        return f"{rate:,.0f} tok/s" + (f", {failed} errors" if failed else "")

    async def _answer(self, client: Client, bodies: Bodies, ask: Ask, number: int) -> Answer:
        began, came = self._began, []
        usage: object = None
        counted, queue_s = NO_USAGE, None
        sent = time.perf_counter()
        kind, details = None, ""
        try:
            async with aclosing(client.stream(bodies.path, bodies.streamed(ask, number))) as events:
                async for now, event in events:
                    if has_text(event):
                        came.append(now - began)
                    usage = event.get("usage") or usage
                    for receipt in event.get("receipt") or ():
                        queue_s = receipt.get("queue_s") if queue_s is None else queue_s
            ended = time.perf_counter()
            counted = token_usage(usage)
        except AnswerError as error:
            ended, kind, details = time.perf_counter(), error.kind, str(error)
        except ConfigError as error:
            ended, kind, details = time.perf_counter(), "no usage", str(error)
        wanted = None if self._shape.natural_end else ask.output_len
        if kind is None and wanted not in (None, counted.output):
            kind, details = "wrong length", f"{counted.output} tokens, asked for {wanted}"
        return Answer(
            due_s=sent - began if ask.due_s is None else ask.due_s,
            sent_s=sent - began,
            came_s=tuple(came),
            ended_s=ended - began,
            wanted=wanted,
            prompt_tokens=counted.prompt,
            cached_tokens=counted.cached,
            output_tokens=counted.output,
            queue_s=queue_s,
            error=kind,
            details=details,
        )


def has_text(event: Document) -> bool:
    """Whether an event of a stream brings some of an answer."""
    for choice in event.get("choices", ()):
        delta = choice.get("delta", choice)
        if any(delta.get(name) for name in _SAID):
            return True
    return False


_SAID = ("text", "content", "reasoning_content", "reasoning", "tool_calls")


async def _check_texts(client: Client, bodies: Bodies, texts: Sequence[str]) -> None:
    """Raise IntegrityError unless each of the first prompts gives the same text twice."""
    for number, text in enumerate(texts[: bodies.shape.checks]):
        body = bodies.of(text, _CHECKED_LEN, is_greedy=True)
        once, again = [
            answer_text(await client.post(bodies.path, body)) for _ in range(2)
        ]  # one behind the other
        if once != again:
            at = next(
                (i for i, (a, b) in enumerate(zip(once, again, strict=False)) if a != b),
                min(len(once), len(again)),
            )
            raise IntegrityError.about(
                f"the text of prompt {number} at temperature 0, sent twice",
                expected=f"the same, {once[at : at + 20]!r} behind {at} characters",
                got=repr(again[at : at + 20]),
                remedy="do not trust a timing of this server; if it is a tie that other steps "
                "round otherwise (a prefix found in the cache), serve float32 or pass --checks 0",
            )


def answer_text(answer: Document) -> str:
    """All that the choices of an answer in one piece say."""
    said = [choice.get("message", choice) for choice in answer.get("choices", ())]
    return "".join(str(each.get(name) or "") for each in said for name in _SAID)


def _unfit(kind: str, details: str) -> IntegrityError:
    return IntegrityError.about(
        "a request before the load",
        expected="answered",
        got=f"{kind}: {details}",
        remedy="mend that first; --natural-end where the server does not know ignore_eos",
    )
