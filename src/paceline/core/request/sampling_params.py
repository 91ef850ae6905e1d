"""SamplingParams: what a caller may ask of the sampler, checked at the edge."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from functools import partial
from typing import Any, TypeGuard

from paceline.core.errors import RequestError
from paceline.core.near import did_you_mean
from paceline.core.request.extra_args import ExtraArgs, extra_args
from paceline.core.request.structured import StructuredOutputs, structured_outputs

MAX_COMPLETIONS = 128  # the OpenAI API's limit for n
MAX_LOGPROBS = 20  # the OpenAI API's limit for top_logprobs
PROMPT_BLOCK_ENTRIES = 1 << 24  # logits of prompt tokens held at a time
MAX_STOP_IDS = 32  # width of the request table's stop-id columns, end tokens included
MAX_LOGIT_BIAS = 300  # the OpenAI API's limit for logit_bias entries
MAX_MIN_TOKENS = 2**31 - 1  # beyond every context
MAX_STOP_STRINGS = 32  # each is looked for at every token
MAX_STOP_CHARS = 1024  # of a stop string; its beginnings are looked for too
MAX_TEMPERATURE = 100.0  # beyond it every distribution is flat
SEED_LIMIT = 2**63  # seeds are signed 64-bit integers

_GREEDY = 2.0**-150  # temperatures up to here are 0 as float32, which the sampler has
_MAX_ID_DIGITS = 20
_ALIASES = {"max_new_tokens": "max_tokens"}


class SamplerTier(IntEnum):
    """What program a step's sampler is; part of the graph key.  A wider tier gives the same token
    for a request that needed a narrower one."""

    GREEDY = 0  # argmax of every row
    BY_ROW = 1  # every row by its own parameters: all but plug-ins
    PLUG_INS = 2  # also logits processors that were plugged in


class Asks(IntFlag):
    """What a request asks of the sampler beyond the argmax."""

    NOTHING = 0
    DRAW = 1  # a temperature
    FILTER = 2  # top-k, top-p or min-p, of a row that draws
    BIAS = 4
    PENALISE = 8
    MIN_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """One request's sampling parameters.  Immutable and hashable.

    `stop`, `stop_token_ids`, `logit_bias` and `extra_args` may be given as any sequence or mapping
    and are kept as tuples.  Raises RequestError when a value has the wrong type or range.
    """

    n: int = 1  # completions of the prompt, each with its own seed
    max_tokens: int | None = 16  # tokens to generate; None = the rest of the context
    temperature: float = 1.0  # 0 = greedy
    top_k: int | None = None  # keep the k most likely tokens; None (or 0 or -1) = all
    top_p: float = 1.0  # keep the most likely tokens up to this mass; 1 = all
    min_p: float = 0.0  # keep tokens at least this likely relative to the best; 0 = all
    repetition_penalty: float = 1.0  # over prompt and output; 1 = none
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit), by token id
    min_tokens: int = 0  # no stop before this many generated tokens
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    seed: int | None = None  # None = chosen by the engine
    logprobs: int | None = None  # None = none; k = the chosen token's and the k most likely
    prompt_logprobs: int | None = None  # the same for the prompt's tokens; computes all of it
    extra_args: ExtraArgs = ()  # (name, value) for logits processors, by name
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    speculative: bool = True  # False: take no drafts; the text is the same
    structured_outputs: StructuredOutputs | None = None  # the form of the answer; {kind: text}
    receipt: bool = False  # say with the metrics how it was computed
    trace_tokens: bool = False  # say of tokens where they came from, of rounds what was drafted

    def __post_init__(self) -> None:
        for name, (default, checked) in _CHECKS.items():
            value = getattr(self, name)
            if value is not default:
                object.__setattr__(self, name, checked(name, value))
        if self.top_p == 0.0:
            raise _error("top_p", "more than 0, at most 1", self.top_p, "use top_k=1 for the best")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise _error(
                "min_tokens",
                f"at most max_tokens ({self.max_tokens})",
                self.min_tokens,
                "lower it or raise max_tokens",
            )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SamplingParams":
        """Parameters from JSON-like values; `max_new_tokens` is another name of `max_tokens`, and
        `speculative` may be "on" or "off".

        A field that does not exist is refused, never ignored.
        """
        named: dict[str, Any] = {}
        for key, value in values.items():
            name = _ALIASES.get(key, key)
            if not isinstance(key, str) or name not in _CHECKS:
                raise _unknown_field(key)
            if name in named:
                # Of two names one is the alias, whichever came first.
                other = next(alias for alias, field in _ALIASES.items() if field == name)
                raise _error(name, "given once", f"also as {other}", "keep one of the two")
            named[name] = value
        bias = named.get("logit_bias")
        if isinstance(bias, Mapping) and len(bias) <= MAX_LOGIT_BIAS:  # more are refused below
            named["logit_bias"] = {_token_key(key): value for key, value in bias.items()}
        if "speculative" in named:
            named["speculative"] = _switch("speculative", named["speculative"])
        return cls(**named)

    @property
    def sampler_tier(self) -> SamplerTier:
        """The narrowest sampler that honours these parameters."""
        if self.extra_args:
            return SamplerTier.PLUG_INS
        return SamplerTier.BY_ROW if self.asks else SamplerTier.GREEDY

    @property
    def asks(self) -> Asks:
        """What the sampler must look at; plug-ins apart."""
        asks = Asks.NOTHING
        if self.temperature > _GREEDY:
            asks |= Asks.DRAW
            if self.top_k is not None or self.top_p < 1.0 or self.min_p > 0.0:
                asks |= Asks.FILTER
        if self.logit_bias:
            asks |= Asks.BIAS
        penalties = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        if penalties != (1.0, 0.0, 0.0):
            asks |= Asks.PENALISE
        if self.min_tokens:
            asks |= Asks.MIN_TOKENS
        return asks

    def all_stop_ids(self, eos_token_ids: Iterable[int]) -> tuple[int, ...]:
        """The ids that end this request: stop_token_ids, then end tokens unless ignored.

        Raises RequestError when they do not fit the request table.
        """
        end_ids = () if self.ignore_eos else tuple(eos_token_ids)
        ids = tuple(dict.fromkeys(self.stop_token_ids + end_ids))
        if len(ids) > MAX_STOP_IDS:
            raise _error(
                "stop_token_ids",
                f"at most {MAX_STOP_IDS} ids with the model's {len(end_ids)} end tokens",
                len(ids),
                "give fewer, or use stop strings",
            )
        return ids

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raise RequestError when a stop id or a biased id is not a token of the model, or more
        log-probabilities are wanted than it has tokens."""
        for name in ("logprobs", "prompt_logprobs"):
            if (getattr(self, name) or 0) > vocab_size:
                expected = f"at most {vocab_size}, the vocabulary size"
                raise _error(name, expected, getattr(self, name), "ask for fewer")
        for name, ids in (
            ("stop_token_ids", self.stop_token_ids),
            ("logit_bias", tuple(token for token, _ in self.logit_bias)),
        ):
            outside = [token for token in ids if token >= vocab_size]
            if outside:
                expected = f"token ids below the vocabulary size {vocab_size}"
                raise _error(name, expected, outside, "use ids of this model's tokenizer")


