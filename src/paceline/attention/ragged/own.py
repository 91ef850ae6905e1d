"""The `own` ragged backend: our kernel, and on a CPU its definition."""

import torch
from torch import Tensor

from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedCapabilities,
    RaggedLimits,
    RaggedPart,
)
from paceline.kernels.ragged_attention import SharedColumns, ragged_attention


class OwnRagged(RaggedBackend[None, RaggedPart]):
    """Any heads, what they share of a key as it is, and parts in float32 until they are one."""

    name = "own"
    capabilities = RaggedCapabilities(
        device_types=frozenset({"cpu", "cuda"}),
        min_cuda_arch=None,
        max_cuda_arch=None,
        dtypes=None,
        head_dims=None,
        shared_columns=True,
    )

    def make_buffers(self, limits: RaggedLimits) -> None:
        """None are needed."""

    def plan(self, part: RaggedPart, buffers: None) -> RaggedPart:
        """The part as it is: lengths are read on the device."""
        return part

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: RaggedPart,
        *,
        scale: float,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See RaggedBackend.attend."""
        return ragged_attention(
            q,
            k,
            v,
            plan.cu_q,
            plan.cu_k,
            causal=plan.causal,
            scale=scale,
            shared=shared,
            out_dtype=out_dtype,
        )


OWN = OwnRagged()
