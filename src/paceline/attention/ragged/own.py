"""The `own` ragged backend: our kernel, and on a CPU its definition."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedCapabilities,
    RaggedLimits,
    RaggedPart,
)
from paceline.kernels.ragged_attention import SharedColumns, ragged_attention


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnPlan:
    """What one launch is told of a part."""

    part: RaggedPart
    scale: float  # multiplies q.k


class OwnRagged(RaggedBackend[RaggedLimits, OwnPlan]):
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

    def make_buffers(self, limits: RaggedLimits) -> RaggedLimits:
        """No tensor is needed."""
        return limits

    def plan(self, part: RaggedPart, buffers: RaggedLimits) -> OwnPlan:
        """The part as it is: lengths are read on the device."""
        return OwnPlan(part=part, scale=buffers.scale)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: OwnPlan,
        *,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See RaggedBackend.attend."""
        return ragged_attention(
            q,
            k,
            v,
            plan.part.cu_q,
            plan.part.cu_k,
            causal=plan.part.causal,
            scale=plan.scale,
            shared=shared,
            out_dtype=out_dtype,
        )


OWN = OwnRagged()
