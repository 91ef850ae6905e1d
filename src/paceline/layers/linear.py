"""Linear layers: plain, fused QKV and fused gate/up."""

from torch import Tensor, nn

from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.act_and_mul import act_and_mul
from paceline.layers.rank_sum import Product
from paceline.layers.weights.parameter import Placement
from paceline.layers.weights.weight_format import hold


class Linear(nn.Module):
    """y = x W^T + b, or a rank's part of it: of some outputs, or from some inputs, whose results
    `rank_sum` adds up."""

    is_left = False  # see `rank_sum.leave_sums`

    def __init__(
        self, in_features: Span, out_features: Span, *, bias: bool, placement: Placement
    ) -> None:
        super().__init__()
        format_ = placement.formats.linear
        weight = format_.allocate((out_features,), in_features, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> Tensor | Product:
        """x [tokens, in] -> [tokens, out]."""
        format_, weight = self.held.format, self.held.weight
        added = format_.weight_to_add(x, weight) if self.is_left else None
        return format_.apply(x, weight) if added is None else Product(x, added)

    def parts(self, x: Tensor) -> Tensor | None:
        """[parts, tokens, out] float32 whose sum is the same, where the sum is better made by what
        stands behind; None elsewhere."""
        return self.held.format.apply_in_parts(x, self.held.weight)

    def then(self, x: Tensor, activation: str) -> Tensor:
        """act of the same; activation: of act_and_mul.ACTIVATIONS."""
        return self.held.format.apply_then(x, self.held.weight, activation)


class QKVLinear(nn.Module):
    """The projections to Q, K and V as one product; of a rank those of its heads.

    Where ranks exceed KV heads, several hold the same one.
    """

    def __init__(
        self,
        in_features: int,
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        bias: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        q = parallel.share(num_heads, "num_heads")
        kv = parallel.share_kv(num_kv_heads, "num_kv_heads")
        self.head_dim = head_dim
        self.heads = [q.size, kv.size, kv.size]
        format_, parts = placement.formats.linear, [span.times(head_dim) for span in (q, kv, kv)]
        weight = format_.allocate(parts, whole(in_features), bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [tokens, in] -> q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads,
        head_dim], strided views of one tensor."""
        fused = self.held.format.apply(x, self.held.weight)
        return list(fused.view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1))


class GateUpLinear(nn.Module):
    """act(gate(x)) * up(x), both projections as one product; each rank holds a share of both.

    gate_scale: multiplies gate(x), of the few models that have one.
    """

    def __init__(
        self,
        hidden_size: int,
        inter: Span,
        *,
        activation: str,
        bias: bool,
        placement: Placement,
        gate_scale: float | None = None,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.gate_scale = gate_scale
        format_, inputs = placement.formats.linear, whole(hidden_size)
        weight = format_.allocate((inter, inter), inputs, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, intermediate]."""
        if self.gate_scale is None:
            return self.held.format.apply_gated(x, self.held.weight, self.activation)
        both = self.held.format.apply(x, self.held.weight)
        both[:, : both.shape[1] // 2].mul_(self.gate_scale)
        return act_and_mul(both, self.activation)
