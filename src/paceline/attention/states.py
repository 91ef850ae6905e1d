"""The contract of layers with a state per request (docs/architecture.md, "The state contract").

A state backend is to a recurrent layer what an attention backend is to attention: `capabilities`
and four methods, beside which `extend_gated` may stand.  It states nothing about padding, keeps
nothing between calls but in its buffers and in the slots of its layers, and reads no device value
on the host.

    plan     what all layers of a step share
    extend   one layer over the step's rows: it writes the requests' slots; of a round it keeps what
             commit needs
    commit   one layer, once a round knows which rows last: it writes the requests' slots

A row reads slot `read_slots` and writes slot `write_slots`.  The two differ in the first step of a
request: it starts from a state of the prefix tree, which nobody may write, or from nothing.  Slot 0
means nothing: whatever it holds, a row that reads it starts from zeros.  Padded rows read and write
slot 0, so nobody may depend on what it holds.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic

import torch
from torch import Tensor
from typing_extensions import TypeVar

from paceline.attention.contract import GraphSupport
from paceline.core.errors import ConfigError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import RowPart
from paceline.core.modes import MaskKind
from paceline.kernels.gated_norm import Gate, GatedRows
from paceline.kernels.step_view import GroupView, StepView


@dataclass(frozen=True, slots=True, kw_only=True)
class StateCapabilities:
    """What a state backend can do, as data."""

    device_types: frozenset[str]  # "cpu", "cuda"
    dtypes: frozenset[torch.dtype]  # of activations
    masks: frozenset[
        MaskKind
    ]  # CAUSAL: steps and chains; TREE: rounds of trees; never BLOCK, which
    # may lie across a length at which states are kept
    graph: GraphSupport
    part_dtypes: frozenset[torch.dtype] | None = None  # of parts that name one; None: any
    max_conv_width: int | None = None  # taps of a convolution, whose window is the part "conv"
    chunk: int = 1  # tokens: states are kept at multiples of it


@dataclass(frozen=True, slots=True, kw_only=True)
class StateConfig:
    """What the layers of one kind ask of a state backend."""

    device_type: str
    dtype: torch.dtype  # of activations
    masks: frozenset[MaskKind]  # of steps and rounds
    parts: tuple[RowPart, ...]  # of each layer; their dtypes: None: that of activations
    state_every: int  # tokens between states that are kept
    graph: GraphSupport  # the least that is wanted; NEVER when graphs are off
    round_rows: int = 1  # of a request in a round; 1: there are none


def unsupported_reasons(can: StateCapabilities, wanted: StateConfig) -> list[str]:
    """Every reason why a backend cannot run there; empty when it can."""
    reasons = []
    if wanted.device_type not in can.device_types:
        reasons.append(f"device {wanted.device_type}, of {', '.join(sorted(can.device_types))}")
    if wanted.dtype not in can.dtypes:
        reasons.append(f"dtype {wanted.dtype}, of {_listed(can.dtypes)}")
    known = can.masks - {MaskKind.BLOCK}
    names = sorted(mask.value for mask in known)
    for mask in sorted(wanted.masks - known, key=lambda mask: mask.value):
        reasons.append(f"mask {mask.value}, of {', '.join(names)}")
    if can.graph < wanted.graph:
        asked, has = wanted.graph.name.lower(), can.graph.name.lower()
        reasons.append(f"graphs of {asked} steps, of {has}: --enforce-eager runs without")
    for part in wanted.parts:
        dtype = wanted.dtype if part.dtype is None else getattr(torch, part.dtype)
        if part.dtype and can.part_dtypes is not None and dtype not in can.part_dtypes:
            reasons.append(f"part '{part.name}' of {dtype}, of {_listed(can.part_dtypes)}")
        width = part.shape[-1] + 1
        if part.name == "conv" and can.max_conv_width is not None and width > can.max_conv_width:
            reasons.append(f"convolution over {width} tokens, of up to {can.max_conv_width}")
    if wanted.state_every % can.chunk:
        reasons.append(
            f"states kept every {wanted.state_every} tokens, of multiples of its chunk of "
            f"{can.chunk}: set --state-checkpoint-every to one"
        )
    return reasons


def _listed(dtypes: frozenset[torch.dtype]) -> str:
    return ", ".join(sorted(map(str, dtypes)))


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLimits:
    """The largest step the engine will ever build, for one group."""

    device: torch.device
    dtype: torch.dtype  # of activations
    num_layers: int  # of the group
    parts: Mapping[str, tuple[int, ...]]  # name -> shape of one slot
    max_reqs: int  # padded requests of a step
    max_tokens: int  # padded tokens of a step
    max_round_tokens: int  # padded tokens of a round; 0: there are none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateLayer:
    """One layer with the slots it owns."""

    layer_id: int
    index: int  # of the layer in its group
    parts: Mapping[str, Tensor]  # of [num_slots, *part.shape]


Buffers = TypeVar("Buffers", default=Any)
Plan = TypeVar("Plan", default=Any)
Inputs = TypeVar("Inputs", default=Any)


class StateBackend(ABC, Generic[Buffers, Plan, Inputs]):
    """Runs every layer of a STATE group of its kind.  Stateless: buffers are arguments.

    Inputs: what a layer computes of each token before it mixes them.
    """

    kind: str  # of mixer, as layers name it
    name: str
    capabilities: StateCapabilities
    kept_fields: frozenset[str] = frozenset()  # fields of its buffers that outlive a step

    def unsupported_reasons(self, wanted: StateConfig) -> list[str]:
        """Every reason why it cannot run there: its capabilities, and what a subclass adds."""
        return unsupported_reasons(self.capabilities, wanted)

    @abstractmethod
    def make_buffers(self, limits: StateLimits) -> Buffers:
        """Allocate once everything whose address a graph may hold: what plan writes, and what the
        rows of a round keep until its commit."""

    @abstractmethod
    def plan(self, view: StepView, group: GroupView, buffers: Buffers, *, is_round: bool) -> Plan:
        """Derive the frozen plan: device-only, static shapes, in place in `buffers`.

        is_round: rows are drafts, of which commit is told the path that was accepted: extend then
        writes no slot.
        """

    @abstractmethod
    def extend(self, inputs: Inputs, layer: StateLayer, plan: Plan) -> Tensor:
        """One layer over the step's rows, each of which sees its request's state behind the prefix
        and, in the order of their tokens or along their branch, the step's rows up to itself."""

    def extend_gated(
        self, inputs: Inputs, gate: Gate, layer: StateLayer, plan: Plan
    ) -> GatedRows | None:
        """As `extend`, and what a gate makes of it, of backends whose kernels make both at once;
        None: nothing was done, and whoever asks extends and gates."""
        return None

    @abstractmethod
    def commit(
        self,
        view: StepView,
        group: GroupView,
        layer: StateLayer,
        buffers: Buffers,
        *,
        path: Tensor,
        num_kept: Tensor,
    ) -> None:
        """Write the slot of each request: the state behind the first `num_kept` rows of `path`.

        path: [padded_reqs, max_path] int64 rows of the request; num_kept: [padded_reqs] int32, 0
        where nothing was accepted: the state is then what was read.  Reads what extend kept.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateGroupPlan:
    """One group's layers in a step."""

    backend: StateBackend
    layers: Mapping[int, StateLayer]  # by layer id of the model
    plan: Any


def require_state_backend(backend: object, group: CacheGroupSpec) -> StateBackend:
    """What runs the layers of a STATE group; its chooser found it able.  Raises ConfigError."""
    if not isinstance(backend, StateBackend):
        name = getattr(backend, "name", type(backend).__name__)
        raise ConfigError.about(
            f"backend of cache group '{group.name}', whose layers keep states,",
            expected="a StateBackend",
            got="none" if backend is None else f"'{name}', of another kind",
            remedy="name one for the model's layers of this kind",
        )
    return backend
