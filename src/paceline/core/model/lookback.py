"""How far back the tokens of a layer see: to all keys, over a sliding window, or within the chunk
of the context that they lie in.  No torch.

Worked example, the first key that a token sees:

    position                 0 1 2 3 4 5 6 7 8
    a window of 4 keys       0 0 0 0 1 2 3 4 5
    chunks of 4 tokens       0 0 0 0 4 4 4 4 8
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Chunk:
    """Chunk-local attention (Llama 4): the context is cut at the multiples of `size`, and a token
    sees the keys of its own piece."""

    size: int  # tokens

    def __str__(self) -> str:
        return f"chunks of {self.size}"


Lookback = int | Chunk  # a number is a sliding window's: keys visible, the token's own included


def first_visible(lookback: Lookback | None, position: int) -> int:
    """The first key that a token at `position` sees; no later token sees one before it."""
    match lookback:
        case None:
            return 0
        case Chunk(size):
            return position // size * size
        case window:
            return max(0, position - window + 1)


def most_visible(lookback: Lookback | None) -> int | None:
    """Keys that a token sees at most, its own included; None: all."""
    return lookback.size if isinstance(lookback, Chunk) else lookback


def in_order(lookback: Lookback | None) -> tuple[int, int]:
    """What groups of layers are sorted by: those that see all come first, then windows."""
    kind = 0 if lookback is None else 2 if isinstance(lookback, Chunk) else 1
    return kind, most_visible(lookback) or 0
