"""Rehearsal: an engine's parts and its largest steps on the meta device, and what they allocate.

Nothing is computed and no memory is taken; neither weights nor the device need be here.  What is
counted is what `assemble` makes and what the operators of a step return, with the scratch that our
kernels ask for; what libraries take inside an operator is not seen.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from paceline.attention.contract import AttentionBackend
from paceline.attention.ragged.contract import RaggedBackend
from paceline.attention.ragged.own import OWN
from paceline.core.expansion import Expansion, whole_step
from paceline.core.gpus import DeviceFacts
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End, MaskKind
from paceline.core.padding import PAD_ROW
from paceline.core.request.input_rows import EncoderInput
from paceline.core.request.sampling_params import MAX_LOGPROBS, SamplerTier
from paceline.core.step import PromptSpan
from paceline.kernels.all_reduce import Exchange
from paceline.kernels.custom_op import scratch_sizes
from paceline.kernels.linear import LEAST_ADDED
from paceline.kernels.stand_in import StandIn
from paceline.models.causal_lm import CausalLM
from paceline.models.size import META, empty_exchange, empty_model, weight_bytes
from paceline.plan.assemble import Decided, assemble, exchange_capacity
from paceline.plan.memory.cuda_pool import MIN_BLOCK, Block, CudaPool
from paceline.runner.extents import PaddedSize
from paceline.runner.program import Parts, StepProgram
from paceline.runner.recording.recorded import tensors_among
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.drafter import Drafter

# Bytes for each entry of the operand that torch's own CUDA kernels take while they run.
LIBRARY_SCRATCH = {"aten::sort": 16}
UNTOLD_VIEWS = ("aten::_unsafe_view",)  # they return what they were given; their schema hides it
_UNITS = {"cpu": 64, "cuda": MIN_BLOCK}  # bytes: an allocator gives whole units


class Allocations(StandIn):
    """Bytes of the storages that operators return within the block: alive now and at most, and in
    all.

    Tensors of the meta device stand for those of `facts`.  unit: bytes that each is rounded up to.
    pool: takes the same, of a GPU.
    """

    def __init__(self, facts: DeviceFacts, *, unit: int = 1, pool: CudaPool | None = None) -> None:
        super().__init__(facts.device_type, facts.multiprocessors, facts.cuda_arch)
        self.live, self.peak, self.total = 0, 0, 0
        self._unit = unit
        self._pool = pool
        # Storages by address: bytes, where, and what says that it is gone.
        self._alive: dict[int, tuple[int, Block | None, weakref.ref[Any]]] = {}

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        for tensor in (result,) if isinstance(result, Tensor) else tensors_among((result,)):
            storage = tensor.untyped_storage()
            if storage._cdata in self._alive:
                continue
            if not _may_return_given(func) or not _is_among(storage, args, kwargs or {}):
                self._note(storage)
        if self.device_type == "cuda" and (hidden := _hidden_sizes(func, args)):
            self._note_hidden(hidden)
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        size = self._rounded(storage.nbytes())
        block = self._pool.take(size) if self._pool and size else None
        gone = weakref.ref(storage, partial(self._free, storage._cdata))
        self._alive[storage._cdata] = size, block, gone
        self.live += size
        self.total += size
        self.peak = max(self.peak, self.live)

    def _note_hidden(self, sizes: Sequence[int]) -> None:
        """What is taken and given back within an operator."""
        self.peak = max(self.peak, self.live + sum(map(self._rounded, sizes)))
        if self._pool is not None:
            for block in [self._pool.take(size) for size in sizes]:
                self._pool.give_back(block)

    def _rounded(self, size: int) -> int:
        return -(-size // self._unit) * self._unit

    def _free(self, address: int, _: "weakref.ref[Any]") -> None:
        size, block, _ = self._alive.pop(address)
        self.live -= size
        if self._pool is not None and block is not None:
            self._pool.give_back(block)


@cache
def _may_return_given(func: Any) -> bool:
    """Whether an operator may return a storage that it was given."""
    schema = func._schema
    return schema.name in UNTOLD_VIEWS or any(r.alias_info is not None for r in schema.returns)


def _is_among(
    storage: torch.UntypedStorage, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bool:
    """Whether an operator was given what it returns."""
    given = tensors_among((*args, *kwargs.values()))
    return any(tensor.untyped_storage()._cdata == storage._cdata for tensor in given)


def _hidden_sizes(func: Any, args: tuple[Any, ...]) -> tuple[int, ...]:
    """Bytes of each tensor that an operator holds on a GPU while it runs."""
    own, per_entry = scratch_sizes(func, args), _library_scratch(func)
    return own if per_entry is None else (*own, per_entry * int(args[0].numel()))


@cache
def _library_scratch(func: Any) -> int | None:
    return LIBRARY_SCRATCH.get(func._schema.name)


@dataclass(frozen=True, slots=True)
class EmptyWeights:
    """Modules without weights on the meta device; see `assemble.Weights`."""

    decided: Decided
    exchange: Exchange | None

    def target(self, config: ModelConfig, *, max_positions: int) -> CausalLM:
        return empty_model(
            config,
            dtype=self.decided.dtype,
            max_positions=max_positions,
            parallel=self.decided.parallel,
            exchange=self.exchange,
            packings=self.decided.packings,
        )

    def draft(self, drafter: Drafter, target: CausalLM, limits: RunnerConfig) -> nn.Module | None:
        return drafter.empty(target, limits, self.decided.dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rehearsed:
    """An engine's parts on the meta device, and their bytes."""

    parts: Parts
    weights: int  # of the target
    draft_weights: int  # of the drafter's own; a head's map to the target's tokens is one
    kv: int  # of all pools, scales included
    workspace: int  # of all else that stays: tables, buffers, rope, what the backend holds


