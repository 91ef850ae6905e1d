"""Granite (model_type granite): Llama with multipliers on embeddings, on what each block adds, on
attention scores and on logits."""

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import AttentionContext
from paceline.layers.parameter import Placement
from paceline.layers.prenorm_layer import PreNormLayer
from paceline.layers.self_attention import SelfAttention
from paceline.models.causal_lm import CausalLM
from paceline.models.prenorm import build_prenorm


class ScaledLayer(PreNormLayer):
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x))."""

    def __init__(
        self,
        config: ModelConfig,
        attention: SelfAttention,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__(config, attention, parallel=parallel, placement=placement)
        assert config.multipliers is not None, "every granite has multipliers"
        self.scale = config.multipliers.residual

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, ctx: AttentionContext
    ) -> Tensor:
        """delta, residual [tokens, hidden] -> the scaled MLP output; residual += delta + scaled
        attention."""
        norm = self.input_norm
        x = norm(residual) if delta is None else norm.add(delta, residual)
        x = self.attention(x, positions, ctx).mul_(self.scale)
        return self.mlp(self.mlp_norm.add(x, residual)).mul_(self.scale)


def build(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; arguments as of `build_prenorm`."""
    assert config.multipliers is not None, "every granite has multipliers"
    return build_prenorm(
        config,
        parallel=parallel,
        device=device,
        dtype=dtype,
        max_positions=max_positions,
        layer=ScaledLayer,
        embedding_scale=config.multipliers.embedding,
    )
