"""Demand: what an engine takes beside KV, by its options; a rehearsal counts it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, Capabilities, LayerCache, Limits, Part
from paceline.attention.paged import empty_outputs
from paceline.attention.registry import load_backend
from paceline.cache.pool import KVFormat, torch_kv_dtype
from paceline.core.gpus import DeviceFacts
from paceline.core.model_config import ModelConfig
from paceline.core.options import EngineOptions, known
from paceline.kernels.step_view import StepView
from paceline.plan.assemble import decide
from paceline.plan.attention_choice import planned_backend
from paceline.plan.rehearsal import (
    RehearsedStep,
    graphs_held,
    largest_graphs,
    largest_steps,
    rehearse,
    steps_held,
)
from paceline.plan.speculation import Speculation, all_groups
from paceline.runner.graphs import RESERVE_FACTOR
from paceline.runner.program import Parts

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
    """What engines of one model and drafter take on one device; each is rehearsed once."""

    def __init__(
        self, config: ModelConfig, device: DeviceFacts, speculation: Speculation | None
    ) -> None:
        self.config = config
        self.device = device
        self.speculation = speculation
        self._known: dict[EngineOptions, Demand] = {}

    def of(self, options: EngineOptions, length: int) -> Demand:
        """Of resolved `options`, whose longest request has `length` tokens; with graphs, whether
        or not they are asked for."""
        # A cache of any size has the same tables, and processors of users run nothing here.
        asked = replace(
            options,
            max_model_len=length,
            kv_cache_bytes=None,
            gpu_memory_utilization=None,
            logits_processors=(),
        )
        if asked not in self._known:
            self._known[asked] = self._rehearsed(asked)
        found = self._known[asked]
        if not options.logits_processors:
            return found
        columns = (known(options.max_num_seqs) + 1) * PLUG_IN_ROW_BYTES
        return replace(found, workspace=found.workspace + columns)

    def _rehearsed(self, options: EngineOptions) -> Demand:
        config, device, speculation = self.config, self.device, self.speculation
        backend = planned_backend(config, options, device, speculation)
        decided = decide(
            config,
            options,
            speculation,
            num_pages=(1,) * len(all_groups(config, known(options.page_size), speculation)),
            kv=KVFormat(dtype=torch_kv_dtype(known(options.kv_cache_dtype))),
        )
        seen = rehearse(decided, Declared.by(backend or load_backend("torch")), device)
        # On a GPU a round of all is captured at boot, however many draft at a time.
        drafting = options.speculative_max_batch if device.device_type == "cpu" else None
        return Demand(
            context=CUDA_CONTEXT_BYTES if device.device_type == "cuda" else 0,
            weights=seen.weights,
            draft_weights=seen.draft_weights,
            graphs=self._graphs(seen.parts, largest_graphs(decided.limits, drafting)),
            workspace=seen.workspace,
            activations=steps_held(seen.parts, largest_steps(decided.limits, drafting), device),
        )

    def _graphs(self, parts: Parts, first: Sequence[RehearsedStep]) -> int:
        """What graphs may hold: on a GPU the reserve, which is a multiple of the first, the nodes
        of each, and one graph of the widest sampler, which may pass its end."""
        held, widest = graphs_held(parts, first, self.device)
        if self.device.device_type == "cpu":
            return held
        drafter = None if self.speculation is None else self.speculation.drafter
        layers = self.config.num_layers
        if drafter is not None and drafter.model is not None:
            layers += drafter.passes * drafter.model.num_layers
        nodes = GRAPH_NODE_BYTES * layers
        return RESERVE_FACTOR * (held + len(first) * nodes) + nodes + widest


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