def rehearse(
    decided: Decided,
    backend: AttentionBackend,
    facts: DeviceFacts,
    *,
    ragged: RaggedBackend = OWN,
) -> Rehearsed:
    """Assemble an engine as it would be made on `facts`, without its weights.

    Raises RuntimeError where `backend` cannot allocate on the meta device.
    """
    with Allocations(facts) as seen:
        # Memory that ranks have once for all is counted by each.
        capacity = 0 if decided.parallel.size == 1 else exchange_capacity(decided)
        exchange = empty_exchange(decided.parallel, capacity, dtype=decided.dtype)
        parts = assemble(decided, EmptyWeights(decided, exchange), backend, META, ragged=ragged)
    weights, draft_weights = (weight_bytes(m) for m in (parts.model, parts.proposer.model))
    pools = [pool.named_tensors().values() for pool in parts.device_pools]
    kv = sum(tensor.nbytes for pool in pools for tensor in pool)
    return Rehearsed(
        parts=parts,
        weights=weights,
        draft_weights=draft_weights,
        kv=kv,
        workspace=seen.live - weights - draft_weights - kv,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedStep:
    size: PaddedSize
    sampler: SamplerTier
    logprobs: bool
    mask: MaskKind = MaskKind.CAUSAL
    is_round: bool = False
    scored: int = 0  # tokens of a prompt that are scored
    masked: bool = False
    has_overlay: bool = False
    expansion: Expansion | None = None


def largest_steps(limits: RunnerConfig, max_drafting: int | None = None) -> list[RehearsedStep]:
    """The largest steps with the widest sampler: a ragged one, the longest whose products have
    memory of their own, a prompt that is scored, where latents are expanded another ragged one, and
    where somebody drafts a round, of at most `max_drafting` requests."""
    wide = SamplerTier.PLUG_INS if limits.logits_processors else SamplerTier.BY_ROW
    ragged = PaddedSize.ragged(limits.padded_reqs, limits.max_tokens)
    overlay = limits.overlay_slots > 0
    shape = RehearsedStep(
        size=ragged,
        sampler=wide,
        logprobs=True,
        mask=MaskKind.BLOCK if limits.has_blocks else MaskKind.CAUSAL,
        masked=True,
        has_overlay=overlay,
    )
    longest = min(limits.max_tokens, LEAST_ADDED - 1)
    apart = replace(shape, size=PaddedSize.ragged(min(limits.padded_reqs, longest), longest))
    scored = min(limits.max_tokens, limits.context_len)
    prompt = replace(shape, size=PaddedSize.ragged(1, limits.max_tokens), scored=scored)
    expanded = []
    if limits.latent_expand_from:
        # Two pieces of a prefix, since one is made while another's sums are kept.
        whole = whole_step(limits.max_tokens, num_pieces=2)
        expanded = [replace(shape, mask=MaskKind.CAUSAL, expansion=whole)]
    rounds = _rounds(limits, shape, limits.max_running, max_drafting)
    return [shape, *([] if apart == shape else [apart]), prompt, *expanded, *rounds]


def largest_graphs(limits: RunnerConfig, max_drafting: int | None = None) -> list[RehearsedStep]:
    """What is captured first: of a ragged step, where any is; of a round, where somebody drafts;
    of a decode, unless as many requests draft."""
    reqs = min(limits.graph_max_reqs, limits.max_running)
    sizes = limits.graph_sizes()
    size = PaddedSize.uniform(reqs, 1)
    decode = RehearsedStep(size=size, sampler=SamplerTier.GREEDY, logprobs=False)
    rounds = _rounds(limits, decode, reqs, max_drafting)
    ragged = [replace(decode, size=sizes.full(tokens)) for tokens in sizes.tokens[-1:]]
    covered = any(shape.size.reqs == reqs for shape in rounds)
    return [*ragged, *rounds] if covered else [*ragged, decode, *rounds]


def _rounds(
    limits: RunnerConfig, like: RehearsedStep, reqs: int, max_drafting: int | None
) -> list[RehearsedStep]:
    if not limits.draft.has_drafts:
        return []
    drafting = reqs if max_drafting is None else min(reqs, max_drafting)
    size = PaddedSize.uniform(drafting, limits.draft.num_draft_tokens)
    like = replace(like, has_overlay=False)
    return [replace(like, size=size, mask=limits.draft.mask, is_round=True)]


def allocated(
    parts: Parts,
    shape: RehearsedStep,
    facts: DeviceFacts,
    *,
    captured: bool = False,
    pool: CudaPool | None = None,
) -> Allocations:
    """What one step over padded rows allocates beside `parts`: an eager run, or the capture of a
    graph, which sees what operators are made of.

    parts: on the meta device, or on the device of `facts`, whose buffers it writes.  pool: where a
    GPU's memory is taken from.
    """
    seen = Allocations(facts, unit=_UNITS[facts.device_type], pool=pool)
    parts.buffers.pad(shape.size)
    scored = shape.scored if parts.generates else 0
    spans = (PromptSpan(0, 0, scored, MAX_LOGPROBS),) if scored else ()
    with torch.no_grad() if captured else torch.inference_mode(), seen:
        StepProgram(
            parts,
            parts.buffers.view(shape.size, shape.mask, has_overlay=shape.has_overlay),
            sampler=shape.sampler,
            logprobs=shape.logprobs,
            is_round=shape.is_round,
            prompt_spans=spans,
            masked=shape.masked,
            ends=_ends(parts, shape),
            expansion=shape.expansion,
        ).run()
    return seen


def _ends(parts: Parts, shape: RehearsedStep) -> frozenset[End]:
    """All that an eager step may have; of a graph the usual."""
    pools = shape.logprobs and parts.pooling is not None
    return parts.usual_ends | ({End.POOL} if pools else set())


def encoded(
    parts: Parts, config: ModelConfig, facts: DeviceFacts, *, pool: CudaPool | None = None
) -> Allocations:
    """What the largest input of an encoder allocates beside `parts`, on the meta device, before its
    request's first step; nothing where requests bring none."""
    seen = Allocations(facts, unit=_UNITS[facts.device_type], pool=pool)
    wanted = config.encoder_input
    if wanted is None or parts.encoder is None:
        return seen
    most = config.max_encoder_len
    dtype = next(parts.model.parameters()).dtype
    with torch.inference_mode(), seen:
        frames = torch.empty(wanted.shape(most * wanted.frames_per_row), dtype=dtype, device=META)
        largest = EncoderInput(num_rows=most, media_hash="", data=frames)
        parts.encoder.write(parts.model, largest, parts.table, PAD_ROW)
    return seen


def steps_held(
    parts: Parts, config: ModelConfig, shapes: Sequence[RehearsedStep], facts: DeviceFacts
) -> int:
    """Bytes that steps, and encoders before them, take and give back in turn: of a CPU the peak, of
    a GPU what the allocator keeps of them.

    config: of the model, whose parts are on the meta device.
    """
    pool = None if facts.device_type == "cpu" else CudaPool()
    seen = [allocated(parts, shape, facts, pool=pool) for shape in shapes]
    seen.append(encoded(parts, config, facts, pool=pool))
    return max(each.peak for each in seen) if pool is None else pool.held


def graphs_held(
    parts: Parts, shapes: Sequence[RehearsedStep], facts: DeviceFacts
) -> tuple[int, int]:
    """Bytes that graphs of `shapes` hold, and what the last adds to them with the widest sampler.

    CUDA graphs reuse storage and share a pool; recorded graphs reuse nothing and share an arena as
    large as the largest greedy one: what needs more runs without a graph.
    """
    if facts.device_type == "cpu":
        seen = [allocated(parts, shape, facts, captured=True) for shape in shapes]
        return max(each.total for each in seen), 0
    pool = CudaPool()
    for shape in shapes:
        allocated(parts, shape, facts, captured=True, pool=pool)
    first = pool.held
    widest = replace(shapes[-1], sampler=SamplerTier.BY_ROW, logprobs=True, masked=True)
    allocated(parts, widest, facts, captured=True, pool=pool)
    return first, pool.held - first
