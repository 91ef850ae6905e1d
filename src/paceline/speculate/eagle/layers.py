"""What an EAGLE head has that ordinary decoders lack: its first layer, and the fusion of taps."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, whole
from paceline.kernels.eagle_input import HalfNorms, eagle_input
from paceline.kernels.rms_norm import rms_norm
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import HiddenStream
from paceline.layers.linear import Linear
from paceline.layers.mixers.self_attention import SelfAttention
from paceline.layers.moe import feed_forward
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, wholly
from paceline.models.tensor_names import name_attention, name_feed_forward, name_linear
from paceline.speculate.eagle.config import EagleConfig


class Fusion(nn.Module):
    """EAGLE-3's fc over the target's taps side by side, low layers first."""

    def __init__(self, config: EagleConfig, *, placement: Placement) -> None:
        super().__init__()
        eps = config.layer.rms_norm_eps
        self.width = config.target_hidden_size
        norms = config.num_taps if config.fc_norm else 0
        self.norms = tuple(RMSNorm(self.width, eps, placement=placement) for _ in range(norms))
        self.owned = nn.ModuleList(self.norms)
        self.fc = Linear(
            whole(config.tap_width),
            whole(config.hidden_size),
            bias=config.fc_bias,
            placement=placement,
        )

    def forward(self, taps: Sequence[Tensor]) -> Tensor:
        """taps: [num_taps] of [tokens, target hidden] -> [tokens, hidden]."""
        if not self.norms:
            wide = torch.cat(tuple(taps), dim=-1)
        else:
            wide = taps[0].new_empty(taps[0].shape[0], len(taps) * self.width)
            parts = torch.chunk(wide, len(taps), dim=1)
            for tap, norm, part in zip(taps, self.norms, parts, strict=True):
                rms_norm(tap, norm.weight, norm.eps, out=part)
        fused: Tensor = self.fc(wide)
        return fused

    def destinations(self) -> Named:
        """What a checkpoint fills."""
        named = name_linear(self.fc, "fc")
        for index, norm in enumerate(self.norms):
            named[f"fc_norm.{index}.weight"] = wholly(norm.weight)
        return named


class Eagle1Layer(nn.Module):
    """x = fc([embedding, feature]); x += attention(x); x += mlp(norm(x)): no norm before attention.

    Li et al. 2024, arXiv:2401.15077, section 4.1.
    """

    def __init__(
        self,
        config: EagleConfig,
        attention: SelfAttention,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        layer = config.layer
        self.attention = attention
        self.fc = Linear(
            whole(2 * layer.hidden_size),
            whole(layer.hidden_size),
            bias=config.fc_bias,
            placement=placement,
        )
        self.mlp_norm = RMSNorm(layer.hidden_size, layer.rms_norm_eps, placement=placement)
        self.mlp = feed_forward(layer, attention.layer_id, parallel=parallel, placement=placement)

    def forward(
        self,
        input_ids: Tensor,
        table: Tensor,
        features: Tensor,
        positions: Tensor,
        ctx: StepContext,
        rows: Tensor | None,
    ) -> HiddenStream:
        """input_ids, positions [tokens] int64, table [vocab, hidden], features [tokens, hidden];
        mutates none of them.  rows: as of `DecoderLayer.forward`."""
        both = (F.embedding(input_ids, table), features)
        residual = self.fc(torch.cat(both, dim=-1))
        mixed = HiddenStream(self.attention(residual, positions, ctx), residual).only(rows)
        return mixed._replace(delta=self.mlp(self.mlp_norm.add(*mixed)))

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named = name_linear(self.fc, "fc")
        named |= name_attention(self.attention, f"{prefix}.self_attn")
        named |= name_feed_forward(self.mlp, f"{prefix}.mlp")
        named[f"{prefix}.post_attention_layernorm.weight"] = wholly(self.mlp_norm.weight)
        return named


class Eagle3Layer(nn.Module):
    """x = feature + attention([norm(embedding), norm(feature)]); x += mlp(norm(x)).

    The attention's projections take both halves (released weights of Li et al. 2025,
    arXiv:2503.01840, whose figure draws a product in between).
    """

    def __init__(
        self,
        config: EagleConfig,
        attention: SelfAttention,
        *,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        layer = config.layer

        def norm() -> RMSNorm:
            return RMSNorm(layer.hidden_size, layer.rms_norm_eps, placement=placement)

        self.norm_before_residual = config.norm_before_residual
        self.attention = attention
        self.embedding_norm, self.feature_norm, self.mlp_norm = norm(), norm(), norm()
        self.mlp = feed_forward(layer, attention.layer_id, parallel=parallel, placement=placement)

    def forward(
        self,
        input_ids: Tensor,
        table: Tensor,
        features: Tensor,
        positions: Tensor,
        ctx: StepContext,
        rows: Tensor | None,
    ) -> HiddenStream:
        """input_ids, positions [tokens] int64, table [vocab, hidden], features [tokens, hidden];
        mutates none of them.  rows: as of `DecoderLayer.forward`."""
        eps = self.embedding_norm.eps
        norms = HalfNorms(self.embedding_norm.weight, self.feature_norm.weight, eps)
        wide = eagle_input(input_ids, table, features, norms)
        residual = self.attention(wide, positions, ctx)
        if self.norm_before_residual:
            features = torch.chunk(wide, 2, dim=1)[1]
        mixed = HiddenStream(features, residual).only(rows)
        # The sum goes to the attention's output, which is ours: the caller's features stay.
        return mixed._replace(delta=self.mlp(self.mlp_norm.add(*mixed)))

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named = name_attention(self.attention, f"{prefix}.self_attn")
        named |= name_feed_forward(self.mlp, f"{prefix}.mlp")
        named[f"{prefix}.input_layernorm.weight"] = wholly(self.embedding_norm.weight)
        named[f"{prefix}.hidden_norm.weight"] = wholly(self.feature_norm.weight)
        named[f"{prefix}.post_attention_layernorm.weight"] = wholly(self.mlp_norm.weight)
        return named


def head_attention(
    config: EagleConfig,
    layer_id: int,
    *,
    cos_sin: Tensor | None,
    qk_norm: bool,
    parallel: Parallel,
    placement: Placement,
) -> SelfAttention:
    """The attention of one layer of a head; EAGLE-3's first takes embedding and feature."""
    layer: ModelConfig = config.layer
    heads = layer.layers[layer_id].heads
    is_wide = config.version == 3 and layer_id == 0

    def norm() -> RMSNorm:
        return RMSNorm(heads.head_dim, layer.rms_norm_eps, placement=placement)

    return SelfAttention(
        layer,
        layer_id,
        cos_sin=cos_sin,
        qk_norms=(norm(), norm()) if qk_norm else None,
        parallel=parallel,
        placement=placement,
        in_features=2 * layer.hidden_size if is_wide else None,
    )
