"""Layers of encoders: attention in both directions, which caches nothing, and feed-forward."""

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, whole
from paceline.kernels.rope import Rope
from paceline.layers.attention import StepContext
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.linear import GateUpLinear, Linear, QKVLinear
from paceline.layers.weights.parameter import Placement


class EncoderAttention(nn.Module):
    """One layer's: every token of a request sees every other, or those of its window."""

    def __init__(
        self, config: ModelConfig, layer_id: int, *, cos_sin: Tensor | None, placement: Placement
    ) -> None:
        super().__init__()
        self.spec = config.layers[layer_id]
        heads, dim = self.spec.heads, self.spec.heads.head_dim
        self.qkv = QKVLinear(
            config.hidden_size,
            num_heads=heads.num_heads,
            num_kv_heads=heads.num_kv_heads,
            head_dim=dim,
            bias=config.attention_bias,
            parallel=ALONE,
            placement=placement,
        )
        self.out = Linear(
            whole(heads.num_heads * dim),
            whole(config.hidden_size),
            bias=config.attention_out_bias,
            placement=placement,
        )
        # [max_positions, head_dim]  float32, shared by layers; None: nothing is rotated
        self.cos_sin = cos_sin

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden], positions [tokens] int64 -> [tokens, hidden]."""
        q, k, v = self.qkv(x)
        rope = None if self.cos_sin is None else Rope(self.cos_sin, positions)
        out: Tensor = self.out(ctx.attend_whole(self.spec, q, k, v, rope=rope).flatten(1))
        return out


class PostNormEncoderLayer(nn.Module):
    """x = norm(x + attention(x)); x = norm(x + mlp(x)), as in BERT."""

    def __init__(self, config: ModelConfig, attention: EncoderAttention, placement: Placement):
        super().__init__()
        hidden, inter, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.attention = attention
        self.attention_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.up = Linear(whole(hidden), whole(inter), bias=True, placement=placement)
        self.down = Linear(whole(inter), whole(hidden), bias=True, placement=placement)
        self.output_norm = LayerNorm(hidden, eps, bias=True, placement=placement)
        self.activation = config.hidden_act

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden] -> a new tensor of the same shape."""
        x = self.attention_norm.of_sum(self.attention(x, positions, ctx), x)
        return self.output_norm.of_sum(self.down(self.up.then(x, self.activation)), x)


class PreNormEncoderLayer(nn.Module):
    """x += attention(norm(x)); x += mlp(norm(x)), gated, as in ModernBERT, whose first layer has no
    norm before its attention: the embedding's is there."""

    def __init__(
        self,
        config: ModelConfig,
        attention: EncoderAttention,
        placement: Placement,
        *,
        is_first: bool,
        norm_bias: bool,
    ) -> None:
        super().__init__()
        hidden, inter, eps = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        self.attention = attention
        self.attention_norm: LayerNorm | None = None
        if not is_first:
            self.attention_norm = LayerNorm(hidden, eps, bias=norm_bias, placement=placement)
        self.mlp_norm = LayerNorm(hidden, eps, bias=norm_bias, placement=placement)
        self.gate_up = GateUpLinear(
            hidden,
            whole(inter),
            activation=config.hidden_act,
            bias=config.mlp_bias,
            placement=placement,
        )
        self.down = Linear(whole(inter), whole(hidden), bias=config.mlp_bias, placement=placement)

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden] -> a new tensor of the same shape."""
        normed = x if self.attention_norm is None else self.attention_norm(x)
        x = self.attention(normed, positions, ctx).add_(x)
        out: Tensor = self.down(self.gate_up(self.mlp_norm(x))).add_(x)
        return out
