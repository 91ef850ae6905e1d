"""The forward modes of the field as one table of facts: names for the matrix and its cells.

The engine knows a step's shape, its mask and whether it holds drafts; docs/layouts.md gives the
source of each row.
"""

from dataclasses import dataclass
from enum import Enum

from paceline.core.modes import MaskKind


class ExtendShape(Enum):
    """How many query rows each request brings."""

    ONE = "one"  # exactly one
    UNIFORM = "uniform"  # the same number for every request, part of the graph key
    RAGGED = "ragged"  # each its own number


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """What a step of one mode is."""

    mask: MaskKind
    extend: ExtendShape


class ForwardMode(Enum):
    """The modes; each value is its short name, each `facts` its row of the table."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    DLLM_EXTEND = "dllm_extend"

    @property
    def facts(self) -> ModeFacts:
        return MODE_FACTS[self]


MODE_FACTS: dict[ForwardMode, ModeFacts] = {
    ForwardMode.EXTEND: ModeFacts(MaskKind.CAUSAL, ExtendShape.RAGGED),
    ForwardMode.DECODE: ModeFacts(MaskKind.CAUSAL, ExtendShape.ONE),
    ForwardMode.MIXED: ModeFacts(MaskKind.CAUSAL, ExtendShape.RAGGED),
    ForwardMode.TARGET_VERIFY: ModeFacts(MaskKind.TREE, ExtendShape.UNIFORM),
    ForwardMode.DRAFT_DECODE: ModeFacts(MaskKind.TREE, ExtendShape.UNIFORM),
    ForwardMode.DRAFT_EXTEND: ModeFacts(MaskKind.CAUSAL, ExtendShape.RAGGED),
    ForwardMode.DRAFT_EXTEND_V2: ModeFacts(MaskKind.CAUSAL, ExtendShape.UNIFORM),
    ForwardMode.DLLM_EXTEND: ModeFacts(MaskKind.FULL, ExtendShape.UNIFORM),
}
