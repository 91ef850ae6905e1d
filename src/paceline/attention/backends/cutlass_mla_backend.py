"""The `cutlass_mla` backend: a CUTLASS kernel for latents on GPUs of CUDA arch 10.0.

It takes one query of a row, pages of 128, and returns no log-sum-exp.  So every token is a row, of
chains too, and trees, which are merged from parts, are refused.

Read in sgl-kernel's `attention.py` of mid 2026 (package sglang-kernel).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from paceline.attention.contract import AttentionConfig, LayerCache, Limits
from paceline.attention.latent_decode import LatentDecodeBackend, latent_capabilities
from paceline.attention.layouts.query_rows import QueryRows

MOST_HEADS = 128  # that the library pads to
ROWS_AT_ONCE = 1024  # of one call, which adds up in float32 for each


class CutlassMLALibrary(Protocol):
    """The two functions of the library that we call."""

    def cutlass_mla_decode(
        self,
        q_nope: Tensor,
        q_pe: Tensor,
        kv_c_and_k_pe_cache: Tensor,
        seq_lens: Tensor,
        page_table: Tensor,
        workspace: Tensor,
        sm_scale: float,
    ) -> Tensor:
        """out [rows, heads, 512]."""

    def cutlass_mla_get_workspace_size(self, max_seq_len: int, num_batches: int) -> int:
        """Bytes that a call of so many rows needs."""


@dataclass(frozen=True)
class CutlassMLABackend(LatentDecodeBackend[CutlassMLALibrary]):
    """Causal attention over latents in pages of 128."""

    name = "cutlass_mla"
    capabilities = latent_capabilities(
        max_arch=(10, 0),
        dtypes={torch.bfloat16, torch.float16},
        page_sizes={128},
        latent_dims={(512, 64)},
        returns_lse=False,
    )
    module = "sgl_kernel"
    package = "sglang-kernel"
    most_queries = 1

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Those of all such backends, and heads."""
        reasons = super().unsupported_reasons(config)
        most = max((heads.num_heads for heads in config.heads), default=0)
        if most > MOST_HEADS:
            reasons.append(f"heads must be at most {MOST_HEADS}, got {most}")
        return reasons

    def workspace_bytes(self, limits: Limits) -> int:
        """A float32 sum of each row and padded head, with its log-sum-exp."""
        rank = max(spec.v_head_dim for spec in limits.layers)
        return _most_rows(limits) * MOST_HEADS * (rank + 1) * 4

    def needed_bytes(self, library: CutlassMLALibrary, limits: Limits) -> int:
        """Of the largest call, by the library."""
        length = max(limits.max_pages) * limits.page_size
        return library.cutlass_mla_get_workspace_size(length, _most_rows(limits))

    def attend(
        self,
        library: CutlassMLALibrary,
        query: Tensor,
        layer: LayerCache,
        *,
        rows: QueryRows,
        workspace: Tensor,
        most_keys: int,
        wants_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See LatentDecodeBackend.attend; never asked for lse."""
        spec, outs = layer.spec, []
        for start in range(0, len(query), ROWS_AT_ONCE):
            cut = slice(start, start + ROWS_AT_ONCE)
            out = library.cutlass_mla_decode(
                query[cut, 0, :, : spec.v_head_dim],
                query[cut, 0, :, spec.v_head_dim :],
                layer.k_cache.squeeze(2),
                rows.kv_lens[cut],
                rows.page_tables[spec.group][cut],
                workspace,
                spec.scale,
            )
            outs.append(out)
        whole = outs[0] if len(outs) == 1 else torch.cat(outs)
        return whole.unsqueeze(1), None


def _most_rows(limits: Limits) -> int:
    return min(ROWS_AT_ONCE, limits.max_tokens)
