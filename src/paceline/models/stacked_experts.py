"""Checkpoints of per-expert models that were saved with all experts of a projection in one tensor.

transformers holds qwen3_moe's experts as `experts.gate_up_proj` [experts, 2 * inter, hidden], gate
rows before up rows, and `experts.down_proj` [experts, hidden, inter].  It writes each expert's own
tensors, as released files have them, unless told to keep its format.  Granite's files have the same
stacks by other names, and Llama 4's have them as [experts, hidden, 2 * inter] and [experts, inter,
hidden].
"""

from dataclasses import dataclass

from torch import Tensor

from paceline.models.checkpoint import StoredTensors

_BY_INPUTS = ".feed_forward.experts."  # in the name of a stack whose rows are inputs
# How the name of a stack ends -> the projections whose rows it has, one behind the other.
_STACKS = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),
    ".mlp.experts.down_proj": ("down_proj",),
    ".block_sparse_moe.input_linear.weight": ("gate_proj", "up_proj"),
    ".block_sparse_moe.output_linear.weight": ("down_proj",),
    f"{_BY_INPUTS}gate_up_proj": ("gate_proj", "up_proj"),
    f"{_BY_INPUTS}down_proj": ("down_proj",),
}


@dataclass(frozen=True, slots=True)
class _Part:
    """Some outputs of one expert of a stored tensor."""

    stored: str
    expert: int
    begin: int
    end: int

    @property
    def by_inputs(self) -> bool:
        return _BY_INPUTS in self.stored


class UnstackedExperts:
    """A checkpoint in which stacked experts have names of their own; other tensors as they are."""

    def __init__(self, checkpoint: StoredTensors) -> None:
        self._checkpoint = checkpoint
        self._parts: dict[str, _Part | str] = {}
        for name in checkpoint.names:
            shape = checkpoint.shape(name)
            is_stack = name.endswith((*_STACKS,)) and len(shape) == 3
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
                inputs = self._checkpoint.shape(part.stored)[1 if part.by_inputs else 2]
                return (part.end - part.begin, inputs)

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
                expert = self._checkpoint.tensor(part.stored)[part.expert]
                return (expert.mT if part.by_inputs else expert)[part.begin : part.end]


def _parts(name: str, shape: tuple[int, ...]) -> dict[str, _Part | str]:
    """Canonical names of what a stack holds."""
    experts, *sides = shape
    rows = sides[1 if _BY_INPUTS in name else 0]
    [end] = [end for end in _STACKS if name.endswith(end)]
    prefix, projections = f"{name.removesuffix(end)}.mlp.experts", _STACKS[end]
    each = rows // len(projections)
    return {
        f"{prefix}.{expert}.{projection}.weight": _Part(name, expert, at * each, (at + 1) * each)
        for expert in range(experts)
        for at, projection in enumerate(projections)
    }
