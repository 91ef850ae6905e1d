"""DraftShape: how deep and how wide a request's drafts are, in every round of an engine."""

from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind

# A kernel holds all rows of a request's tree at once, and each row's path.
MOST_STEPS = 64
MOST_BRANCHES = 16
MOST_DRAFT_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftShape:
    """A tree of drafts; a chain is the tree of one branch.  Raises ConfigError when it is none.

    A root alone, NO_DRAFTS, is what a step without drafts brings of each request.
    """

    num_steps: int  # depth: drafts on the longest path
    topk: int  # children of a node that was expanded
    num_draft_tokens: int  # rows verified per request, the root included

    def __post_init__(self) -> None:
        if self.is_chain and self.num_draft_tokens != self.num_steps + 1:
            raise ConfigError.about(
                "speculative_num_draft_tokens",
                expected=f"{self.num_steps + 1} (a chain of {self.num_steps} and its root)",
                got=self.num_draft_tokens,
                remedy="leave --speculative-num-draft-tokens out, or raise "
                "--speculative-eagle-topk",
            )
        if self.num_draft_tokens - 1 > self.num_candidates:
            raise ConfigError.about(
                "speculative_num_draft_tokens",
                expected=f"at most {self.num_candidates + 1}: a tree of {self.num_steps} steps "
                f"with topk {self.topk} has {self.num_candidates} candidates, and a root",
                got=self.num_draft_tokens,
                remedy="lower --speculative-num-draft-tokens, or raise "
                "--speculative-num-steps or --speculative-eagle-topk",
            )

    @property
    def has_drafts(self) -> bool:
        return self.num_steps > 0

    @property
    def is_chain(self) -> bool:
        return self.topk == 1

    @property
    def mask(self) -> MaskKind:
        """Of verification."""
        return MaskKind.CAUSAL if self.is_chain else MaskKind.TREE

    @property
    def num_candidates(self) -> int:
        """Drafts a proposer scores, of which it keeps num_draft_tokens - 1."""
        return self.topk + (self.num_steps - 1) * self.topk**2

    @property
    def max_path(self) -> int:
        """Tokens a round emits at most: every draft of a path, and the bonus token."""
        return min(self.num_steps + 1, self.num_draft_tokens)

    @property
    def reach(self) -> int:
        """Slots behind the committed length that a round may write, in any cache group.

        Verification writes num_draft_tokens, a draft pass as many as it has rows.
        """
        if not self.has_drafts:
            return 0  # nobody has rounds
        return max(self.num_draft_tokens, *self.pass_rows(from_root=True))

    def pass_rows(self, *, from_root: bool) -> tuple[int, ...]:
        """[num_passes] rows per request of each pass of a drafter's layers in a round.

        from_root: the first pass reads the root; otherwise what the drafter kept of it gives the
        first drafts.  Of a tree a pass holds the rows of the one before and the newest nodes.
        """
        first = 0 if from_root else 1
        nodes = [self.topk * depth for depth in range(first, self.num_steps)]
        return tuple([1 if self.is_chain else from_root + num for num in nodes])


NO_DRAFTS = DraftShape(num_steps=0, topk=1, num_draft_tokens=1)