_SWITCH = {"on": True, "off": False}


def _error(name: str, expected: object, got: object, remedy: str) -> RequestError:
    return RequestError.about(name, expected=expected, got=got, remedy=remedy)


def _is_integer(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(
    name: str, value: object, *, low: int, high: int | None = None, optional: bool = False
) -> int | None:
    if optional and value is None:
        return None
    if not _is_integer(value):
        got, remedy = f"{value!r}", "pass a plain int"
    elif low <= value and (high is None or value <= high):
        return value
    else:
        got, remedy = str(value), "choose a value in range"
    wanted = f"an integer of at least {low}" if high is None else f"an integer in {low}..{high}"
    raise _error(name, f"{wanted} or None" if optional else wanted, got, remedy)


def _top_k(name: str, value: object) -> int | None:
    """0 and -1 keep every token too: what other engines write for it."""
    expected = "an integer of at least 1, or None, 0 or -1"
    if value is None:
        return None
    if not _is_integer(value) or value < -1:
        raise _error(name, expected, f"{value!r}", "leave it out (None) to keep every token")
    return value if value > 0 else None


def _number(name: str, value: object, *, low: float, high: float, remedy: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        got = f"{value!r}"
    elif low <= value <= high:  # which NaN is not
        return float(value)
    else:
        got = str(value)
    raise _error(name, f"a finite number in {low:g}..{high:g}", got, remedy)


def _bool(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _error(name, "True or False", f"{value!r}", "pass a bool")
    return value


def _switch(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, str) or value not in _SWITCH:
        raise _error(name, '"on", "off" or a bool', f"{value!r}", "leave it out for on")
    return _SWITCH[value]


def _stop_strings(name: str, value: object) -> tuple[str, ...]:
    strings = (value,) if isinstance(value, str) else value
    if isinstance(strings, Sequence) and len(strings) > MAX_STOP_STRINGS:
        raise _error(name, f"at most {MAX_STOP_STRINGS} strings", len(strings), "give fewer")
    if not isinstance(strings, Sequence) or not all(isinstance(s, str) and s for s in strings):
        raise _error(name, "non-empty strings", f"{value!r}", "leave it out for none")
    longest = max(map(len, strings), default=0)
    if longest > MAX_STOP_CHARS:
        raise _error(name, f"at most {MAX_STOP_CHARS} characters each", longest, "shorten it")
    return tuple(dict.fromkeys(strings))


def _stop_ids(name: str, value: object) -> tuple[int, ...]:
    expected = "a sequence of token ids (integers of at least 0)"
    if not isinstance(value, Sequence) or isinstance(value, str | bytes):
        raise _error(name, expected, f"{value!r}", "pass a list of ints")
    if len(value) > MAX_STOP_IDS:
        remedy = "give fewer, or use stop strings"
        raise _error(name, f"at most {MAX_STOP_IDS} ids", len(value), remedy)
    for token in value:
        if not _is_integer(token) or token < 0:
            raise _error(name, expected, f"{token!r}", "pass a list of ints")
    return tuple(dict.fromkeys(value))


def _bias_pairs(name: str, value: object) -> tuple[tuple[int, float], ...]:
    expected = "a mapping from token ids to numbers in -100..100"
    remedy = "pass {token_id: bias}"
    if isinstance(value, tuple) and all(isinstance(p, tuple) and len(p) == 2 for p in value):
        value = dict(value)
    if not isinstance(value, Mapping):
        raise _error(name, expected, f"{value!r}", remedy)
    if len(value) > MAX_LOGIT_BIAS:
        raise _error(name, f"at most {MAX_LOGIT_BIAS} entries", len(value), "give fewer")
    pairs = []
    for token, bias in value.items():
        if not _is_integer(token) or token < 0:
            raise _error(name, expected, f"the key {token!r}", remedy)
        each = f"{name}[{token}]"
        pairs.append((token, _number(each, bias, low=-100.0, high=100.0, remedy="use 0 for none")))
    return tuple(sorted(pairs))


def _token_key(key: object) -> object:
    """JSON object keys are strings: "42" is token 42.  Anything else is left to be refused, another
    spelling of a number too: two keys must not be one token.
    """
    if not isinstance(key, str) or not key.isascii() or not key.isdigit():
        return key
    is_plain = len(key) < _MAX_ID_DIGITS and (key == "0" or not key.startswith("0"))
    return int(key) if is_plain else key


def _unknown_field(key: object) -> RequestError:
    remedy = did_you_mean(str(key), {*_CHECKS, *_ALIASES}, otherwise="remove it")
    expected = f"one of {', '.join(sorted(_CHECKS))}"
    return _error("sampling field", expected, f"{key!r}", remedy)


_CHECKED: dict[str, Callable[[str, Any], object]] = {
    "n": partial(_integer, low=1, high=MAX_COMPLETIONS),
    "max_tokens": partial(_integer, low=1, optional=True),
    "min_tokens": partial(_integer, low=0, high=MAX_MIN_TOKENS),
    "seed": partial(_integer, low=-SEED_LIMIT, high=SEED_LIMIT - 1, optional=True),
    "logprobs": partial(_integer, low=0, high=MAX_LOGPROBS, optional=True),
    "prompt_logprobs": partial(_integer, low=0, high=MAX_LOGPROBS, optional=True),
    "top_k": _top_k,
    "temperature": partial(_number, low=0.0, high=MAX_TEMPERATURE, remedy="use 0 for greedy"),
    "top_p": partial(_number, low=0.0, high=1.0, remedy="use 1 to keep every token"),
    "min_p": partial(_number, low=0.0, high=1.0, remedy="use 0 to keep every token"),
    "repetition_penalty": partial(_number, low=0.01, high=100.0, remedy="use 1 for none"),
    "presence_penalty": partial(_number, low=-2.0, high=2.0, remedy="use 0 for none"),
    "frequency_penalty": partial(_number, low=-2.0, high=2.0, remedy="use 0 for none"),
    "ignore_eos": _bool,
    "include_stop_str_in_output": _bool,
    "skip_special_tokens": _bool,
    "speculative": _bool,
    "receipt": _bool,
    "trace_tokens": _bool,
    "stop": _stop_strings,
    "stop_token_ids": _stop_ids,
    "logit_bias": _bias_pairs,
    "extra_args": lambda _, value: extra_args(value),
    "structured_outputs": lambda _, value: structured_outputs(value),
}
# Of each field its default, which needs no look, and what checks and keeps another value.
_CHECKS = {field.name: (field.default, _CHECKED[field.name]) for field in fields(SamplingParams)}


def require_possible(num_completions: int, max_open: int) -> None:
    """Raise RequestError for more completions at once than a queue ever has room for."""
    if num_completions > max_open:
        raise RequestError.about(
            "n",
            expected=f"at most {max_open} completions at once, of all prompts",
            got=num_completions,
            remedy="send several requests, or raise max-queued-requests",
        )
