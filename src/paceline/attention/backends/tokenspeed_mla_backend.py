"""The `tokenspeed_mla` backend: TokenSpeed's kernels for latents on Blackwell GPUs.

Over latents in 16 bits they mask nothing, so every row has one query.  In float8, for which they
are best known, a latent has one scale with what turned: our cache keeps no such rows.

Read in tokenspeed-mla's `mla_decode.py` of mid 2026.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache, Limits
from paceline.attention.latent_decode import LatentDecodeBackend, latent_capabilities
from paceline.attention.layouts.query_rows import QueryRows
from paceline.kernels.stand_in import multiprocessors


class TokenspeedMLALibrary(Protocol):
    """The one function of the library that we call."""

    def tokenspeed_mla_decode(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        softmax_scale: float,
        *,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [rows, queries, heads, kv_lora_rank]; with return_lse also [rows, queries, heads]
        float32 in base 2."""


@dataclass(frozen=True)
class TokenspeedMLABackend(LatentDecodeBackend[TokenspeedMLALibrary]):
    """Causal attention over latents in pages of 32 or 64, and the prefix alone with lse."""

    name = "tokenspeed_mla"
    capabilities = latent_capabilities(
        max_arch=(10, 3),
        dtypes={torch.bfloat16, torch.float16},
        page_sizes={32, 64},
        latent_dims={(512, 64)},
        returns_lse=True,
    )
    module = "tokenspeed_mla"
    package = "tokenspeed-mla"
    most_queries = 1

    def workspace_bytes(self, limits: Limits) -> int:
        """A float32 sum of each head, with its log-sum-exp, of every multiprocessor: rows are split
        until all have work, and no further."""
        heads = max(spec.num_heads for spec in limits.layers)
        rank = max(spec.v_head_dim for spec in limits.layers)
        return multiprocessors(limits.device) * heads * (rank + 1) * 4

    def attend(
        self,
        library: TokenspeedMLALibrary,
        query: Tensor,
        layer: LayerCache,
        *,
        rows: QueryRows,
        workspace: Tensor,
        most_keys: int,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See LatentDecodeBackend.attend."""
        spec = layer.spec
        found = library.tokenspeed_mla_decode(
            query,
            layer.k_cache.squeeze(2),
            workspace,
            spec.v_head_dim,
            spec.head_dim - spec.v_head_dim,
            rows.page_tables[spec.group],
            rows.kv_lens,
            most_keys,
            spec.scale,
            return_lse=wants_lse,
        )
        if isinstance(found, Tensor):
            return found, None
        return found[0], found[1].flatten(0, 1) * math.log(2)
