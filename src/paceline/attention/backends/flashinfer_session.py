"""WrapperSession: the library's wrappers of one engine, by the shapes of its steps.

It is the one part of the backend that changes: a host plan makes wrappers for a new shape, and
those that no graph may hold make room for others.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_tree import TreeRows
from paceline.attention.backends.flashinfer_wrappers import (
    HostLens,
    KeyLists,
    StepShape,
    WrapperRing,
    distinct_constants,
    window_left,
)
from paceline.attention.contract import AttentionSpec, Limits
from paceline.core.modes import MaskKind
from paceline.kernels.stand_in import device_type

KEPT_SHAPES = 64  # that no graph holds; more than steps in flight
RECORDED_SHAPES = 128  # allowance of the memory budget: that graphs hold


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Wrappers:
    """What a shape runs."""

    rings: dict[AttentionSpec, WrapperRing]  # by the layer's constants
    tree: TreeRows | None  # with the prefix of a tree: the step's own rows


class WrapperSession:
    """Makes, plans and keeps wrappers; all of them share the workspace."""

    def __init__(self, library: Any, limits: Limits, *, workspace: Tensor) -> None:
        """workspace: [workspace_bytes] uint8."""
        self._library = library
        self._limits = limits
        self._workspace = workspace
        self._made: dict[StepShape, Wrappers] = {}  # the longest unplanned first
        self._recorded: set[StepShape] = set()  # whose wrappers a graph may hold

    def plan(self, shape: StepShape, turn: int, lens: HostLens, lists: KeyLists) -> None:
        """Plan a shape by the host's lengths, on wrappers over `lists`, made where it is new.

        turn: the step's epoch.  Queues copies; waits for a shape's first plan alone.
        """
        wrappers = self._made.get(shape)
        if wrappers is None:
            self._forget_oldest()
            wrappers = self._make(shape, lists)
            for ring in wrappers.rings.values():
                ring.plan_first(lens)
        else:
            for ring in wrappers.rings.values():
                ring.plan(turn, lens)
        self._made.pop(shape, None)  # a failed plan leaves what a graph holds
        self._made[shape] = wrappers

    def planned(self, shape: StepShape) -> Wrappers | None:
        """What runs a shape, kept for good where a graph may be recording; None: not planned."""
        wrappers = self._made.get(shape)
        if wrappers is None or not wrappers.rings:
            return None
        if may_be_recorded(self._limits.device):
            self._recorded.add(shape)
        return wrappers

    def _forget_oldest(self) -> None:
        """Make room for a shape: unpadded steps have a new one each."""
        loose = [shape for shape in self._made if shape not in self._recorded]
        if len(loose) >= KEPT_SHAPES:
            del self._made[loose[0]]

    def _make(self, shape: StepShape, lists: KeyLists) -> Wrappers:
        """For every set of layer constants with the shape's chunks whose window the library can
        say."""
        limits, rings = self._limits, {}
        for spec in distinct_constants(limits.layers):
            left = window_left(spec, shape) if spec.chunk == shape.chunk else None
            if left is not None:
                rings[spec] = WrapperRing(
                    self._library,
                    limits,
                    spec=spec,
                    shape=shape,
                    window_left=left,
                    workspace=self._workspace,
                    lists=lists,
                )
        tree = None
        if shape.mask is MaskKind.TREE and all(spec.window is None for spec in limits.layers):
            tree = TreeRows(self._library, limits, shape, self._workspace)
        return Wrappers(rings=rings, tree=tree)


def may_be_recorded(device: torch.device) -> bool:
    """Whether a graph may be recording; on a CPU there is no way to tell."""
    return device_type(device) != "cuda" or torch.cuda.is_current_stream_capturing()
