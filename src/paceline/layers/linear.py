"""Linear layers: plain, fused QKV and fused gate/up."""

from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.layers.parameter import Placement
from paceline.layers.weight_format import hold


class Linear(nn.Module):
    """y = x W^T + b.  Under tensor parallelism each rank holds a share of the input columns."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        columns = parallel.share(in_features, "in_features")
        format_ = placement.formats.linear
        weight = format_.allocate((out_features,), columns, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return self.held.format.apply(x, self.held.weight)


class QKVLinear(nn.Module):
    """The projections to Q, K and V as one product.

    Under tensor parallelism each rank holds a share of the Q heads and of the KV heads.
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
        heads = parallel.share(num_heads, "num_heads")
        kv_heads = parallel.share(num_kv_heads, "num_kv_heads")
        self.head_dim = head_dim
        self.heads = [heads, kv_heads, kv_heads]
        format_, parts = placement.formats.linear, [count * head_dim for count in self.heads]
        weight = format_.allocate(parts, in_features, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [tokens, in] -> q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads,
        head_dim], strided views of one tensor."""
        fused = self.held.format.apply(x, self.held.weight)
        return list(fused.view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1))


class GateUpLinear(nn.Module):
    """act(gate(x)) * up(x), both projections as one product; each rank holds a share of both."""

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        activation: str,
        bias: bool,
        parallel: Parallel,
        placement: Placement,
    ) -> None:
        super().__init__()
        self.activation = activation
        share = parallel.share(intermediate_size, "intermediate_size")
        format_ = placement.formats.linear
        weight = format_.allocate((share, share), hidden_size, bias=bias, placement=placement)
        self.held = hold(self, format_, weight)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, intermediate]."""
        return self.held.format.apply_gated(x, self.held.weight, self.activation)
