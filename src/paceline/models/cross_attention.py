"""Cross attention: queries of tokens, keys and values of the rows of an encoder."""

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import whole
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import Named, wholly


class CrossAttention(nn.Module):
    """One layer's.  Steps project queries alone: keys and values are made once for a request."""

    def __init__(
        self, config: ModelConfig, layer_id: int, *, has_norms: bool, placement: Placement
    ) -> None:
        """has_norms: of each head of queries and keys.  Rows are as wide as hidden states; keys
        have no bias where others have one."""
        super().__init__()
        heads, hidden = config.layers[layer_id].heads, config.hidden_size
        dim, bias = heads.head_dim, config.attention_bias
        queries, keys = whole(heads.num_heads * dim), whole(heads.num_kv_heads * dim)
        self.layer_id = layer_id
        self.head_dim = dim
        self.q = Linear(whole(hidden), queries, bias=bias, placement=placement)
        self.k = Linear(whole(hidden), keys, bias=False, placement=placement)
        self.v = Linear(whole(hidden), keys, bias=bias, placement=placement)
        self.out = Linear(
            queries, whole(hidden), bias=config.attention_out_bias, placement=placement
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if has_norms:
            self.q_norm = RMSNorm(dim, config.rms_norm_eps, placement=placement)
            self.k_norm = RMSNorm(dim, config.rms_norm_eps, placement=placement)

    def forward(self, x: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden] -> [tokens, hidden], 0 for tokens of requests without rows."""
        q = self.q(x).unflatten(1, (-1, self.head_dim))
        if self.q_norm is not None:
            q = self.q_norm(q)
        return ctx.of_readers(self.out(ctx.attend_encoder(self.layer_id, q).flatten(1)))

    def keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """rows [encoder_len, hidden] -> each [encoder_len, num_kv_heads, head_dim]."""
        k, v = (each(rows).unflatten(1, (-1, self.head_dim)) for each in (self.k, self.v))
        return k if self.k_norm is None else self.k_norm(k), v

    def fill(self, prefix: str, *, out: str) -> Named:
        """What a checkpoint fills.  out: what it calls the output projection."""
        named = {
            **self.q.held.fill(f"{prefix}.q_proj"),
            **self.k.held.fill(f"{prefix}.k_proj"),
            **self.v.held.fill(f"{prefix}.v_proj"),
            **self.out.held.fill(f"{prefix}.{out}"),
        }
        for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm)):
            if norm is not None:
                named[f"{prefix}.{name}.weight"] = wholly(norm.weight)
        return named
