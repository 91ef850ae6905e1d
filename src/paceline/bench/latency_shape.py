"""The shapes `paceline bench latency` times, and its flags.  No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options.spec import Flag

FLAGS = (
    Flag(
        name="batch_size",
        default="1,8,64",
        help="Requests that run together; several numbers separated by commas.",
    ),
    Flag(name="input_len", kind=int, default=1024, help="Prompt length.  [tokens]"),
    Flag(name="output_len", kind=int, default=257, help="Output length.  [tokens]"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyShape:
    """What is timed.  Raises ConfigError for counts below their least."""

    batch_sizes: tuple[int, ...]
    input_len: int  # tokens
    output_len: int  # tokens
    prompt_seed: int = 0

    def __post_init__(self) -> None:
        for name, value, least in (
            ("batch_size", min(self.batch_sizes, default=0), 1),
            ("input_len", self.input_len, 1),
            ("output_len", self.output_len, 2),
        ):
            if value < least:
                remedy = "give a larger number"
                raise ConfigError.about(
                    name, expected=f"at least {least}", got=value, remedy=remedy
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "LatencyShape":
        """From the values of FLAGS.  Raises ConfigError."""
        return cls(
            batch_sizes=_batch_sizes(values["batch_size"]),
            input_len=values["input_len"],
            output_len=values["output_len"],
        )


def _batch_sizes(text: str) -> tuple[int, ...]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise ConfigError.about(
            "batch_size",
            expected="numbers separated by commas",
            got=repr(text),
            remedy="write for example --batch-size 1,8,64",
        )
    return tuple(int(part) for part in parts)
