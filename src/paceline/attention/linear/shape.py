"""The shape of a layer of linear attention, and what it keeps of a request.  No torch."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.model.config import RowPart

GDN, MAMBA2 = "gdn", "mamba2"  # kinds of mixer
CONV, STATE = "conv", "state"  # parts of what is kept


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearShape:
    """Heads, and the convolution in front of them.

    Value head h has the query and the key of key head h // per_key.
    """

    key_heads: int  # Mamba's groups
    value_heads: int
    key_dim: int  # Mamba's state size
    value_dim: int
    conv_width: int  # taps, that of the token itself included

    @property
    def per_key(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def key_size(self) -> int:
        """Numbers of a token's keys, and of its queries."""
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values, which are convolved each for itself."""
        return 2 * self.key_size + self.value_size

    @property
    def parts(self) -> tuple[RowPart, ...]:
        """The window, raw inputs of the last tokens, oldest first, in the activations' format; and
        the state."""
        state = (self.value_heads, self.key_dim, self.value_dim)
        return (
            RowPart(CONV, (self.channels, self.conv_width - 1)),
            RowPart(STATE, state, dtype="float32"),
        )

    @staticmethod
    def of(parts: Mapping[str, tuple[int, ...]]) -> "LinearShape":
        """Of what a layer, or a rank's part of it, keeps; by the names of parts."""
        (channels, window), (value_heads, key_dim, value_dim) = parts[CONV], parts[STATE]
        key_heads = (channels - value_heads * value_dim) // (2 * key_dim)
        return LinearShape(
            key_heads=key_heads,
            value_heads=value_heads,
            key_dim=key_dim,
            value_dim=value_dim,
            conv_width=window + 1,
        )
