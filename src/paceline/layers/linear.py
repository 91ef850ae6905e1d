"""Linear layers: plain, fused QKV and fused gate/up."""

from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.skinny_linear import arrival_counters
from paceline.layers.parameter import Placement, empty_matrix, empty_parameter


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
        # [out_features, columns]
        self.weight = empty_matrix(out_features, columns, placement=placement, has_bias=bias)
        self.bias = empty_parameter(out_features, placement=placement) if bias else None  # [out]
        self.counters = arrival_counters(out_features, device=placement.device)

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, in] -> [tokens, out]."""
        return linear(x, self.weight, self.bias, counters=self.counters)


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
        self.rows = [count * head_dim for count in self.heads]  # of the weight: Q, K, V
        # [(num_heads + 2 * num_kv_heads) * head_dim, in_features]
        self.weight = empty_matrix(sum(self.rows), in_features, placement=placement, has_bias=bias)
        self.bias = empty_parameter(sum(self.rows), placement=placement) if bias else None

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [tokens, in] -> q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads,
        head_dim], strided views of one tensor."""
        fused = linear(x, self.weight, self.bias)
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
        # [2 * intermediate_size, hidden_size]  gate rows, then up rows
        self.weight = empty_matrix(2 * share, hidden_size, placement=placement, has_bias=bias)
        self.bias = empty_parameter(2 * share, placement=placement) if bias else None
        self.rows = [share, share]  # of the weight: gate, up

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, intermediate]."""
        return gated_linear(x, self.weight, self.bias, self.activation)
