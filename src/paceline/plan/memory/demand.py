"""Demand: what an engine takes beside KV, by its options; a rehearsal counts it."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, Capabilities, LayerCache, Limits, Part
from paceline.attention.paged import empty_outputs
from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedCapabilities,
    RaggedLimits,
    RaggedPart,
)
from paceline.attention.ragged.own import OWN
from paceline.attention.ragged.registry import load_ragged
from paceline.attention.registry import load_backend
from paceline.cache.pool import KVFormat, torch_kv_dtype
from paceline.core.gpus import DeviceFacts
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions, known
from paceline.core.parallel import ALONE, Parallel, of_rank
from paceline.kernels.ragged_attention import SharedColumns
from paceline.kernels.step_view import StepView
from paceline.models.packed_layers import PLAIN, Packings
from paceline.plan.assemble import decide
from paceline.plan.attention_choice import planned_backend
from paceline.plan.memory.rehearsal import (
    graphs_held,
    largest_graphs,
    largest_steps,
    rehearse,
    steps_held,
)
from paceline.plan.speculation import Speculation, all_groups
from paceline.runner.build import largest_round
from paceline.runner.recording.graphs import RESERVE_FACTOR
from paceline.runner.sanitizer.dead_slots import held_bytes

CUDA_CONTEXT_BYTES = 640 << 20  # allowance: CUDA context, cuBLAS handles and workspaces
GRAPH_NODE_BYTES = 1 << 20  # allowance: nodes of an instantiated graph, per layer that it runs
PLUG_IN_ROW_BYTES = 1 << 14  # allowance: columns of plug-in logits processors, per request


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """Bytes of everything but KV."""

    context: int
    weights: int
    draft_weights: int
    graphs: int
    workspace: int
    activations: int

    @property
    def total(self) -> int:
        weights = self.weights + self.draft_weights
        return self.context + weights + self.graphs + self.workspace + self.activations


class Demands:
    """What engines of one model and drafter take on one device; none is rehearsed twice."""

    def __init__(
        self,
        config: ModelConfig,
        device: DeviceFacts,
        speculation: Speculation | None,
        parallel: Parallel = ALONE,
        packings: Packings = PLAIN,
    ) -> None:
        """device: as one process has it.  parallel: which of those that share the model.
        packings: of its weights."""
        self.config = config
        self.device = device
        self.speculation = speculation
        self.parallel = parallel
        self.packings = packings
        self._known: dict[EngineOptions, Demand] = {}
        self._begun: dict[EngineOptions, _Rehearsal] = {}  # of which graphs alone were asked

    def of(self, options: EngineOptions, length: int) -> Demand:
        """Of resolved `options`, whose longest request has `length` tokens; with graphs, whether
        or not they are asked for."""
        asked = _alike(options, length)
        if asked not in self._known:
            self._known[asked] = (self._begun.pop(asked, None) or self._rehearsal(asked)).demand()
        found = self._known[asked]
        workspace = found.workspace
        if options.sanitize:  # what stands is copied before a step and behind it
            groups = len(all_groups(self.rank_config, options, self.speculation))
            workspace += 2 * found.workspace + held_bytes(groups)
        if options.logits_processors:
            workspace += (known(options.max_num_seqs) + 1) * PLUG_IN_ROW_BYTES
        return replace(found, workspace=workspace)

    def graphs(self, options: EngineOptions, length: int) -> int:
        """The bytes of graphs that `of` counts, without a step of another kind."""
        asked = _alike(options, length)
        if asked in self._known:
            return self._known[asked].graphs
        if asked not in self._begun:
            self._begun[asked] = self._rehearsal(asked)
        return self._begun[asked].graphs

    def _rehearsal(self, options: EngineOptions) -> "_Rehearsal":
        return _Rehearsal(self, options)

    @property
    def rank_config(self) -> ModelConfig:
        """The model as a rank's caches and backend see it."""
        return of_rank(self.config, self.parallel)


def _alike(options: EngineOptions, length: int) -> EngineOptions:
    """The same for all options that take as much: a cache of any size has the same tables, and
    processors of users run nothing here."""
    return replace(
        options,
        max_model_len=length,
        kv_cache_bytes=None,
        gpu_memory_utilization=None,
        logits_processors=(),
    )


