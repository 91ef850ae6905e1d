"""RoundCounts: what speculation did for one request."""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass(slots=True)
class RoundCounts:
    """Counts over the rounds that verified drafts of a request; all 0 where nobody drafted.

    A draft is accepted when the request took it and the token behind it: a round that emits m
    tokens has accepted m - 1.
    """

    rounds: int = 0
    drafted: int = 0  # drafts verified
    emitted: int = 0  # tokens of these rounds, the bonus token of each included
    accepted: list[int] = field(default_factory=list)  # [num_steps] rounds that went this deep
    fallbacks: set[str] = field(default_factory=set)  # reason codes: rounds that could not overlap

    def note(self, *, drafted: int, emitted: int, num_steps: int) -> None:
        """Count one round."""
        self._widen(num_steps)
        self.rounds += 1
        self.drafted += drafted
        self.emitted += emitted
        for depth in range(emitted - 1):
            self.accepted[depth] += 1

    @classmethod
    def total(cls, parts: Iterable["RoundCounts"]) -> "RoundCounts":
        """The sum of several."""
        found = cls()
        for part in parts:
            found._widen(len(part.accepted))
            found.rounds += part.rounds
            found.drafted += part.drafted
            found.emitted += part.emitted
            found.fallbacks |= part.fallbacks
            for depth, count in enumerate(part.accepted):
                found.accepted[depth] += count
        return found

    @property
    def tokens_per_round(self) -> float | None:
        """Mean of the tokens a round emitted; the first token, which prefill emits, is none."""
        return self.emitted / self.rounds if self.rounds else None

    def _widen(self, num_steps: int) -> None:
        self.accepted += [0] * (num_steps - len(self.accepted))
