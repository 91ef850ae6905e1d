"""From a job to its HTTP answer, whole or as a stream; the endpoints differ in their Writer."""

import asyncio
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from paceline.core.errors import PacelineError
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.answers.ticket import Ticket
from paceline.engine.request import ALIKE, FinishReason, Share
from paceline.server.bodies.reader import Reading
from paceline.server.errors import ApiError, as_api_error, of_bug
from paceline.server.service import Service
from paceline.server.stream import EventStream, event, unless_gone
from paceline.server.telemetry.access_log import Entry
from paceline.server.telemetry.meters import Meters

Document = dict[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Envelope:
    """What stands around choices, the same in every document of an answer."""

    response_id: str
    kind: str  # the `object`
    created: int  # [s] since 1970
    model: str  # by which clients name it
    fingerprint: str  # of the engine

    def document(self) -> Document:
        """As the OpenAI API says it."""
        return {
            "id": self.response_id,
            "object": self.kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": self.fingerprint,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """Tokens of a request."""

    prompt: int
    completion: int
    cached: int  # of the prompt's, found in the prefix cache

    @property
    def total(self) -> int:
        return self.prompt + self.completion

    def document(self) -> Document:
        """The `usage` of the OpenAI API."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.total,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


class Writer(ABC):
    """How an endpoint writes its choices."""

    id_prefix: str
    kind: str  # the `object` of an answer
    chunk_kind: str  # the `object` of a piece of a stream

    @abstractmethod
    def opening(self, index: int) -> list[Document]:
        """What a stream says of a choice before its first token."""

    @abstractmethod
    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        """What a stream says of a choice that has grown or ended."""

    @abstractmethod
    def whole(self, index: int, growth: RequestOutput, completion: CompletionOutput) -> Document:
        """A choice that came in one piece."""

    # What stands around choices; other APIs than OpenAI's say it otherwise.

    def document(
        self, envelope: Envelope, choices: list[Document], counts: TokenCounts
    ) -> Document:
        """A whole answer."""
        return envelope.document() | {"choices": choices, "usage": counts.document()}

    def chunk(self, envelope: Envelope, choice: Document, usage: Document) -> bytes:
        """Of a stream, with what `opening` or `piece` says of a choice.  usage: what to add."""
        return event(encoded(envelope.document() | {"choices": [choice]} | usage))

    def ending(
        self, envelope: Envelope, counts: TokenCounts | None, receipt: Document
    ) -> list[bytes]:
        """The last events of a stream.  counts: if they were asked for; receipt: told with them."""
        told = []
        if counts is not None:
            usage = {"choices": [], "usage": counts.document()}
            told.append(encoded(envelope.document() | receipt | usage))
        return [event(each) for each in (*told, b"[DONE]")]

    def fault(self, error: ApiError) -> bytes:
        """The last event of a stream that fails."""
        return event(encoded(error.document()))


class WholeWriter(Writer):
    """One of answers that are no streams."""

    chunk_kind = ""

    def opening(self, index: int) -> list[Document]:
        raise AssertionError("it is no stream")

    def piece(
        self, index: int, growth: RequestOutput, completion: CompletionOutput
    ) -> list[Document]:
        raise AssertionError("it is no stream")

    def around(self, envelope: Envelope, counts: TokenCounts) -> Document:
        """What one that generates nothing says around what was found."""
        return {
            "id": envelope.response_id,
            "object": envelope.kind,
            "created": envelope.created,
            "model": envelope.model,
            "usage": {"prompt_tokens": counts.prompt, "total_tokens": counts.total},
        }


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Job:
    """What a request asks for, checked."""

    prompts: Sequence[Sequence[int]]  # token ids
    params: SamplingParams
    stream: bool
    include_usage: bool
    writer: Writer
    continuous_usage: bool = False  # in every chunk
    share: Share = ALIKE  # how it takes turns with others
    deadline: float | None = None  # by the loop's clock
    end: End = End.GENERATE
    second_from: Sequence[int] = ()  # of pairs: where the second text of each begins

    @classmethod
    def of(cls, asked: Reading, writer: Writer) -> "Job":
        """What a body asks for, in the endpoint's words."""
        return cls(
            prompts=asked.prompts,
            params=asked.params,
            end=asked.end,
            second_from=asked.second_from,
            stream=asked.stream,
            include_usage=asked.include_usage,
            writer=writer,
            continuous_usage=asked.continuous_usage,
        )


@dataclass(slots=True, kw_only=True)
class Usage:
    """Counts tokens as they come, and tells the meters of what has ended."""

    meters: Meters
    entry: Entry  # of the access log
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    receipts: list[Document] = field(default_factory=list)  # of prompts that asked, as they ended

    def add(self, growth: RequestOutput) -> None:
        self.entry.add(growth)
        self.completion_tokens += sum(len(each.token_ids) for each in growth.outputs)
        if growth.metrics is not None:
            self.prompt_tokens += growth.metrics.prompt_tokens
            self.cached_tokens += growth.metrics.cached_tokens
            self.meters.finished(growth.metrics)
            receipt = growth.metrics.receipt_document()
            if receipt is not None:
                self.receipts.append(receipt)

    def counts(self, prompt_tokens: int | None = None) -> TokenCounts:
        """prompt_tokens: of what has not ended, too; they are counted when it has."""
        return TokenCounts(
            prompt=self.prompt_tokens if prompt_tokens is None else prompt_tokens,
            completion=self.completion_tokens,
            cached=self.cached_tokens,
        )

    def receipt(self) -> Document:
        """What the last document of an answer says beside it."""
        return {"receipt": self.receipts} if self.receipts else {}


async def answer(service: Service, job: Job, request: Request) -> Response:
    """Run a job; a client that leaves cancels it.  Raises RequestError, ApiError, ClientGone."""
    usage = Usage(meters=service.meters, entry=Entry.of(request))
    envelope = _envelope(service, job)
    usage.entry.response_id = envelope.response_id
    if not job.stream:
        document = await unless_gone(request.receive, _whole(service, job, envelope, usage))
        return Response(encoded(document), media_type="application/json")
    ticket = await _start(service, job)
    return EventStream(_events(ticket, job, envelope, usage))


def encoded(document: Document) -> bytes:
    """JSON in UTF-8, on one line.  Numbers are finite: where they come from sees to it."""
    return msgspec.json.encode(document)


def _envelope(service: Service, job: Job) -> Envelope:
    return Envelope(
        response_id=f"{job.writer.id_prefix}{uuid.uuid4().hex}",
        kind=job.writer.chunk_kind if job.stream else job.writer.kind,
        created=int(time.time()),
        model=service.model,
        fingerprint=service.fingerprint,
    )


async def _start(service: Service, job: Job) -> Ticket:
    return await service.engine.generate(
        job.prompts,
        job.params,
        end=job.end,
        second_from=job.second_from,
        share=job.share,
        stream=job.stream,
        deadline=job.deadline,
    )


async def _whole(service: Service, job: Job, envelope: Envelope, usage: Usage) -> Document:
    ticket = await _start(service, job)
    try:
        answers = sorted([each async for each in ticket], key=_by_index)
    finally:
        ticket.close()
    choices: list[Document] = []
    for _, growth in answers:
        usage.add(growth)
        for completion in growth.outputs:
            _require_answer(completion)
            choices.append(await _written(job, job.writer.whole, len(choices), growth, completion))
            await asyncio.sleep(0)  # others' turn: a vector may be long
    told = job.writer.document(envelope, choices, usage.counts())
    return told | usage.receipt()


async def _written(
    job: Job,
    write: Callable[[int, RequestOutput, CompletionOutput], T],
    index: int,
    growth: RequestOutput,
    completion: CompletionOutput,
) -> T:
    """What a writer says; beside the streams where it may name every token of a prompt."""
    params = job.params
    names_tokens = params.trace_tokens or params.prompt_logprobs is not None
    if names_tokens and completion.num_tokens_before == 0:
        return await asyncio.to_thread(write, index, growth, completion)
    return write(index, growth, completion)


def _by_index(news: tuple[int, RequestOutput]) -> int:
    return news[0]


async def _events(
    ticket: Ticket, job: Job, envelope: Envelope, usage: Usage
) -> AsyncGenerator[bytes, None]:
    writer = job.writer
    try:
        for index in range(len(job.prompts) * job.params.n):
            for choice in writer.opening(index):
                yield writer.chunk(envelope, choice, _usage_so_far(job, usage))
        async for at, growth in ticket:
            usage.add(growth)
            for completion in growth.outputs:
                _require_answer(completion)
                index = at * job.params.n + completion.index
                for choice in await _written(job, writer.piece, index, growth, completion):
                    yield writer.chunk(envelope, choice, _usage_so_far(job, usage))
        counts = usage.counts() if job.include_usage or usage.receipts else None
        for last in writer.ending(envelope, counts, usage.receipt()):
            yield last
    except ApiError as error:
        yield _fault(writer, error, usage)
    except PacelineError as error:
        yield _fault(writer, as_api_error(error), usage)
    except Exception as error:
        yield _fault(writer, of_bug(error), usage)
        raise
    finally:
        ticket.close()


def _fault(writer: Writer, error: ApiError, usage: Usage) -> bytes:
    usage.entry.fault = error.code or str(error.status)
    return writer.fault(error)


def _usage_so_far(job: Job, usage: Usage) -> Document:
    """What a chunk says of it."""
    if job.continuous_usage:
        return {"usage": usage.counts(prompt_tokens=sum(map(len, job.prompts))).document()}
    return {"usage": None} if job.include_usage else {}


def _require_answer(completion: CompletionOutput) -> None:
    """Raises ApiError for one that has none."""
    if completion.finish_reason is FinishReason.ERROR:
        raise ApiError(500, str(completion.error), code="generation_failed")
    if completion.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the server stops before this answer was whole; send it again")
