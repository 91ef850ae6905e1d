"""BatchData: the numbers one batch of a case is made of, contiguous and in float64."""

from dataclasses import dataclass

from torch import Tensor

UNROUNDED = 1 + 2.0**-6  # less than half a step of e4m3: rounds back


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BatchData:
    """Queries, keys and values of a batch's requests; nothing mutates it.

    Every number is exact in the case's dtype; with an fp8 cache, keys and values are exactly
    stored_e4m3 * scale.  Keys and values are in the order of the slots: prefix, then the step.
    """

    queries: tuple[Tensor, ...]  # [num_reqs] [layers, extend, heads, head_dim]  float64
    keys: tuple[Tensor, ...]  # [num_reqs] [layers, kv_len, kv_heads, head_dim]  float64
    values: tuple[Tensor, ...]  # [num_reqs] [layers, kv_len, kv_heads, v_head_dim]  float64
    bait_keys: Tensor  # [layers, kv_heads, head_dim]  float64  a key every query prefers to all
    # it may see: what a dead slot holds that may not hold NaN
    bait_values: Tensor  # [layers, kv_heads, v_head_dim]  float64
    sinks: Tensor | None  # [layers, heads]  float64, exact in bfloat16
    k_scales: Tensor | None  # [layers]  float64, powers of two other than 1; with an fp8 cache
    v_scales: Tensor | None  # [layers]  float64, likewise, and other than k_scales
    scale: float  # multiplies q.k

    def rows(self, part: str, request: int) -> Tensor:
        """[layers, keys, heads, dim] what a part of the cache holds of a request's tokens."""
        return {"k": self.keys, "v": self.values}[part][request]

    def bait(self, part: str) -> Tensor:
        """[layers, kv_heads, dim]"""
        return {"k": self.bait_keys, "v": self.bait_values}[part]

    def computed(self, stored: Tensor) -> Tensor:
        """What a step computes where the cache shall hold `stored`; an fp8 cache rounds it."""
        return stored if self.k_scales is None else stored * UNROUNDED
