"""Assemble: from what was decided to the parts of an engine, on any device.

Boot calls it with weights that it read, the memory budget with empty modules on the meta device:
what is counted is what will be allocated.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import nn

from paceline.attention.contract import AttentionBackend
from paceline.attention.mixers import load_mixers
from paceline.attention.ragged.contract import RaggedBackend
from paceline.attention.ragged.own import OWN
from paceline.cache.pool import KVFormat
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ModelConfig
from paceline.core.modes import End
from paceline.core.options.engine_options import REJECTION, EngineOptions, known
from paceline.core.parallel import ALONE, Parallel, of_rank
from paceline.core.request.sampling_params import PROMPT_BLOCK_ENTRIES
from paceline.kernels.stand_in import device_type
from paceline.layers.sampling import LogitsProcessor
from paceline.models.causal_lm import CausalLM
from paceline.models.packed_layers import PLAIN, Packings
from paceline.plan.attention_choice import mixer_choices
from paceline.plan.speculation import Speculation, draft_groups, shape_of, target_groups
from paceline.runner.build import build_parts
from paceline.runner.program import Parts
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.build import DraftPlacement
from paceline.speculate.drafter import Drafter


class Weights(Protocol):
    """Makes the modules of an engine on its device, in its dtype.  `max_positions` sizes the rope
    tables."""

    def target(self, config: ModelConfig, *, max_positions: int) -> CausalLM: ...

    def draft(
        self, drafter: Drafter, target: CausalLM, limits: RunnerConfig
    ) -> nn.Module | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What an engine will be, before a tensor of it is."""

    config: ModelConfig  # of the target
    options: EngineOptions  # resolved
    speculation: Speculation | None
    limits: RunnerConfig
    draft_pages: tuple[int, ...]  # [num_draft_groups] pages of each pool, the reserved one included
    kv: KVFormat
    parallel: Parallel = ALONE
    packings: Packings = PLAIN  # of the target's weights

    @property
    def rank_config(self) -> ModelConfig:
        """Of the target, as this rank's caches and backend see it."""
        return of_rank(self.config, self.parallel)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, known(self.options.dtype))
        return dtype

    def with_pages(self, num_pages: tuple[int, ...]) -> "Decided":
        """The same with other pools.  num_pages: as of `decide`."""
        num_groups = len(self.limits.num_pages)
        limits = replace(self.limits, num_pages=num_pages[:num_groups])
        return replace(self, limits=limits, draft_pages=num_pages[num_groups:])

    @property
    def groups(self) -> tuple[CacheGroupSpec, ...]:
        """The target's."""
        return target_groups(self.rank_config, self.options)


def decide(
    config: ModelConfig,
    options: EngineOptions,
    speculation: Speculation | None,
    *,
    num_pages: tuple[int, ...],
    kv: KVFormat,
    processors: Sequence[LogitsProcessor] = (),
    parallel: Parallel = ALONE,
    packings: Packings = PLAIN,
) -> Decided:
    """What resolved `options` make of a model and its drafter, with the usual capture policies.

    num_pages: [num_groups] of the target, then of the drafter.
    """
    num_groups = len(target_groups(config, options))
    limits = RunnerConfig(
        max_running=known(options.max_num_seqs),
        max_batched_tokens=known(options.max_num_batched_tokens),
        context_len=known(options.max_model_len),
        max_join_tokens=join_tokens(options),
        num_pages=num_pages[:num_groups],
        graph_max_reqs=known(options.cuda_graph_max_bs),
        graph_max_tokens=_graph_tokens(config, options),
        latent_expand_from=options.latent_expand_from or 0,
        capture=not options.enforce_eager,
        sanitize=options.sanitize,
        share_prefixes=options.share_prefix_reads and options.enable_prefix_cache,
        logits_processors=tuple(processors),
        overlay_slots=options.max_prompt_embeds,
        has_blocks=options.prompt_blocks,
        pooling=config.pooling,
        draft=shape_of(speculation),
        max_drafting=options.speculative_max_batch,
        force_accept_len=None if speculation is None else speculation.forced,
        rejects=speculation is not None and speculation.acceptance == REJECTION,
    )
    return Decided(
        config=config,
        options=options,
        speculation=speculation,
        limits=limits,
        draft_pages=num_pages[num_groups:],
        kv=kv,
        parallel=parallel,
        packings=packings,
    )


def _graph_tokens(config: ModelConfig, options: EngineOptions) -> int:
    """Of the largest ragged step that is a graph.  Where answers are generated prompts share steps
    with decodes: graphs of more than one prompt's tokens take memory that KV needs."""
    tokens = known(options.cuda_graph_max_tokens)
    if End.GENERATE not in config.ends:
        return tokens
    return min(tokens, known(options.max_model_len))


def exchange_capacity(decided: Decided) -> int:
    """Numbers of the largest message of a rank on a CPU: rows of a step, or its columns of logits;
    even."""
    config, limits, ranks = decided.config, decided.limits, decided.parallel.size
    draft = limits.draft
    scored = min(limits.max_tokens, max(1, PROMPT_BLOCK_ENTRIES // config.vocab_size))
    sampled = limits.padded_reqs * max(draft.num_draft_tokens, draft.reach)
    columns = -(-config.vocab_size // ranks)
    most = max(limits.max_tokens * config.hidden_size, max(scored, sampled) * columns)
    return most + most % 2


def join_tokens(options: EngineOptions) -> int:
    """Known tokens that may join in one step: room for prefix hits beyond what is computed.

    They cost pinned host memory, 4 bytes each; fewer make many small steps of requests that share a
    long prefix.
    """
    return max(known(options.max_model_len), 32 * known(options.max_num_batched_tokens))


def assemble(
    decided: Decided,
    weights: Weights,
    backend: AttentionBackend,
    device: torch.device,
    *,
    ragged: RaggedBackend = OWN,
) -> Parts:
    """Make every tensor of an engine that stays, on `device`.  ragged: who attends to what is
    expanded from latents.  Raises what `weights` raises."""
    limits = decided.limits
    config = replace(decided.config, max_position=limits.context_len)
    chosen = mixer_choices(config, decided.options, device_type(device), decided.speculation)
    mixers = load_mixers(chosen)  # or a refusal, before a weight is read
    model = weights.target(config, max_positions=limits.kv_len_bound)
    return build_parts(
        model,
        decided.rank_config,
        decided.groups,
        backend,
        limits,
        device=device,
        dtype=decided.dtype,
        kv=decided.kv,
        proposer=_proposer(decided, weights, model, backend, device),
        mixers=mixers,
        ragged=ragged,
    )


def _proposer(
    decided: Decided,
    weights: Weights,
    target: CausalLM,
    backend: AttentionBackend,
    device: torch.device,
) -> Proposer:
    speculation, limits = decided.speculation, decided.limits
    if speculation is None:
        return NOBODY
    drafter = speculation.drafter
    place = DraftPlacement(
        groups=draft_groups(drafter, decided.options),
        num_pages=decided.draft_pages,
        backend=backend,
        limits=limits,
        kv=replace(decided.kv, scales={}),
        dtype=decided.dtype,
        device=device,
    )
    return drafter.proposer(weights.draft(drafter, target, limits), place)
