"""The `fa4` backend: FlashAttention 4 (package flash-attn-4, kernels in the CuTe DSL).

Read in its 4.0.0b15: flash_attn.cute.interface, flash_fwd_sm90, paged_kv.  Kernels are compiled on
the first call of a variant (seconds), which is an eager one: graphs are captured after it.
"""

import os
from dataclasses import dataclass
from typing import Protocol, cast

import torch
from torch import Tensor

from paceline.attention.contract import (
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    LayerCache,
)
from paceline.attention.flash_attention import FlashAttentionBackend, VisibleKeys
from paceline.core.modes import MaskKind
from paceline.core.plugins import import_modules, installed_version

PACKAGE = "flash-attn-4"
MODULE = "flash_attn.cute.interface"
LAST_ARCH = (11, 9)  # its kernels of 12.x take no page table
# The keys of a tile depend on the head dim.  A page that is not one tile is read through a page
# list of 128 entries per tile (PagedKVManager): right for tiles of 128 keys alone.
HEAD_DIMS = frozenset({64, 80, 96, 128})
HEAD_DIMS_WITH_LSE = frozenset({64, 128})  # of 80 and 96, non-causal tiles on 9.x have 144 keys


class FlashAttention4Library(Protocol):
    """The one function of the library that we call."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        seqused_k: Tensor,
        page_table: Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int | None, int | None],
        learnable_sink: Tensor | None,
        softcap: float,
        return_lse: bool,
    ) -> tuple[Tensor, Tensor | None]:
        """See `flash_attn.cute.interface`."""


@dataclass(frozen=True)
class FlashAttention4Backend(FlashAttentionBackend[FlashAttention4Library]):
    """Causal attention over paged keys, and the prefix alone with lse."""

    name = "fa4"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(9, 0),  # its kernels of 8.x take no page table
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=HEAD_DIMS,
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        chunks=ChunkSupport.WHOLE_PAGES,
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, what holds for some architectures alone, and whether it is installed."""
        reasons = super().unsupported_reasons(config)
        arch = config.cuda_arch or (0, 0)
        if arch > LAST_ARCH:
            reasons.append(f"CUDA arch must be at most {LAST_ARCH} for paged keys, got {arch}")
        refused = HEAD_DIMS - HEAD_DIMS_WITH_LSE if config.needs_lse and arch[0] == 9 else ()
        for dim in sorted({heads.head_dim for heads in config.heads} & {*refused}):
            dims = sorted(HEAD_DIMS_WITH_LSE)
            reasons.append(
                f"head dim must be {dims} with log-sum-exp on CUDA arch 9, got {dim}: "
                "a non-causal tile of 144 keys outgrows the library's page list of 128"
            )
        return reasons + absence()

    def import_library(self) -> FlashAttention4Library:
        """`flash_attn.cute.interface`, told to keep what it compiles, unless the user said not to.

        Raises ConfigError where it cannot be imported.
        """
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        (library,) = import_modules(
            "attention backend fa4",
            MODULE,
            remedy="pip install 'paceline[fa4]', or choose another --attention-backend",
        )
        return cast(FlashAttention4Library, library)

    def attend(
        self, library: FlashAttention4Library, q: Tensor, layer: LayerCache, *, rows: VisibleKeys
    ) -> tuple[Tensor, Tensor | None]:
        """See FlashAttentionBackend.attend.  The library takes sinks as bfloat16."""
        spec, sinks = layer.spec, layer.sinks if rows.is_causal else None
        return library.flash_attn_varlen_func(
            q,
            layer.k_cache,
            layer.v_cache,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_extend_len,
            seqused_k=rows.keys_used,
            page_table=rows.page_table,
            softmax_scale=spec.scale,
            causal=rows.is_causal,
            window_size=(None, None) if rows.window is None else rows.window,
            learnable_sink=None if sinks is None else sinks.to(torch.bfloat16),
            softcap=spec.soft_cap or 0.0,
            return_lse=rows.wants_lse,
        )


def absence() -> list[str]:
    """On a machine with a GPU, why the package's metadata is not here; nothing is imported."""
    # Planning for another machine, what is installed here says nothing.
    if not torch.cuda.is_available() or installed_version(PACKAGE) is not None:
        return []
    return [f"{PACKAGE} must be installed, got no such package"]
