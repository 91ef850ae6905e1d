"""Multi-head latent attention: heads attend to one cached row per token, absorbed or expanded.

DeepSeek-V2 (arXiv:2405.04434), equations 9 to 19.  With a token's latent c [rank] and its turned
key k_r [rope_dim], head h has the key [W_UK_h c, k_r] and the value W_UV_h c.  Since q . (W_UK_h c)
is (W_UK_h^T q) . c, W_UK goes to the query and W_UV behind attention: the cache holds [c, k_r]
alone, and attention has one KV head of rank + rope_dim, whose first rank columns are its V.

So absorbed, a query and a key take 2 rank + rope_dim products in every head; expanded, with the
head's own key and value, nope_dim + rope_dim + v_dim, but each key must be expanded first.  Tokens
of long prompts are expanded, where the step says so (`StepContext.expanded`).
"""

from functools import partial

import torch
from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.latent_rows import LatentNorm
from paceline.kernels.rope import Rope
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.rank_sum import Unsummed, summed
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import hold

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

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor | Unsummed:
        """x [tokens, hidden], positions [tokens] int64 -> [tokens, hidden]."""
        row: Tensor = self.kv_a(x)  # before the queries, whose weight is read meanwhile
        if self.q_a is not None and self.q_norm is not None:
            x = self.q_norm(self.q_a(x))
        q: Tensor = self.q(x).view(x.shape[0], self.heads, -1)
        if ctx.expanded is None:
            values = self._absorbed(q, row, positions, ctx)
        else:
            first = ctx.expanded.first_token
            values = self._expanded(q[first:], row[first:], positions[first:], ctx)
            if first:
                before = self._absorbed(q[:first], row[:first], positions[:first], ctx)
                values = torch.cat((before, values))
        result: Tensor | Unsummed = self.out(values.flatten(1))
        return result

    def _absorbed(self, q: Tensor, row: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """q [tokens, heads, nope_dim + rope_dim], row [tokens, rank + rope_dim], positions
        [tokens], of the step's first tokens -> [tokens, heads, v_dim]."""
        latent, format_ = self.latent, self.held.format
        nope, turning = q.split((latent.nope_dim, latent.rope_dim), dim=2)
        queries = q.new_empty(*q.shape[:2], latent.rank + latent.rope_dim)
        attended = ctx.attend_latents(
            self.layer_id,
            queries,
            turning,
            row,
            norm=self._norm,
            rope=Rope(self.cos_sin, positions),
            pairs=latent.pairs,
            absorb=partial(format_.apply_keys, nope, self.held.weight),
        )
        values = q.new_empty(*q.shape[:2], latent.v_dim)
        format_.apply_values(attended, self.held.weight, values)
        return values

    def _expanded(self, q: Tensor, row: Tensor, positions: Tensor, ctx: StepContext) -> Tensor:
        """As `_absorbed`, of the step's last tokens."""
        latent = self.latent
        nope, turning = q.split((latent.nope_dim, latent.rope_dim), dim=2)
        return ctx.attend_expanded(
            self.layer_id,
            nope,
            turning,
            row,
            norm=self._norm,
            rope=Rope(self.cos_sin, positions),
            pairs=latent.pairs,
            expand=partial(self.held.format.expand, weight=self.held.weight),
        )

    @property
    def _norm(self) -> LatentNorm:
        return LatentNorm(self.kv_norm.weight, self.kv_norm.eps)
