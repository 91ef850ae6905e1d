"""Checkpoints of per-expert models that were saved with all experts of a projection in one tensor.

transformers holds qwen3_moe's experts as `experts.gate_up_proj` [experts, 2 * inter, hidden], gate
rows before up rows, and `experts.down_proj` [experts, hidden, inter].  It writes each expert's own
tensors, as released files have them, unless told to keep its format.
"""

from dataclasses import dataclass

from torch import Tensor

from paceline.models.checkpoint import StoredTensors

_GATE_UP, _DOWN = ".mlp.experts.gate_up_proj", ".mlp.experts.down_proj"


@dataclass(frozen=True, slots=True)
class _Part:
    """Some rows of one expert of a stored tensor."""

    stored: str
    expert: int
    begin: int
    end: int


class UnstackedExperts:
    """A checkpoint in which stacked experts have names of their own; other tensors as they are."""

    def __init__(self, checkpoint: StoredTensors) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, _Part | str] = {}
        for name in checkpoint.names:
            shape = checkpoint.shape(name)
            is_stack = name.endswith((_GATE_UP, _DOWN)) and len(shape) == 3
            self._parts |= _parts(name, shape) if is_stack else {name: name}

    @property
    def names(self) -> list[str]:
        """Every tensor's name, shard by shard."""
        return list(self._parts)

    def shape(self, name: str) -> tuple[int, ...]:
        """From the header; reads no data."""
        match self._parts[name]:
            case str(stored):
                return self._checkpoint.shape(stored)
            case part:
                return (part.end - part.begin, self._checkpoint.shape(part.stored)[2])

    def dtype(self, name: str) -> str:
        """As the file spells it: "BF16", "F32", ..."""
        part = self._parts[name]
        return self._checkpoint.dtype(part if isinstance(part, str) else part.stored)

    def tensor(self, name: str) -> Tensor:
        """On the CPU, pages of the file until it is copied."""
        match self._parts[name]:
            case str(stored):
                return self._checkpoint.tensor(stored)
            case part:
                return self._checkpoint.tensor(part.stored)[part.expert, part.begin : part.end]


def _parts(name: str, shape: tuple[int, ...]) -> dict[str, _Part | str]:
    """Canonical names of what a stack holds."""
    experts, rows, _ = shape
    if name.endswith(_DOWN):
        prefix, cuts = name.removesuffix(".down_proj"), {"down_proj": (0, rows)}
    else:
        prefix, half = name.removesuffix(".gate_up_proj"), rows // 2
        cuts = {"gate_proj": (0, half), "up_proj": (half, rows)}
    return {
        f"{prefix}.{expert}.{projection}.weight": _Part(name, expert, begin, end)
        for expert in range(experts)
        for projection, (begin, end) in cuts.items()
    }
