"""Multi-head latent attention, absorbed: heads attend to one cached row per token.

DeepSeek-V2 (arXiv:2405.04434), equations 9 to 19.  With a token's latent c [rank] and its turned
key k_r [rope_dim], head h has the key [W_UK_h c, k_r] and the value W_UV_h c.  Since q . (W_UK_h c)
is (W_UK_h^T q) . c, W_UK goes to the query and W_UV behind attention: the cache holds [c, k_r]
alone, and attention has one KV head of rank + rope_dim, whose first rank columns are its V.
"""

from torch import Tensor, nn

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.rope import Rope
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.parameter import Placement
from paceline.layers.rank_sum import summed
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weight_format import hold

LATENT_EPS = 1e-6  # of the norms of latents, whatever rms_norm_eps is


class LatentAttention(nn.Module):
    """One layer.  What turns is laid out as halves in queries and cache, however it is stored."""

    sinks = None

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        cos_sin: Tensor,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        assert config.latent is not None, "a model without latents"
        self.layer_id = layer_id
        self.latent = latent = config.latent
        heads = parallel.share(config.layers[layer_id].heads.num_heads, "num_heads")
        self.heads = heads.size  # latents are of all heads, and on every rank
        hidden = whole(config.hidden_size)

        def linear(inputs: Span, outputs: Span, *, bias: bool = False) -> Linear:
            return Linear(inputs, outputs, bias=bias, placement=placement)

        self.q_a: Linear | None = None
        self.q_norm: RMSNorm | None = None
        if latent.q_rank is not None:
            self.q_a = linear(hidden, whole(latent.q_rank), bias=config.attention_bias)
            self.q_norm = RMSNorm(latent.q_rank, LATENT_EPS, placement=placement)
        q_inputs = hidden if latent.q_rank is None else whole(latent.q_rank)
        self.q = linear(q_inputs, heads.times(latent.nope_dim + latent.rope_dim))
        row = whole(latent.rank + latent.rope_dim)
        self.kv_a = linear(hidden, row, bias=config.attention_bias)
        self.kv_norm = RMSNorm(latent.rank, LATENT_EPS, placement=placement)
        format_ = placement.formats.latent  # of W_UK and W_UV
        weight = format_.allocate(
            heads, latent.nope_dim, latent.v_dim, latent.rank, placement=placement
        )
        self.held = hold(self, format_, weight)
        out = linear(heads.times(latent.v_dim), hidden, bias=config.attention_out_bias)
        self.out = summed(out, parallel, placement)
        self.cos_sin = cos_sin  # [max_positions, rope_dim]  float32, shared by layers

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """x [tokens, hidden], positions [tokens] int64 -> [tokens, hidden]."""
        rope = Rope(self.cos_sin, positions, self.latent.rank)
        out = ctx.attend(self.layer_id, self._queries(x), self._rows(x), None, rope=rope)
        values = self.held.format.apply_values(out.transpose(0, 1), self.held.weight)
        result: Tensor = self.out(values.transpose(0, 1).flatten(1))
        return result

    def _queries(self, x: Tensor) -> Tensor:
        """[tokens, heads, rank + rope_dim]"""
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(self.q_a(x))
        latent = self.latent
        q: Tensor = self.q(x).view(x.shape[0], self.heads, -1)
        nope, turning = q.split((latent.nope_dim, latent.rope_dim), dim=2)
        made = q.new_empty(*q.shape[:2], latent.rank + latent.rope_dim)
        absorbed = self.held.format.apply_keys(nope.transpose(0, 1), self.held.weight)
        made[..., : latent.rank].copy_(absorbed.transpose(0, 1))
        self._lay_out(turning, made)
        return made

    def _rows(self, x: Tensor) -> Tensor:
        """[tokens, 1, rank + rope_dim] what is cached, not turned yet"""
        latent = self.latent
        row: Tensor = self.kv_a(x)
        made = row.new_empty(row.shape[0], 1, row.shape[1])
        compressed, turning = row.split((latent.rank, latent.rope_dim), dim=1)
        self.kv_norm.in_place_(compressed)
        made[:, 0, : latent.rank].copy_(compressed)
        self._lay_out(turning.unsqueeze(1), made)
        return made

    def _lay_out(self, turning: Tensor, made: Tensor) -> None:
        """Put turning [tokens, heads, rope_dim] behind the latents of made: of pairs the first
        numbers, then the second."""
        out, half = made[..., self.latent.rank :], self.latent.rope_dim // 2
        if self.latent.pairs:
            out = out.unflatten(2, (2, half))
            turning = turning.unflatten(2, (half, 2)).transpose(2, 3)
        out.copy_(turning)
