"""The forward modes of the field as one table of facts.

Code asks for the fact (`mode.facts.mask`), never for the mode's name.  docs/layouts.md gives the
source of each row.
"""

from dataclasses import dataclass
from enum import Enum


class MaskKind(Enum):
    """Which keys a query row may see, besides every key of its prefix."""

    CAUSAL = "causal"  # itself and earlier rows of the step
    TREE = "tree"  # itself and its ancestors among the rows of the step
    FULL = "full"  # every row of its request in the step
    NONE = "none"  # the step has no rows


class ExtendShape(Enum):
    """How many query rows each request brings."""

    ONE = "one"  # exactly one
    UNIFORM = "uniform"  # the same number for every request, part of the graph key
    RAGGED = "ragged"  # each its own number
    EMPTY = "empty"  # none


class KVWriter(Enum):
    """Who writes the new K and V, and into which cache."""

    TARGET = "target"  # the target model, into the request's own pages
    DRAFT = "draft"  # the draft model, into the draft group
    NOBODY = "nobody"


@dataclass(frozen=True, slots=True)
class ModeFacts:
    """What a step of one mode is; every branch in the engine reads one of these."""

    mask: MaskKind
    extend: ExtendShape
    writer: KVWriter
    emits: bool  # the step samples tokens the user may see
    graphable: bool  # may be captured; ragged steps padded to a number of tokens


class ForwardMode(Enum):
    """The modes; each value is its short name, each `facts` its row of the table."""

    EXTEND = "extend"
    DECODE = "decode"
    MIXED = "mixed"
    IDLE = "idle"
    TARGET_VERIFY = "target_verify"
    DRAFT_DECODE = "draft_decode"
    DRAFT_EXTEND = "draft_extend"
    DRAFT_EXTEND_V2 = "draft_extend_v2"
    SPLIT_PREFILL = "split_prefill"
    DLLM_EXTEND = "dllm_extend"

    @property
    def facts(self) -> ModeFacts:
        return MODE_FACTS[self]


MODE_FACTS: dict[ForwardMode, ModeFacts] = {
    ForwardMode.EXTEND: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.RAGGED, KVWriter.TARGET, emits=True, graphable=True
    ),
    ForwardMode.DECODE: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.ONE, KVWriter.TARGET, emits=True, graphable=True
    ),
    ForwardMode.MIXED: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.RAGGED, KVWriter.TARGET, emits=True, graphable=True
    ),
    ForwardMode.IDLE: ModeFacts(
        MaskKind.NONE, ExtendShape.EMPTY, KVWriter.NOBODY, emits=False, graphable=True
    ),
    ForwardMode.TARGET_VERIFY: ModeFacts(
        MaskKind.TREE, ExtendShape.UNIFORM, KVWriter.TARGET, emits=True, graphable=True
    ),
    ForwardMode.DRAFT_DECODE: ModeFacts(
        MaskKind.TREE, ExtendShape.UNIFORM, KVWriter.DRAFT, emits=False, graphable=True
    ),
    ForwardMode.DRAFT_EXTEND: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.RAGGED, KVWriter.DRAFT, emits=False, graphable=True
    ),
    ForwardMode.DRAFT_EXTEND_V2: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.UNIFORM, KVWriter.DRAFT, emits=False, graphable=True
    ),
    ForwardMode.SPLIT_PREFILL: ModeFacts(
        MaskKind.CAUSAL, ExtendShape.RAGGED, KVWriter.TARGET, emits=True, graphable=False
    ),
    ForwardMode.DLLM_EXTEND: ModeFacts(
        MaskKind.FULL, ExtendShape.UNIFORM, KVWriter.TARGET, emits=False, graphable=True
    ),
}
