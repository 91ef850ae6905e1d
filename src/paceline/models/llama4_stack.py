"""Llama 4's decoder: a pre-norm one whose attention has norms without weights and queries that grow
(model_type llama4_text)."""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.core.model.config import ModelConfig, QKNorm, QueryGrowth
from paceline.core.parallel import Parallel
from paceline.kernels.rope_write_kv import HeadNorms
from paceline.layers.attention import StepContext
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.prenorm import build_prenorm


class Llama4Attention(SelfAttention):
    """One layer.  Where it has rope, dimensions that turn against each other are stored as
    neighbours, and Q and K may have norms without weights: theirs stand behind the rotation, which
    leaves a row's length as it is, so that ours may stand before it.  Where it has none, queries
    may grow with their position."""

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        cos_sin: Tensor | None,
        growth: Tensor | None,
        parallel: Parallel,
        placement: Placement,
        qk_norms: None,
    ) -> None:
        """growth: [max_positions] float32, of all layers; None: queries do not grow."""
        super().__init__(
            config,
            layer_id,
            cos_sin=cos_sin,
            qk_norms=qk_norms,
            parallel=parallel,
            placement=placement,
        )
        self.growth = growth if cos_sin is None else None
        self.unit: HeadNorms | None = None
        if cos_sin is not None and config.qk_norm is QKNorm.UNIT:
            ones = torch.ones(self.head_dim, dtype=placement.dtype, device=placement.device)
            self.unit = HeadNorms(ones, ones, config.rms_norm_eps, unit_offset=False)

    def project(self, x: Tensor) -> list[Tensor]:
        """As of `SelfAttention`, with neighbours of Q and K as halves: their products are the
        same."""
        q, k, v = self.qkv(x)
        return [q, k, v] if self.cos_sin is None else [_as_halves(q), _as_halves(k), v]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ctx: StepContext
    ) -> Tensor:
        """As of `SelfAttention`.  Mutates q."""
        if self.growth is not None:
            q.mul_(self.growth.index_select(0, positions).view(-1, 1, 1))
        return super().attend(q, k, v, positions, ctx)

    def head_norms(self) -> HeadNorms | None:
        """Norms that are left to where K and V are written."""
        return self.unit


def _as_halves(x: Tensor) -> Tensor:
    """x [tokens, heads, head_dim] -> the same with dimensions 0, 2, 4, ... 1, 3, 5, ..."""
    return x.view(*x.shape[:2], -1, 2).transpose(2, 3).flatten(2)


def growth_table(growth: QueryGrowth, rows: int, *, device: torch.device) -> Tensor:
    """[rows] float32, by position: what a query is multiplied with (Nakanishi 2025,
    arXiv:2501.19399, as Llama 4 has it)."""
    positions = torch.arange(1, rows + 1, dtype=torch.float32, device=device)
    return torch.log1p(torch.floor(positions / growth.every)) * growth.factor + 1.0


def build_llama4(
    config: ModelConfig, *, placement: Placement, max_positions: int | None = None, **where: Any
) -> CausalLM:
    """The model with uninitialised weights; as of `build_prenorm`."""
    rows = config.max_position if max_positions is None else max_positions
    growth = None
    if config.query_growth is not None:
        growth = growth_table(config.query_growth, rows, device=placement.device)
    return build_prenorm(
        config,
        placement=placement,
        max_positions=max_positions,
        attention=partial(Llama4Attention, growth=growth),
        **where,
    )
