"""Which keys a query sees, and what a request is for."""

from enum import Enum, StrEnum


class MaskKind(Enum):
    """Which keys a query row may see, besides every key of its prefix."""

    CAUSAL = "causal"  # itself and earlier rows of the step
    TREE = "tree"  # itself and its ancestors among the rows of the step
    FULL = "full"  # every row of its request in the step
    BLOCK = "block"  # itself, earlier rows, and later ones up to its block's end


class End(StrEnum):
    """What comes of a request's hidden states."""

    GENERATE = "generate"  # a token behind the last one, again and again
    SCORE = "score"  # log-probabilities of its own tokens
    POOL = "pool"  # one vector


GENERATES = frozenset({End.GENERATE})
POOLS = frozenset({End.POOL})


class Pooling(StrEnum):
    """Which hidden states the vector of a text is made of."""

    LAST = "last"  # that of the last token
    CLS = "cls"  # that of the first
    MEAN = "mean"  # all of them

    @property
    def needs_all(self) -> bool:
        """Whether tokens that a prefix hit leaves out would be missing."""
        return self is not Pooling.LAST
