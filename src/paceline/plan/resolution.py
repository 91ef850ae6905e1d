"""Resolution: what was asked and what was chosen, each value with its origin."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from paceline.attention.ragged.own import OWN
from paceline.core.options.engine_options import OFF, EngineOptions
from paceline.core.options.spec import spec_of

_FLAG_WIDTH = 23  # characters, unless a longer one is shown


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Options with the origin of each: "asked", "default" or "chosen: <why>"."""

    options: EngineOptions
    origins: Mapping[str, str]

    def choose(self, name: str, value: object, why: str) -> "Resolution":
        """A new Resolution in which a value that was left open is decided; others are kept."""
        return self if getattr(self.options, name) is not None else self.instead(name, value, why)

    def instead(self, name: str, value: object, why: str) -> "Resolution":
        """As `choose`, where the default of a value that nobody asked for means nothing."""
        changed: dict[str, Any] = {name: value}
        return Resolution(
            options=replace(self.options, **changed),
            origins={**self.origins, name: f"chosen: {why}"},
        )

    def line(self) -> str:
        """What most people ask for, in one line."""
        options = self.options
        drafts, least = options.speculative_algorithm, options.latent_expand_from
        attention = f"attention {options.attention_backend}"
        if least:
            whose = options.latent_expand_backend
            by = "our own kernel" if whose == OWN.name else whose
            attention += f" (prompts from {least} tokens on: expanded, by {by})"
        return (
            f"{options.model} on {options.device} in {options.dtype}, {attention}, "
            f"{'no drafts' if drafts == OFF else f'drafts {drafts}'}, "
            f"{options.max_num_seqs} requests of up to {options.max_model_len} tokens"
        )

    def table(self) -> str:
        """One line per value that was asked or chosen, and one for all that kept their default."""
        rows: list[tuple[str, object, str]] = []
        kept = []
        for option in fields(EngineOptions):
            flag = spec_of(option).flags[0].removeprefix("--")
            value, origin = getattr(self.options, option.name), self.origins[option.name]
            if origin == "default":
                kept.append(f"{flag}={_shown(value)}")
            else:
                rows.append((flag, _shown(value), origin))
        width = 1 + max([_FLAG_WIDTH, *(len(flag) for flag, _, _ in rows)])
        lines = [f"  {flag:<{width}}{value!s:<15} ({origin})" for flag, value, origin in rows]
        return "\n".join(["configuration", *lines, "  default: " + ", ".join(kept)])

    def to_json(self) -> dict[str, dict[str, object]]:
        """{option: {value, origin}}."""
        names = [option.name for option in fields(EngineOptions)]
        return {
            name: {"value": getattr(self.options, name), "origin": self.origins[name]}
            for name in names
        }


def _shown(value: object) -> object:
    if isinstance(value, tuple):
        return " ".join(value) or "-"
    return "-" if value is None else value
