"""Trace: where a completion's tokens came from, where it asked; plain data, made by the engine."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from paceline.core.step import RowDrafts


class Round(NamedTuple):
    """A round of speculation that emitted tokens of a completion."""

    at: int  # generated tokens before it
    emitted: int  # tokens: one for each draft that was taken, and the bonus token
    token_ids: tuple[int, ...]  # [num_drafts] what was drafted
    parents: tuple[int, ...]  # [num_drafts] the draft each hangs on, an earlier one; -1: the root
    taken: tuple[int, ...]  # [emitted - 1] the drafts that were taken, from the root down

    @classmethod
    def of(cls, drafts: RowDrafts, emitted: tuple[int, ...], *, at: int) -> "Round":
        return cls(at, len(emitted), drafts.token_ids, drafts.parents, drafts.taken(emitted))


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Beside a completion's tokens; in a growth, what came since the growth before."""

    cached_tokens: int  # of the prompt, whose KV a prefix hit supplied
    rounds: tuple[Round, ...] = ()  # a stop string may have cut what the last one emitted

    def then(self, later: "Trace | None") -> "Trace":
        """This one and that of the growth that followed."""
        return self if later is None else replace(later, rounds=self.rounds + later.rounds)

    def as_document(self) -> dict[str, object]:
        """The JSON object {cached_tokens, rounds}."""
        rounds = [
            {name: _plain(value) for name, value in each._asdict().items()} for each in self.rounds
        ]
        return {"cached_tokens": self.cached_tokens, "rounds": rounds}


def _plain(value: int | tuple[int, ...]) -> int | list[int]:
    return list(value) if isinstance(value, tuple) else value
