"""The backends `trtllm_mla` and `cutedsl_mla`: FlashInfer's kernels for latents on Blackwell GPUs.

One function of the library has both, by name: TensorRT-LLM's, which take a few queries of every
request, and those in the CuTe DSL, which take one.

Read in FlashInfer's main of August 2026, `flashinfer/mla`.
"""

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from paceline.attention.contract import LayerCache, Limits
from paceline.attention.latent_decode import LatentDecodeBackend, latent_capabilities
from paceline.attention.layouts.query_rows import QueryRows
from paceline.kernels.stand_in import multiprocessors

NOPE_DIM = 128  # of heads before absorption: the library checks it, and no kernel reads it
WORKSPACE_PER_SM = 1 << 20  # bytes


class TrtllmMLALibrary(Protocol):
    """The one function of the library that we call."""

    def trtllm_batch_decode_with_kv_cache_mla(
        self,
        query: Tensor,
        kv_cache: Tensor,
        workspace_buffer: Tensor,
        qk_nope_head_dim: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        block_tables: Tensor,
        seq_lens: Tensor,
        max_seq_len: int,
        *,
        bmm1_scale: float,
        backend: str,
        return_lse: bool,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out [rows, queries, heads, kv_lora_rank]; with return_lse also [rows * queries, heads]
        float32, in base 2 of the kernels of TensorRT-LLM, and natural of the others."""


@dataclass(frozen=True)
class TrtllmMLABackend(LatentDecodeBackend[TrtllmMLALibrary]):
    """Causal attention over latents in pages of 32 or 64, and the prefix alone with lse."""

    name = "trtllm_mla"
    capabilities = latent_capabilities(
        max_arch=(10, 3),
        dtypes={torch.bfloat16},  # of what the library writes, whatever it reads
        page_sizes={32, 64},
        latent_dims={(512, 64), (256, 64), (512, 0)},
        returns_lse=True,
    )
    module = "flashinfer.mla"
    package = "flashinfer-python"
    most_queries = 64
    kernel: ClassVar[str] = "trtllm-gen"
    lse_unit: ClassVar[float] = math.log(2)  # of what the kernel returns

    def workspace_bytes(self, limits: Limits) -> int:
        """As much as others give it: 148 MiB of a B200."""
        return multiprocessors(limits.device) * WORKSPACE_PER_SM

    def attend(
        self,
        library: TrtllmMLALibrary,
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
        found = library.trtllm_batch_decode_with_kv_cache_mla(
            query,
            layer.k_cache.squeeze(2),
            workspace,
            NOPE_DIM,
            spec.v_head_dim,
            spec.head_dim - spec.v_head_dim,
            rows.page_tables[spec.group],
            rows.kv_lens,
            most_keys,
            bmm1_scale=spec.scale,
            backend=self.kernel,
            return_lse=wants_lse,
        )
        if isinstance(found, Tensor):
            return found, None
        return found[0], found[1] * self.lse_unit


@dataclass(frozen=True)
class CuteDslMLABackend(TrtllmMLABackend):
    """The same by kernels in the CuTe DSL, which are for decoding: one query of a row."""

    name = "cutedsl_mla"
    capabilities = latent_capabilities(
        max_arch=(10, 0),
        dtypes={torch.bfloat16},
        page_sizes={32, 64},
        latent_dims={(512, 64)},
        returns_lse=True,
    )
    most_queries = 1
    kernel = "cute-dsl"
    lse_unit = 1.0
