"""Acceptance: how many drafts a model took, of one request or several, and the band for it.

A drafter that was measured brings `acceptance.json` beside its config.json: prompts, and how many
tokens a round then emits on average.  Far fewer mean that something between target and drafter is
wrong, though no text shows it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from paceline.core.errors import ModelError

BAND_FILE = "acceptance.json"


@dataclass(slots=True, kw_only=True)
class Acceptance:
    """Counts over the rounds that verified drafts; all 0 where nobody drafted.

    A draft is accepted when the request took it and the token behind it: a round that emits m
    tokens has accepted m - 1.
    """

    rounds: int = 0
    drafted: int = 0  # drafts verified
    accepted: list[int] = field(default_factory=list)  # [num_steps] rounds that took i + 1 drafts
    forced: int = 0  # of the accepted drafts, those that a grammar left no choice about
    fallbacks: set[str] = field(default_factory=set)  # reason codes: why steps waited for the host

    def note(self, *, drafted: int, emitted: int, num_steps: int, forced: int = 0) -> None:
        """Count one round; one that emitted nothing failed, and verified nothing."""
        if not emitted:
            return
        self._widen(num_steps)
        self.rounds += 1
        self.drafted += drafted
        self.forced += forced
        for depth in range(emitted - 1):
            self.accepted[depth] += 1

    @classmethod
    def total(cls, parts: Iterable["Acceptance"]) -> "Acceptance":
        """The sum of several."""
        found = cls()
        for part in parts:
            found._widen(len(part.accepted))
            found.rounds += part.rounds
            found.drafted += part.drafted
            found.forced += part.forced
            found.fallbacks |= part.fallbacks
            for depth, count in enumerate(part.accepted):
                found.accepted[depth] += count
        return found

    @property
    def mean_tokens_per_round(self) -> float | None:
        """The bonus token of each round included; a request's first token, which prefill emits, is
        in none.
        """
        return (self.rounds + sum(self.accepted)) / self.rounds if self.rounds else None

    @property
    def by_position(self) -> tuple[float, ...]:
        """[num_steps] share of rounds that took i + 1 drafts."""
        return tuple(count / self.rounds for count in self.accepted) if self.rounds else ()

    def __str__(self) -> str:
        if self.mean_tokens_per_round is None:
            return "no rounds"
        shares = " ".join(f"{share:.0%}" for share in self.by_position)
        return (
            f"{self.rounds} rounds, {self.mean_tokens_per_round:.2f} tokens per round, "
            f"accepted by position {shares}"
        )

    def to_json(self) -> dict[str, object]:
        """What documents carry under "acceptance"."""
        return {
            "rounds": self.rounds,
            "drafted_tokens": self.drafted,
            "mean_tokens_per_round": self.mean_tokens_per_round,
            "accepted_by_position": list(self.by_position),
        }

    def _widen(self, num_steps: int) -> None:
        self.accepted += [0] * (num_steps - len(self.accepted))


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptanceBand:
    """What a drafter is known to reach: greedy, on these prompts, drafting a chain."""

    prompts: tuple[str, ...]
    max_tokens: int  # of each answer; end tokens end it earlier
    num_steps: int  # of the chain
    tokens_per_round: float  # measured
    least_tokens_per_round: float  # fewer: something is wrong

    def __post_init__(self) -> None:
        if not self.prompts or not all(self.prompts) or self.max_tokens < 2 or self.num_steps < 1:
            raise ValueError("prompts that are empty, fewer than 2 max_tokens, or no steps")

    def holds_for(self, num_steps: int) -> bool:
        """Whether drafts of this depth must reach it too."""
        return num_steps >= self.num_steps


def read_band(folder: Path) -> AcceptanceBand | None:
    """The band of the drafter in `folder`; None: it brings none.  Raises ModelError."""
    path = folder / BAND_FILE
    if not path.is_file():
        return None
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        prompts = document["prompts"]
        if not isinstance(prompts, list):
            raise TypeError(f"prompts are {type(prompts).__name__}, no list")
        return AcceptanceBand(
            prompts=tuple(str(text) for text in prompts),
            max_tokens=int(document["max_tokens"]),
            num_steps=int(document["num_steps"]),
            tokens_per_round=float(document["tokens_per_round"]),
            least_tokens_per_round=float(document["least_tokens_per_round"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError.about(
            f"acceptance band of the drafter in {str(folder)!r}",
            expected="prompts, max_tokens, num_steps, tokens_per_round and "
            "least_tokens_per_round as JSON",
            got=f"{type(error).__name__}: {error}",
            remedy=f"correct {BAND_FILE}, or remove it",
        ) from error
