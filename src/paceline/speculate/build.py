"""From a loaded drafter to a Proposer, with everything whose address a graph may hold."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import DraftShape
from paceline.core.model_config import CacheGroupSpec, ModelConfig
from paceline.models.causal_lm import CausalLM
from paceline.runner.build import RunnerConfig
from paceline.speculate.draft_cache import DraftCache
from paceline.speculate.draft_passes import DraftPasses
from paceline.speculate.eagle.head import EagleHead
from paceline.speculate.eagle.proposer import EagleProposer
from paceline.speculate.standalone import StandaloneProposer


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPlacement:
    """Where a drafter's cache lies, and how large it is."""

    groups: tuple[CacheGroupSpec, ...]  # of the drafter's layers
    num_pages: tuple[int, ...]  # [num_draft_groups] the reserved one included
    backend: AttentionBackend
    limits: RunnerConfig
    kv: KVFormat
    dtype: torch.dtype
    device: torch.device


def eagle_proposer(
    name: str, shape: DraftShape, head: EagleHead, taps: tuple[str, ...], place: DraftPlacement
) -> EagleProposer:
    """An EAGLE head that is ready to draft."""
    config = head.config.layer
    rows = shape.pass_rows(from_root=False)
    cache = _cache(config, rows, place, sinks=(None,) * config.num_layers)
    passes = _passes(cache, shape, rows, place)
    table_rows = place.limits.max_running + 1
    return EagleProposer(
        name, shape, head, taps=taps, cache=cache, passes=passes, table_rows=table_rows
    )


def standalone_proposer(
    shape: DraftShape, model: CausalLM, config: ModelConfig, place: DraftPlacement
) -> StandaloneProposer:
    """A language model that is ready to draft."""
    rows = shape.pass_rows(from_root=True)
    cache = _cache(config, rows, place, sinks=model.attention_sinks())
    passes = _passes(cache, shape, rows, place)
    return StandaloneProposer(shape, model, cache=cache, passes=passes)


def _cache(
    config: ModelConfig,
    rows: Sequence[int],
    place: DraftPlacement,
    *,
    sinks: Sequence[torch.Tensor | None],
) -> DraftCache:
    limits = place.limits
    return DraftCache(
        config,
        place.groups,
        place.num_pages,
        place.backend,
        max_reqs=limits.padded_reqs,
        max_tokens=limits.draft_tokens,
        length=limits.kv_len_bound,
        num_passes=1 + len(rows),
        kv=place.kv,
        dtype=place.dtype,
        device=place.device,
        sinks=sinks,
    )


def _passes(
    cache: DraftCache, shape: DraftShape, rows: tuple[int, ...], place: DraftPlacement
) -> DraftPasses:
    return DraftPasses(
        cache,
        max_reqs=place.limits.padded_reqs,
        rows=rows,
        is_chain=shape.is_chain,
        kv_len_bound=place.limits.kv_len_bound,
        device=place.device,
    )
