"""What a load asks: texts of about so many tokens, and the bodies that hold them.

No tokenizer is needed: the server itself says how many tokens two texts have, and a text's length
in characters follows.  What prompts had in the end is told from the server's own counts.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from paceline.bench.serve.client import AnswerError, Client, Document
from paceline.bench.serve.shape import LoadShape
from paceline.bench.traffic.shape import read_turns, refused
from paceline.core.errors import ConfigError

_WORDS = re.findall(
    r"\w+",
    "river stone window garden market letter engine paper winter summer bridge forest mountain "
    "island harbour kitchen village station music colour silver copper yellow orange purple "
    "morning evening number circle square machine history science teacher student doctor sailor "
    "farmer painter writer walks reads writes carries finds loses opens closes turns follows "
    "under over behind before after between through against along around slowly quickly often "
    "never always perhaps almost together because although while until where",
)
_PROBES = (64, 512)  # characters of the texts whose tokens the server counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """A server, as far as it tells."""

    base_url: str
    model: str  # by which requests name it
    context_len: int | None  # None: it does not say
    is_ours: bool  # it knows what the OpenAI API does not


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """How many tokens the server makes of texts."""

    fixed: float  # of a prompt without text: of a template, say
    per_char: float

    def chars(self, tokens: int) -> int:
        """Characters of a prompt of about so many tokens; at least one."""
        return max(1, round((tokens - self.fixed) / self.per_char))

    def tokens(self, text: str) -> float:
        """Of a prompt with this text, about."""
        return self.fixed + self.per_char * len(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request."""

    due_s: float | None  # behind the begin of the load; None: when another ends
    text: str
    output_len: int  # tokens, unless the answer may end by itself


@dataclass(frozen=True, slots=True, kw_only=True)
class Bodies:
    """How requests are written for one server."""

    target: ServedModel
    shape: LoadShape

    @property
    def path(self) -> str:
        return "/chat/completions" if self.shape.endpoint == "chat" else "/completions"

    def of(
        self, text: str, output_len: int, *, is_greedy: bool = False, number: int = 0
    ) -> Document:
        """A body.  number: of the request, for its seed."""
        shape, traffic = self.shape, self.shape.traffic
        said: Document = {"prompt": text}
        if shape.endpoint == "chat":
            said = {"messages": [{"role": "user", "content": text}]}
        body = {"model": self.target.model, **said, "max_tokens": output_len, "temperature": 0}
        if traffic.temperature and not is_greedy:
            drawn = {"temperature": traffic.temperature, "top_p": traffic.top_p}
            body |= {**drawn, "seed": shape.seed + number}
        return body if shape.natural_end else body | {"ignore_eos": True}

    def streamed(self, ask: Ask, number: int) -> Document:
        """That of a request of the load."""
        body = self.of(ask.text, ask.output_len, number=number)
        own = {"receipt": True} if self.target.is_ours else {}  # which tells the time in the queue
        return body | {"stream": True, "stream_options": {"include_usage": True}} | own


async def find_served_model(client: Client, base_url: str, model: str | None) -> ServedModel:
    """Ask a server what it serves.  Raises ConfigError."""
    try:
        listed = (await client.get("/models")).get("data")
    except AnswerError as error:
        raise _no_server(base_url, f"{error.kind}: {error}") from error
    rows = {row["id"]: row for row in listed or () if isinstance(row, dict) and "id" in row}
    if model is None and not rows:
        raise _no_server(base_url, "no model at /models")
    name = next(iter(rows)) if model is None else model
    row: dict[str, Any] = rows.get(name, {})
    return ServedModel(
        base_url=base_url,
        model=name,
        context_len=row.get("max_model_len"),
        is_ours=row.get("owned_by") == "paceline",
    )


def _no_server(url: str, got: str) -> ConfigError:
    remedy = "start one, correct --base-url, or leave it out to have one started here"
    return ConfigError.about(
        f"server at {url}", expected="one that answers", got=got, remedy=remedy
    )


async def measure(client: Client, bodies: Bodies, text: str) -> Scale:
    """Have the server count two beginnings of a text.  Raises ConfigError, AnswerError."""
    counts: list[int] = []
    for length in _PROBES:
        answer = await client.post(bodies.path, bodies.of(text[:length], 1, is_greedy=True))
        counts.append(token_usage(answer.get("usage")).prompt)
    few, many = (min(length, len(text)) for length in _PROBES)
    if counts[1] <= counts[0]:
        remedy = "give --dataset texts that differ in length"
        raise refused("tokens of a longer text", f"more than {counts[0]}", counts[1], remedy)
    per_char = (counts[1] - counts[0]) / (many - few)
    return Scale(fixed=max(0.0, counts[0] - per_char * few), per_char=per_char)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenUsage:
    """Tokens of one request, as the server counted."""

    prompt: int
    output: int
    cached: int  # of the prompt; 0 also where the server does not say


