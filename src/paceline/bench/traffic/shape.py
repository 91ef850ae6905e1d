"""Shapes of traffic and their flags; conversations of a file.  No torch."""

import json
import math
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options.spec import Flag
from paceline.core.request.sampling_params import SamplingParams

SIGMA = 1.0  # of the logarithm of a length


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """Of prompts or outputs.  [tokens]  Raises ConfigError unless 1 <= least <= mean <= most."""

    least: int
    mean: float
    most: int

    def __post_init__(self) -> None:
        if not 1 <= self.least <= self.mean <= self.most:
            raise ConfigError.about(
                "lengths",
                expected="1 <= LEAST <= MEAN <= MOST",
                got=f"{self.least}:{self.mean:g}:{self.most}",
                remedy="write for example 16:493:2048, or one number",
            )

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """'1024', or 'LEAST:MEAN:MOST'.  Raises ConfigError."""
        parts = text.split(":")
        if len(parts) not in (1, 3) or not all(part.strip().isdecimal() for part in parts):
            raise ConfigError.about(
                "a length",
                expected="a number, or three as LEAST:MEAN:MOST",
                got=repr(text),
                remedy="write for example 1024, or 16:493:2048",
            )
        numbers = [int(part) for part in parts]
        return cls(least=numbers[0], mean=numbers[len(numbers) // 2], most=numbers[-1])

    def scaled(self, factor: float) -> "Lengths":
        """The same, shorter; at least one token."""
        least = max(1, round(self.least * factor))
        most = max(least, int(self.most * factor))
        return Lengths(least=least, mean=min(max(self.mean * factor, least), most), most=most)

    def draw(self, count: int, source: random.Random) -> list[int]:
        """[count] lengths in random order, one from each equal share of the distribution: their
        mean is `mean`, whatever the seed.
        """
        if self.least == self.most:
            return [self.least] * count
        shares = [(index + source.random()) / count for index in range(count)]
        source.shuffle(shares)
        normal = NormalDist()
        deviations = [normal.inv_cdf(min(max(share, 1e-9), 1 - 1e-9)) for share in shares]
        low, high = math.log(self.least) - 5 * SIGMA, math.log(self.most) + 5 * SIGMA
        for _ in range(60):  # the middle that gives the mean
            middle = (low + high) / 2
            found = [self._clipped(middle + SIGMA * each) for each in deviations]
            low, high = (middle, high) if sum(found) < self.mean * count else (low, middle)
        return found

    def _clipped(self, logarithm: float) -> int:
        return round(min(max(math.exp(logarithm), self.least), self.most))


USUAL_INPUT = Lengths(least=16, mean=493, most=2048)
USUAL_OUTPUT = Lengths(least=16, mean=244, most=1024)
FLAGS = (
    Flag(name="num_requests", kind=int, default=512, help="Requests of a pass."),
    Flag(
        name="input_len",
        kind=str,
        default=None,
        help="Prompt length, N or LEAST:MEAN:MOST, log-normal; without --dataset "
        "16:493:2048, or less where the context is short.  [tokens]",
    ),
    Flag(
        name="output_len",
        kind=str,
        default=None,
        help="Output length, in the same form; without --dataset 16:244:1024.  [tokens]",
    ),
    Flag(
        name="shared_prefix_len",
        kind=int,
        default=0,
        help="Tokens before each prompt that are the same in all.  [tokens]",
    ),
    Flag(
        name="dataset",
        kind=str,
        default=None,
        help="ShareGPT-format JSON file; its first turns are prompts, their answers' lengths the "
        "output lengths.",
    ),
    Flag(
        name="request_rate",
        kind=float,
        default=None,
        help="Requests per second, at Poisson times.  [default: all at once]",
    ),
    Flag(name="temperature", kind=float, default=0.0, help="0 is greedy."),
    Flag(name="top_p", kind=float, default=1.0, help="Share of probability kept."),
    Flag(name="repeats", kind=int, default=3, help="Timed passes behind the first."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficShape:
    """What is asked for.  Raises ConfigError for counts below their least, and for two sources of
    lengths.
    """

    num_requests: int = 512
    input_len: Lengths | None = None  # None: the usual, as far as the context allows
    output_len: Lengths | None = None
    shared_prefix_len: int = 0  # tokens
    dataset: Path | None = None
    request_rate: float | None = None  # per second; None: all at once
    temperature: float = 0.0
    top_p: float = 1.0
    repeats: int = 3  # timed passes behind the first

    def __post_init__(self) -> None:
        for name, least in (("num_requests", 1), ("shared_prefix_len", 0), ("repeats", 0)):
            if getattr(self, name) < least:
                raise refused(name, f"at least {least}", getattr(self, name), "raise it")
        if self.request_rate is not None and not 0 < self.request_rate < math.inf:
            remedy = "leave --request-rate out for all at once"
            raise refused("request_rate", "a finite number above 0", self.request_rate, remedy)
        if self.dataset is not None and (
            self.input_len or self.output_len or self.shared_prefix_len
        ):
            got = "one of input_len, output_len and shared_prefix_len too"
            raise refused("dataset", "the only source of lengths", got, "keep one of the two")
        _ = self.params(1, seed=0)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "TrafficShape":
        """From the values of FLAGS."""
        chosen = {name: values[name] for name in cls.__dataclass_fields__}
        for name in ("input_len", "output_len"):
            chosen[name] = None if chosen[name] is None else Lengths.parse(chosen[name])
        chosen["dataset"] = None if chosen["dataset"] is None else Path(chosen["dataset"])
        return cls(**chosen)

    def params(self, output_len: int, *, seed: int) -> SamplingParams:
        """Of one request: exactly so many tokens.  Raises RequestError for wrong ones."""
        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=output_len,
            ignore_eos=True,
            seed=seed,
        )

    def lengths(self, context_len: int) -> tuple[Lengths, Lengths, float | None]:
        """(inputs, outputs, by what those nobody asked for were scaled to fit the context).

        Raises ConfigError for asked ones that do not fit.
        """
        inputs, outputs = self.input_len or USUAL_INPUT, self.output_len or USUAL_OUTPUT
        needed = self.shared_prefix_len + inputs.most + outputs.most
        if needed <= context_len:
            return inputs, outputs, None
        usual = [each for each in (inputs, outputs) if each in (USUAL_INPUT, USUAL_OUTPUT)]
        ours = sum(each.most for each in usual)
        factor = (context_len - (needed - ours)) / ours if ours else 0.0
        if factor * min((each.most for each in usual), default=0) < 1:
            raise refused(
                "input_len, output_len and shared_prefix_len",
                f"at most {context_len} tokens together, the context",
                needed,
                "lower one, or raise --max-model-len if the model allows it",
            )
        if self.input_len is None:
            inputs = inputs.scaled(factor)
        if self.output_len is None:
            outputs = outputs.scaled(factor)
        return inputs, outputs, factor


def read_turns(path: Path) -> list[tuple[str, str]]:
    """[conversations of two turns or more] (first, second).  Raises ConfigError."""
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        talks = [row["conversations"] for row in rows if len(row["conversations"]) >= 2]
        turns = [(talk[0]["value"], talk[1]["value"]) for talk in talks]
        if all(isinstance(text, str) for turn in turns for text in turn):
            return turns
        got = "turns whose value is no string"
    except (OSError, ValueError) as error:  # no such file; no UTF-8, no JSON
        got = f"none ({error})"
    except (KeyError, TypeError) as error:
        got = f"another form ({type(error).__name__}: {error})"
    expected = 'a JSON list of {"conversations": [{"value": text}, {"value": text}, ...]}'
    raise refused(f"dataset {str(path)!r}", expected, got, "convert it, or leave --dataset out")


def refused(name: str, expected: str, got: object, remedy: str) -> ConfigError:
    """The error of a value that cannot be had."""
    return ConfigError.about(name, expected=expected, got=got, remedy=remedy)