class _Rehearsal:
    """An engine of resolved `options` on the meta device; its steps run when they are asked for."""

    def __init__(self, demands: Demands, options: EngineOptions) -> None:
        config, device, speculation = demands.config, demands.device, demands.speculation
        backend = planned_backend(demands.rank_config, options, device, speculation)
        decided = decide(
            config,
            options,
            speculation,
            num_pages=(1,) * len(all_groups(config, options, speculation)),
            kv=KVFormat(dtype=torch_kv_dtype(known(options.kv_cache_dtype))),
            parallel=demands.parallel,
            packings=demands.packings,
        )
        self._config = config
        self._layers = config.num_layers
        drafter = None if speculation is None else speculation.drafter
        if drafter is not None and drafter.model is not None:
            self._layers += drafter.passes * drafter.model.num_layers
        self._device = device
        self._limits = decided.limits
        # On a GPU a round of all is captured at boot, however many draft at a time.
        self._drafting = largest_round(self._limits, "cpu") if device.device_type == "cpu" else None
        self._seen = rehearse(
            decided,
            Declared.by(backend or load_backend("torch")),
            device,
            ragged=_ragged(options),
        )

    def demand(self) -> Demand:
        seen, device = self._seen, self._device
        steps = largest_steps(self._limits, self._drafting)
        return Demand(
            context=CUDA_CONTEXT_BYTES if device.device_type == "cuda" else 0,
            weights=seen.weights,
            draft_weights=seen.draft_weights,
            graphs=self.graphs,
            workspace=seen.workspace,
            activations=steps_held(seen.parts, self._config, steps, device),
        )

    @cached_property
    def graphs(self) -> int:
        """What graphs may hold: on a GPU the reserve, which is a multiple of the first, the nodes
        of each, and one graph of the widest sampler, which may pass its end."""
        first = largest_graphs(self._limits, self._drafting)
        held, widest = graphs_held(self._seen.parts, first, self._device)
        if self._device.device_type == "cpu":
            return held
        nodes = GRAPH_NODE_BYTES * self._layers
        return RESERVE_FACTOR * (held + len(first) * nodes) + nodes + widest


def _ragged(options: EngineOptions) -> RaggedBackend:
    """Who attends to expanded latents, as far as that is decided; no library runs."""
    name = options.latent_expand_backend
    if name in (None, "auto", OWN.name):
        return OWN
    assert name is not None
    return DeclaredRagged.by(load_ragged(name))


@dataclass(frozen=True)
class Declared(AttentionBackend[Tensor, None]):
    """Stands for `real` in a rehearsal: takes the bytes that it declares, and computes nothing, so
    that `real` need know nothing of the meta device."""

    name: str
    capabilities: Capabilities
    real: AttentionBackend

    @staticmethod
    def by(real: AttentionBackend) -> "Declared":
        """Of the same name and capabilities."""
        return Declared(name=real.name, capabilities=real.capabilities, real=real)

    def make_buffers(self, limits: Limits) -> Tensor:
        """[bytes]  uint8"""
        size = self.real.buffer_bytes(limits)
        return torch.empty(size, dtype=torch.uint8, device=limits.device)

    def plan(self, view: StepView, buffers: Any) -> None:
        return None

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: Any, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        return empty_outputs(q, layer)


@dataclass(frozen=True)
class DeclaredRagged(RaggedBackend[Tensor, None]):
    """As `Declared`, of a ragged backend."""

    name: str
    capabilities: RaggedCapabilities
    real: RaggedBackend

    @staticmethod
    def by(real: RaggedBackend) -> "DeclaredRagged":
        """Of the same name and capabilities."""
        return DeclaredRagged(name=real.name, capabilities=real.capabilities, real=real)

    def make_buffers(self, limits: RaggedLimits) -> Tensor:
        """[bytes]  uint8"""
        size = self.real.buffer_bytes(limits)
        return torch.empty(size, dtype=torch.uint8, device=limits.device)

    def plan(self, part: RaggedPart, buffers: Tensor) -> None:
        return None

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: None,
        *,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        return q.new_empty(*q.shape[:2], v.shape[2]), lse
