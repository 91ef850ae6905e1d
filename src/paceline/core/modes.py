"""Which keys a query sees."""

from enum import Enum


class MaskKind(Enum):
    """Which keys a query row may see, besides every key of its prefix."""

    CAUSAL = "causal"  # itself and earlier rows of the step
    TREE = "tree"  # itself and its ancestors among the rows of the step
    FULL = "full"  # every row of its request in the step
    BLOCK = "block"  # itself, earlier rows, and later ones up to its block's end
