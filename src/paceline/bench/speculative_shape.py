"""The prompts `paceline bench speculative` times, and its flags.  No torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.options.spec import Flag
from paceline.proof.lossless.prompt_set import PROMPTS, NamedPrompt, read_prompts

FLAGS = (
    PROMPTS,
    Flag(name="output_len", kind=int, default=64, help="Output length.  [tokens]"),
    Flag(name="repeats", kind=int, default=3, help="Timed runs of each prompt."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeShape:
    """What is timed.  Raises ConfigError for counts below their least."""

    prompts: tuple[NamedPrompt, ...]
    output_len: int  # tokens
    repeats: int  # of each prompt, timed

    def __post_init__(self) -> None:
        for name, value, least in (
            ("output_len", self.output_len, 2),
            ("repeats", self.repeats, 1),
            ("prompts", len(self.prompts), 2),
        ):
            if value < least:
                remedy = "an interval needs two prompts" if name == "prompts" else "raise it"
                raise ConfigError.about(
                    name, expected=f"at least {least}", got=value, remedy=remedy
                )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "SpeculativeShape":
        """From the values of FLAGS.  Raises ConfigError, also for what is no file of prompts."""
        return cls(
            prompts=read_prompts(values["prompts"]),
            output_len=values["output_len"],
            repeats=values["repeats"],
        )
