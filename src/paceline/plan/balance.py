"""Balance: what KV needs and what is left for it, by the length of the longest request."""

from dataclasses import dataclass, replace

from paceline.attention.contract import AttentionBackend, Limits
from paceline.core.draft_shape import DraftShape
from paceline.core.gpus import DeviceFacts
from paceline.core.model_config import CacheGroupSpec, ModelConfig
from paceline.core.options import ELEMENT_BYTES, KV_ELEMENT_BYTES, EngineOptions, known
from paceline.kernels.stand_in import StandIn
from paceline.models.size import weights_bytes
from paceline.plan.attention_choice import planned_backend, planned_limits
from paceline.plan.draft_footprint import (
    draft_graph_bytes,
    draft_step_bytes,
    draft_workspace_bytes,
)
from paceline.plan.footprint import (
    StepLimits,
    decode_rows,
    graph_bytes,
    request_bytes,
    standing_bytes,
    step_bytes,
    workspace_bytes,
)
from paceline.plan.speculation import Speculation, all_groups, shape_of
from paceline.runner.build import tokens_in_flight
from paceline.runner.graphs import RESERVE_FACTOR

CUDA_CONTEXT_BYTES = 640 << 20  # allowance: CUDA context, cuBLAS handles and workspaces


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Balance:
    """What KV needs and what is left for it, by the length of the longest request."""

    config: ModelConfig
    options: EngineOptions
    device: DeviceFacts
    speculation: Speculation | None
    specs: tuple[CacheGroupSpec, ...]  # the target's, then the drafter's
    backend: AttentionBackend | None  # None: none can run, and nothing is allocated
    attention: Limits  # for the backend, at a length of one token
    draft_attention: Limits | None  # the same for the drafter's layers

    def backend_bytes(self, length: int) -> int:
        """What the attention backend holds on the device.  length: tokens in flight included."""
        if self.backend is None:
            return 0
        with StandIn(self.device.device_type, self.device.multiprocessors):
            return self._backend_bytes(self.backend, length)

    def _backend_bytes(self, backend: AttentionBackend, length: int) -> int:
        held = backend.buffer_bytes(_at_length(self.attention, length))
        if self.draft_attention is None or self.speculation is None:
            return held
        # Passes of a round share buffers, unless all of them are planned before it.
        sets = self.speculation.drafter.passes if backend.capabilities.host_plan else 1
        return held + sets * backend.buffer_bytes(_at_length(self.draft_attention, length))

    @property
    def drafts(self) -> DraftShape:
        return shape_of(self.speculation)

    @property
    def reach(self) -> int:
        """Tokens that a round may write behind a request's length."""
        return self.drafts.reach

    @property
    def kv_element(self) -> int:
        return KV_ELEMENT_BYTES[known(self.options.kv_cache_dtype)]

    @property
    def usable(self) -> int:
        share = self.options.gpu_memory_utilization or 1.0
        return min(int(self.device.total_bytes * share), self.device.free_bytes)

    def demand(self, length: int) -> Demand:
        """Bytes of everything else."""
        config, options, here = self.config, self.options, self.device.device_type
        dtype = known(options.dtype)
        element = ELEMENT_BYTES[dtype]
        limits = StepLimits(
            rows=self.attention.max_reqs,
            tokens=self.attention.max_tokens,
            length=length + tokens_in_flight(self.drafts),
            plug_ins=bool(options.logits_processors),
            drafts=self.drafts,
            max_drafting=_max_drafting(options, here),
        )
        graphs, speculation = 0, self.speculation
        if not options.enforce_eager:
            rows = known(options.cuda_graph_max_bs)
            graphs = graph_demand(
                config, options, here, rows=rows, length=length, drafter=speculation
            )
        return Demand(
            context=CUDA_CONTEXT_BYTES if here == "cuda" else 0,
            weights=weights_bytes(config, dtype),
            draft_weights=0
            if speculation is None
            else speculation.drafter.weights_bytes(config, dtype),
            graphs=graphs,
            workspace=workspace_bytes(config, self.specs, limits)
            + draft_workspace_bytes(speculation, limits, element)
            + self.backend_bytes(limits.length),
            activations=step_bytes(config, element, limits)
            + draft_step_bytes(speculation, limits, element),
        )

    def least(self, length: int) -> int:
        """KV bytes of one such request, and of what stands."""
        standing = standing_bytes(
            self.specs, self.kv_element, known(self.options.max_num_batched_tokens)
        )
        return standing + request_bytes(self.specs, length + self.reach, self.kv_element)

    def budget(self, length: int) -> int:
        """Bytes KV may take; below 0 when the rest is too large already."""
        room = self.usable - self.demand(length).total
        limit = self.options.kv_cache_bytes
        return room if limit is None else min(room, limit)


def balance_of(
    config: ModelConfig,
    options: EngineOptions,
    device: DeviceFacts,
    speculation: Speculation | None,
) -> Balance:
    """The balance of `config`, with its drafter, under resolved `options`."""
    groups = all_groups(config, known(options.page_size), None)
    drafter = None if speculation is None else speculation.drafter.model
    specs = all_groups(config, known(options.page_size), speculation)
    return Balance(
        config=config,
        options=options,
        device=device,
        speculation=speculation,
        specs=specs,
        backend=planned_backend(config, options, device, speculation),
        attention=planned_limits(config, options, groups),
        draft_attention=None
        if drafter is None
        else planned_limits(drafter, options, specs[len(groups) :]),
    )


def _max_drafting(options: EngineOptions, device_type: str) -> int | None:
    """Requests of the largest round; on a GPU one of all is captured at boot."""
    return options.speculative_max_batch if device_type == "cpu" else None


def _at_length(limits: Limits, length: int) -> Limits:
    widths = tuple(-(-length // limits.page_size) for _ in limits.max_pages)
    return replace(limits, max_pages=widths)


def graph_demand(
    config: ModelConfig,
    options: EngineOptions,
    device_type: str,
    *,
    rows: int,
    length: int,
    drafter: Speculation | None,
) -> int:
    """What graphs of up to `rows` requests of `length` tokens may hold."""
    drafts = shape_of(drafter)
    element, tokens = ELEMENT_BYTES[known(options.dtype)], options.cuda_graph_max_tokens or 0
    most = _max_drafting(options, device_type)
    held = graph_bytes(
        config,
        element,
        rows=decode_rows(rows, most, drafts),
        tokens=tokens,
        length=length + tokens_in_flight(drafts),
        device_type=device_type,
        reserve=RESERVE_FACTOR,
    )
    return held + draft_graph_bytes(
        drafter,
        element,
        rows=min(rows, most or rows),
        tokens=tokens,
        device_type=device_type,
        reserve=RESERVE_FACTOR,
    )
