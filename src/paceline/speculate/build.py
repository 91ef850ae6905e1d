"""What a drafter's layers run on: their cache and the rows of their passes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat
from paceline.core.draft_shape import DraftShape
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import ModelConfig
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.draft_cache import DraftCache
from paceline.speculate.draft_passes import DraftPasses


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


def draft_cache(
    config: ModelConfig,
    rows: Sequence[int],
    place: DraftPlacement,
    *,
    sinks: Sequence[torch.Tensor | None],
) -> DraftCache:
    """Pools and attention of a drafter's layers.  rows: [num_passes] per request of each pass that
    drafts."""
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


def draft_passes(
    cache: DraftCache, shape: DraftShape, rows: tuple[int, ...], place: DraftPlacement
) -> DraftPasses:
    """Their rows, pass by pass."""
    return DraftPasses(
        cache,
        max_reqs=place.limits.padded_reqs,
        rows=rows,
        is_chain=shape.is_chain,
        kv_len_bound=place.limits.kv_len_bound,
        device=place.device,
    )
