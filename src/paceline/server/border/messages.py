"""What crosses the border: commands one way, news the other; plain data, never a live object.

A frame is a length and a list of messages in msgpack, each an array that begins with its number:
one frame holds whatever there is to say at its time, so a turn takes one for all streams.
"""

import struct
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from paceline.core import errors
from paceline.core.errors import PacelineError, message
from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import CompletionOutput, RequestMetrics, RequestOutput
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.engine.answers.trace import Trace
from paceline.engine.answers.tracker import Tracker
from paceline.engine.request import FinishReason, Share

_HEAD = struct.Struct("<Q")  # bytes of the messages
_Row = tuple[int, float, tuple[int, ...], tuple[float, ...]]  # TokenLogprobs, in its order


class BorderMessage(Struct, frozen=True, array_like=True, kw_only=True):
    """One thing that is said."""


# From HTTP to the engine.


class Submit(BorderMessage, frozen=True, tag=0):
    """Queue prompts, all or none; the answer is Queued or EngineRefusal."""

    number: int  # of the ticket
    prompts: tuple[tuple[int, ...], ...]  # token ids of each
    params: SamplingParams
    share: Share
    stream: bool  # tell of them while they run
    end: End = End.GENERATE
    second_from: tuple[int, ...] = ()  # of pairs: where the second text of each begins


class Cancel(BorderMessage, frozen=True, tag=1):
    """Nobody waits for a ticket any more."""

    number: int


class Abort(BorderMessage, frozen=True, tag=2):
    """End every request; each has its last news."""


class Look(BorderMessage, frozen=True, tag=3):
    """Say what the engine does: Looked."""


class Leave(BorderMessage, frozen=True, tag=4):
    """Abort, and end."""


Command = Submit | Cancel | Abort | Look | Leave


# From the engine to HTTP.


class LoadProgress(BorderMessage, frozen=True, tag=10):
    """How far the model is loaded."""

    phase: str
    done: int
    total: int  # 0: nobody knows


class Vectors(Struct, frozen=True, kw_only=True):
    """What the engine makes of texts that it pools."""

    width: int  # numbers of a vector; 0: it makes none
    normalizes: bool  # to length 1, unasked
    prompt: str = ""  # put before every text
    lowers: bool = False  # texts
    label_act: str | None = None  # of a classifier, whose numbers are scores of labels


NO_VECTORS = Vectors(width=0, normalizes=True)


class Ready(BorderMessage, frozen=True, tag=11):
    """The engine serves; what of it HTTP must know."""

    context_len: int  # tokens of a prompt and its answer
    max_running: int  # completions
    vocab_size: int
    folder: str | None  # of tokenizer.json
    fingerprint: str  # the same for the same version and options
    ends: tuple[End, ...] = ()  # what it does
    vectors: Vectors = NO_VECTORS


class EngineRefusal(BorderMessage, frozen=True, tag=12):
    """An error that was raised on purpose, by its class: of a ticket, or of the engine's start."""

    number: int | None  # of the ticket; None: the engine
    kind: str
    text: str

    @classmethod
    def of(cls, error: PacelineError, number: int | None = None) -> "EngineRefusal":
        return cls(number=number, kind=type(error).__name__, text=str(error))

    def error(self) -> PacelineError:
        """As it was raised; one of a kind that takes more than a text as the nearest above it."""
        kind = getattr(errors, self.kind, PacelineError)
        while "__init__" in vars(kind) and kind is not PacelineError:
            kind = kind.__base__
        found: PacelineError = kind(self.text)
        return found


class Queued(BorderMessage, frozen=True, tag=13):
    """Every prompt of a ticket is queued."""

    number: int


class CompletionGrowth(BorderMessage, frozen=True, tag=14):
    """What came to one completion; CompletionOutput has the words."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    logprobs: tuple[_Row, ...] | None
    error: str | None
    is_drafted: tuple[bool, ...]
    num_chars_before: int
    num_tokens_before: int
    trace: Trace | None = None


class Grown(BorderMessage, frozen=True, tag=15):
    """What came to one prompt of a ticket since the last; RequestOutput has the words, and what of
    it the asker knows is not said again."""

    number: int  # of the ticket
    index: int  # of the prompt in it
    name: str  # of the request
    pieces: tuple[CompletionGrowth, ...]
    finished: bool
    metrics: RequestMetrics | None
    prompt_logprobs: tuple[_Row | None, ...] | None
    pooled: bytes | None = None

    @classmethod
    def of(cls, number: int, index: int, tracker: Tracker) -> "Grown":
        """Reads the tracker's growth."""
        return tracker.growth(_piece, partial(_grown, number, index))

    def growth(self, prompt: Sequence[int]) -> RequestOutput:
        """prompt: its token ids."""
        scored = self.prompt_logprobs
        return RequestOutput(
            request_id=self.name,
            prompt=None,
            prompt_token_ids=tuple(prompt),
            outputs=tuple([_output(each) for each in self.pieces]),
            finished=self.finished,
            metrics=self.metrics,
            prompt_logprobs=None
            if scored is None
            else tuple([None if row is None else _logprobs(row) for row in scored]),
            pooled=self.pooled,
        )


