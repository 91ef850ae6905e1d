"""build_runner: from a loaded model to a ModelRunner that is ready to launch steps."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from paceline.attention.contract import AttentionBackend, Limits
from paceline.attention.no_attention import NoAttention
from paceline.attention.ragged.contract import RaggedBackend
from paceline.attention.ragged.own import OWN
from paceline.attention.states import (
    StateBackend,
    StateLayer,
    StateLimits,
    require_state_backend,
)
from paceline.cache.pool import KVFormat, KVPool, StatePool
from paceline.core.events import Notify
from paceline.core.model.cache_groups import NUM_SLOT_COLUMNS, CacheGroupSpec
from paceline.core.model.config import CacheKind, ModelConfig
from paceline.core.modes import End
from paceline.kernels.stand_in import device_type
from paceline.layers.attention import attention_limits, layer_caches, ragged_limits
from paceline.models.causal_lm import CausalLM
from paceline.runner.buffers import StepBuffers
from paceline.runner.committers import StateMixer, StateSlots, token_rows
from paceline.runner.encoder import EncoderRunner
from paceline.runner.model_runner import ModelRunner
from paceline.runner.outputs_ring import OutputsRing
from paceline.runner.program import Parts
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import (
    RESERVE_FACTOR,
    CudaGraphFactory,
    GraphStore,
    RecordedGraphFactory,
)
from paceline.runner.recording.guard import Guard
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.sanitizer.sanitizer import Sanitizer
from paceline.runner.staging import StagingRing
from paceline.runner.streams import Stream
from paceline.runner.table.block_ends import BlockEnds
from paceline.runner.table.overlay import Overlay
from paceline.runner.table.request_table import RequestTable
from paceline.runner.table.runs import PADDING

NO_MIXERS: Mapping[str, StateBackend] = MappingProxyType({})
# Up to here each batch size has its own graph: padding costs a CPU time, and its graphs are small.
_EVERY_SIZE = {"cpu": 16, "cuda": 4}
_ALIGNMENT = 16  # bytes, of each staged piece
_PIECES = 16  # per request and step, at most


def build_parts(
    model: CausalLM,
    config: ModelConfig,
    groups: Sequence[CacheGroupSpec],
    backend: AttentionBackend,
    limits: RunnerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv: KVFormat,
    proposer: Proposer = NOBODY,
    mixers: Mapping[str, StateBackend] = NO_MIXERS,
    ragged: RaggedBackend = OWN,
) -> Parts:
    """Allocate everything whose address a graph may hold; arguments as of `build_runner`."""
    kinds, order = [group.kind for group in groups], list(CacheKind)
    assert kinds == sorted(kinds, key=order.index), "groups stand in the order of their kinds"
    num_paged, num_recurrent = kinds.count(CacheKind.TOKENS), kinds.count(CacheKind.STATE)
    paged, recurrent = groups[:num_paged], groups[num_paged : num_paged + num_recurrent]
    encoder = _encoder(config, groups, backend, limits, device=device, dtype=dtype, kv=kv)
    if not paged:  # what is named runs a drafter's layers, if any, or those that read an encoder
        backend = NoAttention()
    length = limits.kv_len_bound
    bounds = _backend_limits(
        config, paged, limits, length=length, device=device, dtype=dtype, kv=kv
    )
    can_share = backend.capabilities.shares_prefixes and None in bounds.windows
    shares = can_share and limits.share_prefixes and not any(heads.v_in_k for heads in config.heads)
    bounds = replace(bounds, share_prefixes=shares)
    pools = [
        KVPool(group, num_pages, kv=kv, device=device)
        for group, num_pages in zip(paged, limits.num_pages[:num_paged], strict=True)
    ]
    counts = limits.num_pages[num_paged : num_paged + num_recurrent]
    state_mixers = [
        _mixer(
            StatePool(group, num_slots, dtype=kv.dtype, device=device),
            mixers.get(group.mixer),
            limits,
            group=index,
            device=device,
            dtype=dtype,
        )
        for index, (group, num_slots) in enumerate(
            zip(recurrent, counts, strict=True), start=num_paged
        )
    ]
    specs = [*groups, *(pool.spec for pool in proposer.pools)]
    # Those of tokens have slots that a step writes.
    page_sizes = tuple(s.page_size if s.kind is CacheKind.TOKENS else 0 for s in specs)
    max_pages = tuple(_max_pages(spec, limits.kv_len_bound) for spec in specs)
    buffers = StepBuffers(
        max_reqs=bounds.max_reqs,
        max_tokens=bounds.max_tokens,
        max_pages=max_pages,
        max_tree_rows=limits.tree_rows,
        max_path=limits.draft.max_path,
        vocab_size=config.vocab_size,
        pooled_width=0 if limits.pooling is None else config.pooled_width,
        tells_types=config.tells_types,
        rope_axes=config.rope_axes,
        has_overlay=limits.overlay_slots > 0,
        has_blocks=limits.has_blocks,
        state_groups=frozenset(mixer.group for mixer in state_mixers),
        encoder_groups=() if encoder is None else encoder.groups,
        kv_len_bound=limits.kv_len_bound,
        device=device,
    )
    state_slots = tuple(StateSlots(mixer, buffers.state_lens) for mixer in state_mixers)
    return Parts(
        model=model,
        backend=backend,
        backend_buffers=backend.make_buffers(bounds),
        layers=layer_caches(config, paged, pools, sinks=model.attention_sinks()),
        pools=tuple(pools),
        committers=(*token_rows(pools), *state_slots),
        mixers=tuple(state_mixers),
        encoder=encoder,
        page_sizes=page_sizes,
        table=_request_table(config, limits, max_pages, device=device, dtype=dtype),
        buffers=buffers,
        taps=proposer.taps,
        proposer=proposer,
        force_accept_len=limits.force_accept_len,
        rejects=limits.rejects,
        generates=End.GENERATE in config.ends,
        pooling=limits.pooling,
        shares_prefixes=bounds.share_prefixes,
        latent_expand_from=limits.latent_expand_from,
        ragged=ragged,
        ragged_buffers=_ragged_buffers(ragged, config, limits, device=device, dtype=dtype),
    )


def _ragged_buffers(
    ragged: RaggedBackend,
    config: ModelConfig,
    limits: RunnerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> Any:
    """What the ragged backend holds; None where nothing is expanded."""
    if not limits.latent_expand_from or not any(heads.v_in_k for heads in config.heads):
        return None
    bounds = ragged_limits(
        config,
        device=device,
        dtype=dtype,
        max_reqs=limits.padded_reqs,
        max_tokens=limits.max_tokens,
        kv_len_bound=limits.kv_len_bound,
    )
    return ragged.make_buffers(bounds)


def build_runner(
    model: CausalLM,
    config: ModelConfig,
    groups: Sequence[CacheGroupSpec],
    backend: AttentionBackend,
    limits: RunnerConfig,
    *,
    stream: Stream,
    device: torch.device,
    dtype: torch.dtype,
    kv: KVFormat,
    notify: Notify,
    proposer: Proposer = NOBODY,
    mixers: Mapping[str, StateBackend] = NO_MIXERS,
    ragged: RaggedBackend = OWN,
) -> ModelRunner:
    """Allocate everything whose address a graph may hold and wire it up.  Captures nothing yet.

    groups: the target's; those of `proposer` stand behind them in the request table and in a step.
    limits.num_pages: of the target's groups.  mixers: by kind, who runs the layers of its STATE
    groups, which stand behind those of tokens.  ragged: who attends to what is expanded.
    """
    parts = build_parts(
        model,
        config,
        groups,
        backend,
        limits,
        device=device,
        dtype=dtype,
        kv=kv,
        proposer=proposer,
        mixers=mixers,
        ragged=ragged,
    )
    return wire_runner(parts, limits, stream=stream, device=device, notify=notify)


def wire_runner(
    parts: Parts, limits: RunnerConfig, *, stream: Stream, device: torch.device, notify: Notify
) -> ModelRunner:
    """A runner over `parts`, which were built under the same limits.  Captures nothing yet."""
    pinned = device_type(device) == "cuda"
    if pinned:  # steps run on a stream of their own; all of this was filled here
        torch.cuda.synchronize(device)
    staged = _staging_bytes(limits, parts)
    return ModelRunner(
        parts,
        stream=stream,
        staging=StagingRing(staged, pinned=pinned, depth=limits.staging_depth),
        outputs=OutputsRing(
            limits.max_running,
            limits.max_tokens,
            draft=limits.draft,
            keeps_states=bool(parts.mixers),
            pooled_width=parts.buffers.pooled.shape[1],
            pinned=pinned,
        ),
        graphs=_graph_store(limits, device, notify),
        sizes=_graph_sizes(limits, device_type(device)),
        guard=Guard(parts, kv_len_bound=limits.kv_len_bound),
        sanitizer=Sanitizer(parts) if limits.sanitize else None,
    )


def _max_pages(spec: CacheGroupSpec, kv_len_bound: int) -> int:
    """Width of a group's page table."""
    if spec.kind is CacheKind.STATE:
        return NUM_SLOT_COLUMNS
    return -(-_rows_of_request(spec, kv_len_bound) // spec.page_size)


def _rows_of_request(spec: CacheGroupSpec, kv_len_bound: int) -> int:
    """What a row of its page table covers; behind an encoder's rows a decode counts its token."""
    return kv_len_bound if spec.encoder_len is None else spec.encoder_len + 1


def _encoder(
    config: ModelConfig,
    groups: Sequence[CacheGroupSpec],
    backend: AttentionBackend,
    limits: RunnerConfig,
    *,
    device: torch.device,
    dtype: torch.dtype,
    kv: KVFormat,
) -> EncoderRunner | None:
    """The ENCODER groups, run by the backend of the others; None: there are none."""
    own = [index for index, group in enumerate(groups) if group.kind is CacheKind.ENCODER]
    if not own:
        return None
    specs = tuple(groups[index] for index in own)
    length = _rows_of_request(specs[0], limits.kv_len_bound)
    bounds = _backend_limits(
        config, specs, limits, length=length, device=device, dtype=dtype, kv=kv
    )
    pools = [
        KVPool(group, limits.num_pages[index], kv=replace(kv, scales={}), device=device)
        for index, group in zip(own, specs, strict=True)
    ]
    return EncoderRunner.make(config, tuple(own), pools, backend, bounds)


def _backend_limits(
    config: ModelConfig,
    groups: Sequence[CacheGroupSpec],
    limits: RunnerConfig,
    *,
    length: int,
    device: torch.device,
    dtype: torch.dtype,
    kv: KVFormat,
) -> Limits:
    """length: rows of one request."""
    return attention_limits(
        config,
        tuple(groups),
        device=device,
        dtype=dtype,
        kv_dtype=kv.dtype,
        max_reqs=limits.padded_reqs,
        max_tokens=limits.max_tokens,
        length=length,
    )


def _mixer(
    pool: StatePool,
    backend: StateBackend | None,
    limits: RunnerConfig,
    *,
    group: int,
    device: torch.device,
    dtype: torch.dtype,
) -> StateMixer:
    """A STATE group with who runs its layers.  Raises ConfigError."""
    spec, draft = pool.spec, limits.draft
    found = require_state_backend(backend, spec)
    buffers = found.make_buffers(
        StateLimits(
            device=device,
            dtype=dtype,
            num_layers=len(spec.layer_ids),
            parts={part.name: part.shape for part in spec.stored},
            max_reqs=limits.padded_reqs,
            max_tokens=limits.max_tokens,
            max_round_tokens=limits.max_running * draft.num_draft_tokens if draft.has_drafts else 0,
        )
    )
    layers = {
        layer_id: StateLayer(layer_id=layer_id, index=index, parts=pool.layer(layer_id))
        for index, layer_id in enumerate(spec.layer_ids)
    }
    return StateMixer(group=group, pool=pool, backend=found, buffers=buffers, layers=layers)


def _request_table(
    config: ModelConfig,
    limits: RunnerConfig,
    max_pages: tuple[int, ...],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> RequestTable:
    overlay = None
    if limits.overlay_slots:
        overlay = Overlay(
            num_slots=limits.overlay_slots,
            hidden_size=config.hidden_size,
            table_rows=limits.max_running + 1,
            max_tokens=limits.kv_len_bound,
            dtype=dtype,
            device=device,
        )
    block_ends = None
    if limits.has_blocks:
        block_ends = BlockEnds(limits.max_running + 1, limits.kv_len_bound, device)
    return RequestTable(
        max_running=limits.max_running,
        max_tokens=limits.kv_len_bound,
        max_pages=max_pages,
        eos_token_ids=config.eos_token_ids,
        device=device,
        plug_ins=limits.logits_processors,
        overlay=overlay,
        rope_axes=config.rope_axes,
        has_encoder=any(layer.reads_encoder for layer in config.layers),
        block_ends=block_ends,
        tells_types=config.tells_types,
        samples=End.GENERATE in config.ends,
    )


def _staging_bytes(limits: RunnerConfig, parts: Parts) -> int:
    """The most one step stages: the joining requests' tokens, and of every row all its columns."""
    table, buffers = parts.table, parts.buffers
    page_rows = sum(pages[0].nbytes for pages in table.page_tables)
    sampling_row = table.sampling.floats[0].nbytes + table.sampling.ints[0].nbytes
    told = 0 if table.second_from is None else table.second_from[0].nbytes
    per_row = told + page_rows + sampling_row + 4 * limits.tree_rows + _PIECES * _ALIGNMENT
    of_masks = (buffers.mask_words, buffers.mask_ids, buffers.given_ids, buffers.given_parents)
    masks = sum(tensor.nbytes for tensor in of_masks)
    # One request may join beyond the limit, when it joins alone.
    tokens = PADDING * max(limits.max_join_tokens, limits.context_len)
    if table.overlay is not None:  # of each its slot, and a piece for each row of media, at most
        tokens += min(tokens, limits.overlay_slots) * (1 + _ALIGNMENT // 4)
    per_token = 4 * (1 + limits.has_blocks) + (table.rope.given[0, 0].nbytes if table.rope else 0)
    return per_token * tokens + limits.padded_reqs * per_row + masks


def _graph_sizes(limits: RunnerConfig, device: str) -> GraphSizes:
    return limits.graph_sizes(_EVERY_SIZE[device])


def largest_round(limits: RunnerConfig, device: str) -> int | None:
    """Padded requests of the largest round that is served; None: of a step of all.  A drafter's
    self-test has rounds of more.  device: "cpu" or "cuda"."""
    if limits.max_drafting is None:
        return None
    size = _graph_sizes(limits, device).pad(limits.max_drafting, limits.draft.num_draft_tokens)
    return None if size is None else size.reqs


def _graph_store(limits: RunnerConfig, device: torch.device, notify: Notify) -> GraphStore | None:
    if not limits.capture:
        return None
    most = largest_round(limits, device_type(device))
    if device_type(device) == "cuda":
        return GraphStore(
            CudaGraphFactory(),
            reserve_factor=RESERVE_FACTOR,
            notify=notify,
            policy=limits.capture_policy,
            largest_round=most,
        )
    factory = RecordedGraphFactory(
        poison=limits.poison_graphs or limits.sanitize, limit_bytes=limits.recorded_bytes
    )
    return GraphStore(
        factory,
        reserve_factor=None,
        notify=notify,
        policy=limits.capture_policy,
        largest_round=most,
    )
