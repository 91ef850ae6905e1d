"""A decoder's self-attention block: fused QKV, optional per-head norms, rope, attention, output.

Norms and rope run where K and V are written to the pool: in `attention.StepContext`, which
then calls the backend.
"""

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import HeadNorms
from paceline.kernels.sigmoid_gate import sigmoid_gate
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear, QKVLinear
from paceline.layers.rank_sum import Unsummed, mean_squares, summed
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement, empty_parameter


class SelfAttention(nn.Module):
    """One layer.  `qk_norms` are the norms of Q and K, applied before rope to each head;
    `in_features` is the width of its input where that is not the hidden size."""

    query_rows = 1  # that are projected of each head: its query, and what a subclass adds

    def __init__(
        self,
        config: ModelConfig,
        layer_id: int,
        *,
        cos_sin: Tensor | None,
        qk_norms: tuple[RMSNorm, RMSNorm] | None,
        parallel: Parallel,
        placement: Placement,
        in_features: int | None = None,
    ) -> None:
        super().__init__()
        spec = config.layers[layer_id]
        heads, dim = spec.heads, spec.heads.head_dim
        assert heads.v_head_dim == dim, heads
        self.layer_id = layer_id
        self.spec = spec
        self.qkv = QKVLinear(
            config.hidden_size if in_features is None else in_features,
            num_heads=heads.num_heads * self.query_rows,
            num_kv_heads=heads.num_kv_heads,
            head_dim=dim,
            bias=config.attention_bias,
            parallel=parallel,
            placement=placement,
        )
        self.head_dim = dim
        self.heads = parallel.share(heads.num_heads, "num_heads")
        self.kv_heads = parallel.share_kv(heads.num_kv_heads, "num_kv_heads")
        self.exchange = placement.exchange
        out = Linear(
            self.heads.times(dim),
            whole(config.hidden_size),
            bias=config.attention_out_bias,
            placement=placement,
        )
        self.out = summed(out, parallel, placement)
        self.q_norm = qk_norms[0] if qk_norms else None
        self.k_norm = qk_norms[1] if qk_norms else None
        # [num_heads]  one more score per head
        self.sinks = empty_parameter(self.heads.size, placement=placement) if spec.sinks else None
        # [max_positions, rotary_dim]  float32, shared by layers; None: nothing is rotated
        self.cos_sin = cos_sin
        self.axis_columns = () if spec.rope is None else spec.rope.axis_columns

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor | Unsummed:
        """x [tokens, in_features], positions [tokens] or [axes, tokens] int64, of rope -> [tokens,
        hidden]."""
        q, k, v = self.project(x)
        out: Tensor | Unsummed = self.out(self.attend(q, k, v, positions, ctx).flatten(1))
        return out

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, ctx: StepContext
    ) -> Tensor:
        """q, k and v as of `project` -> [tokens, num_heads, head_dim]."""
        rope = None if self.cos_sin is None else Rope(self.cos_sin, positions, 0, self.axis_columns)
        norms = self.head_norms()
        if self.spec.reads_whole:
            return ctx.attend_whole(self.spec, q, k, v, rope=rope, norms=norms)
        return ctx.attend(self.layer_id, q, k, v, rope=rope, norms=norms)

    def norm_rows(self) -> tuple[Span, Span]:
        """Of the stored norms of Q and K, what is held: all, which is one head's."""
        return whole(self.head_dim), whole(self.head_dim)

    def project(self, x: Tensor) -> list[Tensor]:
        """x [tokens, in_features] -> q, k, v, each [tokens, its heads, head_dim]."""
        projected: list[Tensor] = self.qkv(x)
        return projected

    def head_norms(self) -> HeadNorms | None:
        """Norms that are left to where K and V are written."""
        if self.q_norm is None or self.k_norm is None:
            return None
        weights = self.q_norm.weight, self.k_norm.weight
        return HeadNorms(*weights, self.q_norm.eps, self.q_norm.unit_offset)


class GatedAttention(SelfAttention):
    """One layer whose heads weigh what they attended to by the sigmoid of a gate, of which each has
    a row behind its query's."""

    query_rows = 2

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor | Unsummed:
        """As of `SelfAttention`."""
        rows, k, v = self.project(x)
        q, gate = rows.unflatten(1, (-1, 2)).unbind(2)
        attended = self.attend(q, k, v, positions, ctx)
        out: Tensor | Unsummed = self.out(sigmoid_gate(attended, gate))
        return out


class RowNormedAttention(SelfAttention):
    """One layer whose norms of Q and K are each over all heads of a token.  Ranks, which hold some
    of them, add up their squares."""

    def project(self, x: Tensor) -> list[Tensor]:
        """As of `SelfAttention`, with q and k normalised."""
        q, k, v = self.qkv(x)
        assert self.q_norm is not None, "it has norms"
        assert self.k_norm is not None, "it has norms"
        rows = q.flatten(1), k.flatten(1)
        if self.exchange is None:
            self.q_norm.in_place_(rows[0])
            self.k_norm.in_place_(rows[1])
        else:
            of_q, of_k = mean_squares(rows, self.exchange)
            self.q_norm.part_in_place_(rows[0], of_q)
            self.k_norm.part_in_place_(rows[1], of_k)
        return [q, k, v]

    def head_norms(self) -> None:
        """None: `project` has applied them."""

    def norm_rows(self) -> tuple[Span, Span]:
        """Of all heads, those held."""
        return self.heads.times(self.head_dim), self.kv_heads.times(self.head_dim)