NO_USAGE = TokenUsage(prompt=0, output=0, cached=0)


def token_usage(usage: object) -> TokenUsage:
    """From the `usage` of an answer, or of the last event of a stream.  Raises ConfigError where it
    does not count."""
    if isinstance(usage, dict) and {"prompt_tokens", "completion_tokens"} <= usage.keys():
        details = usage.get("prompt_tokens_details") or {}
        return TokenUsage(
            prompt=usage["prompt_tokens"],
            output=usage["completion_tokens"],
            cached=details.get("cached_tokens") or 0,
        )
    raise ConfigError.about(
        "usage of an answer",
        expected="prompt_tokens and completion_tokens",
        got=repr(usage),
        remedy="bench a server that counts; in a stream it must honour stream_options",
    )


def words(length: int, source: random.Random) -> str:
    """So many characters."""
    drawn: list[str] = []
    size = 0
    while size <= length:
        drawn.append(source.choice(_WORDS))
        size += len(drawn[-1]) + 1
    return " ".join(drawn)[:length]


def sample(shape: LoadShape) -> str:
    """Of the texts of a load, long enough to be counted.  Raises ConfigError."""
    if shape.traffic.dataset is None:
        return words(max(_PROBES), random.Random(f"{shape.seed} sample"))
    turns = read_turns(shape.traffic.dataset)
    random.Random(f"{shape.seed} sample").shuffle(turns)
    text = "\n".join(text for turn in turns for text in turn)
    if len(text) <= min(_PROBES):
        name = f"texts in {str(shape.traffic.dataset)!r}"
        wanted = f"more than {min(_PROBES)} characters"
        raise refused(name, wanted, len(text), "give a larger file")
    return text


def plan_asks(shape: LoadShape, target: ServedModel, scale: Scale) -> tuple[list[Ask], list[Ask]]:
    """(those before the load, those of the load).  Raises ConfigError for what does not fit."""
    traffic = shape.traffic
    source = random.Random(f"{shape.seed} asks")
    count = shape.warmups + traffic.num_requests
    texts = _talks if traffic.dataset is not None else _drawn
    pairs = texts(shape, target, scale, count, source)
    rate = traffic.request_rate
    waits = [0.0 if rate is None else source.expovariate(rate) for _ in range(count)]
    due_s = list(accumulate(waits[shape.warmups :]))
    asks = [Ask(due_s=None, text=text, output_len=length) for text, length in pairs]
    load = asks[shape.warmups :]
    if rate is not None:
        load = [
            Ask(due_s=due, text=ask.text, output_len=ask.output_len)
            for due, ask in zip(due_s, load, strict=True)
        ]
    return asks[: shape.warmups], load


def _drawn(
    shape: LoadShape, target: ServedModel, scale: Scale, count: int, source: random.Random
) -> list[tuple[str, int]]:
    traffic = shape.traffic
    inputs, outputs, _ = traffic.lengths(target.context_len or 1 << 30)
    prefix = words(scale.chars(traffic.shared_prefix_len), source)
    prefix = f"{prefix} " if traffic.shared_prefix_len else ""
    own = [words(scale.chars(length), source) for length in inputs.draw(count, source)]
    return [
        (prefix + text, length)
        for text, length in zip(own, outputs.draw(count, source), strict=True)
    ]


def _talks(
    shape: LoadShape, target: ServedModel, scale: Scale, count: int, source: random.Random
) -> list[tuple[str, int]]:
    """First turns of a file that fit the context, and about how long their answers are."""
    assert shape.traffic.dataset is not None, "there is a file"
    turns = read_turns(shape.traffic.dataset)
    source.shuffle(turns)
    context = target.context_len or 1 << 30
    fitting: Sequence[tuple[str, int]] = [
        (question, max(1, round(scale.per_char * len(answer))))
        for question, answer in turns
        if question and answer
    ]
    fitting = [pair for pair in fitting if 1.2 * scale.tokens(pair[0]) + pair[1] < context]
    if len(fitting) < count:
        raise refused(
            f"conversations in {str(shape.traffic.dataset)!r} that fit the context",
            f"at least {count}, those before the load included",
            len(fitting),
            "lower --num-requests or --warmups",
        )
    return list(fitting[:count])
