"""The `fa3` backend: FlashAttention 3, where a build of its `hopper` folder can be imported.

Of latents (V in K) its kernels take the columns that both have as a second query and as V, and as
Q and K the columns behind them: q.k + qv.v is the score.
"""

import importlib
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
from paceline.core.errors import ConfigError
from paceline.core.modes import MaskKind
from paceline.core.plugins import can_find

MODULES = (  # in this order
    "flash_attn_interface",
    "flash_attn_3.flash_attn_interface",
    "sgl_kernel.flash_attn",  # of the package sglang-kernel
)


class FlashAttention3Library(Protocol):
    """The one function of the library that we call."""

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        qv: Tensor | None,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        return_softmax_lse: bool,
    ) -> Tensor | tuple[Tensor, ...]:
        """See `flash_attn_interface`; out, or (out, lse, ...) with return_softmax_lse."""


@dataclass(frozen=True)
class FlashAttention3Backend(FlashAttentionBackend[FlashAttention3Library]):
    """Causal attention over paged keys, and the prefix alone with lse."""

    name = "fa3"
    capabilities = Capabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(9, 0),
        max_cuda_arch=(9, 9),
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=frozenset({64, 80, 96, 128, 256}),
        v_head_dim_differs=False,
        masks=frozenset({MaskKind.CAUSAL}),
        window=True,
        soft_cap=True,
        sinks=False,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=True,
        chunks=ChunkSupport.WHOLE_PAGES,
        latent_dims=frozenset({(512, 64)}),
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether a build can be found."""
        reasons = super().unsupported_reasons(config)
        if any(heads.v_in_k for heads in config.heads):
            for wanted, name in ((config.window, "sliding window"), (config.soft_cap, "soft cap")):
                if wanted:
                    reasons.append(f"{name} must be absent with latents, got present")
        return reasons + absence()

    def import_library(self) -> FlashAttention3Library:
        """The first of MODULES that imports.  Raises ConfigError with what each said."""
        failures = []
        for name in MODULES:
            try:
                return cast(FlashAttention3Library, importlib.import_module(name))
            except ImportError as error:
                failures.append(f"{name}: {error}")
        raise ConfigError.about(
            "attention backend fa3",
            expected=f"an importable {' or '.join(MODULES)}",
            got="; ".join(failures),
            remedy="pip install 'paceline[fa3]', or choose another --attention-backend",
        )

    def attend(
        self, library: FlashAttention3Library, q: Tensor, layer: LayerCache, *, rows: VisibleKeys
    ) -> tuple[Tensor, Tensor | None]:
        """See FlashAttentionBackend.attend."""
        spec, k_cache, qv = layer.spec, layer.k_cache, None
        if spec.v_in_k:
            rank = spec.v_head_dim
            q, qv, k_cache = q[..., rank:], q[..., :rank], k_cache[..., rank:]
        result = library.flash_attn_with_kvcache(
            q,
            k_cache,
            layer.v_cache,
            qv=qv,
            cache_seqlens=rows.keys_used,
            page_table=rows.page_table,
            cu_seqlens_q=rows.cu_seqlens_q,
            max_seqlen_q=rows.max_extend_len,
            softmax_scale=spec.scale,
            causal=rows.is_causal,
            window_size=(-1, -1) if rows.window is None else rows.window,
            softcap=spec.soft_cap or 0.0,
            return_softmax_lse=rows.wants_lse,
        )
        if isinstance(result, Tensor):
            return result, None
        return result[0], result[1]


def absence() -> list[str]:
    """On a machine with a GPU, why no build can be found; nothing is imported."""
    if not torch.cuda.is_available() or any(map(can_find, MODULES)):
        return []
    return [f"one of {', '.join(MODULES)} must be importable, got none of them"]