class Steps(BorderMessage, frozen=True, tag=16):
    """Steps of one kind since the start, and how long they took."""

    counts: tuple[int, ...]  # [len(STEP_SECONDS) + 1] by the first bound that holds it, or none
    seconds: float  # all together


class Pages(Struct, frozen=True, array_like=True, kw_only=True):
    """The pages of a cache group."""

    used: int  # by requests; those that come back included
    cached: int  # prefixes that nobody computes anew
    free: int


class Looked(BorderMessage, frozen=True, tag=17):
    """The engine between two turns."""

    running: int  # completions
    waiting: int  # those whose form is being made among them
    kv_used: float  # of the pages of the fullest cache group, cached prefixes not counted
    queried_tokens: int  # of prompts, since the start
    hit_tokens: int  # of these found in the prefix cache
    pages: dict[str, Pages]  # by cache group
    steps: dict[str, Steps]  # by kind


class LogLine(BorderMessage, frozen=True, tag=18):
    """A line of the engine's log."""

    level: int
    text: str


class Stuck(BorderMessage, frozen=True, tag=19):
    """A turn that does not end, or None: it has ended."""

    phase: str | None


class Broken(BorderMessage, frozen=True, tag=20):
    """The engine ends by what a turn raised."""

    cause: str


News = LoadProgress | Ready | EngineRefusal | Queued | Grown | Looked | LogLine | Stuck | Broken
STOPPING = message(
    "the server", expected="running", got="stopping", remedy="send it to another, or again later"
)
STEP_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
M = TypeVar("M", bound=BorderMessage)


def framed(messages: Sequence[BorderMessage]) -> bytes:
    """One frame.  Raises OverflowError for an integer beyond 64 bits."""
    body = msgspec.msgpack.encode(messages)
    return _HEAD.pack(len(body)) + body


class Frames:
    """Reads one end's bytes, in whatever pieces they come."""

    def __init__(self, kind: object) -> None:
        """kind: of the messages, Command or News."""
        self._decoder = msgspec.msgpack.Decoder(list[kind])  # type: ignore[valid-type]
        self._read = bytearray()

    def feed(self, data: bytes) -> Iterator[BorderMessage]:
        """The messages of every frame that is whole now."""
        read = self._read
        read += data
        begin = 0
        while len(read) >= begin + _HEAD.size:
            (size,) = _HEAD.unpack_from(read, begin)
            end = begin + _HEAD.size + size
            if len(read) < end:
                break
            yield from self._decoder.decode(memoryview(read)[begin + _HEAD.size : end])
            begin = end
        del read[:begin]


# A token of a stream takes one of each: they are made once, of what the tracker says.


def _grown(
    number: int,
    index: int,
    *,
    request_id: str,
    prompt: str | None,  # the asker knows it, and its ids
    prompt_token_ids: Sequence[int],
    outputs: tuple[CompletionGrowth, ...],
    finished: bool,
    metrics: RequestMetrics | None,
    prompt_logprobs: Sequence[TokenLogprobs | None] | None,
    pooled: bytes | None,
) -> Grown:
    """From the fields of a RequestOutput."""
    scored = prompt_logprobs
    return Grown(
        number=number,
        index=index,
        name=request_id,
        pieces=outputs,
        finished=finished,
        metrics=metrics,
        prompt_logprobs=None
        if scored is None
        else tuple([None if row is None else _row(row) for row in scored]),
        pooled=pooled,
    )


def _piece(*, logprobs: Sequence[TokenLogprobs] | None, **fields: Any) -> CompletionGrowth:
    """From the fields of a CompletionOutput."""
    rows = None if logprobs is None else tuple([_row(row) for row in logprobs])
    return CompletionGrowth(logprobs=rows, **fields)


def _output(piece: CompletionGrowth) -> CompletionOutput:
    rows = piece.logprobs
    return CompletionOutput(
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        finish_reason=piece.finish_reason,
        stop_reason=piece.stop_reason,
        logprobs=None if rows is None else tuple([_logprobs(row) for row in rows]),
        error=piece.error,
        is_drafted=piece.is_drafted,
        num_chars_before=piece.num_chars_before,
        num_tokens_before=piece.num_tokens_before,
        trace=piece.trace,
    )


def _row(row: TokenLogprobs) -> _Row:
    return row.token_id, row.chosen, row.top_ids, row.top_values


def _logprobs(row: _Row) -> TokenLogprobs:
    token_id, chosen, top_ids, top_values = row
    return TokenLogprobs(
        token_id=token_id, chosen=chosen, top_ids=top_ids, top_values=top_values, tokenizer=None
    )
