"""Linear layers: plain, fused QKV and fused gate/up.

`destinations` names, for each tensor of a checkpoint, the view of our (fused) parameter that it
fills; the loader copies into these views and nothing else.
"""

from torch import Tensor, nn

from paceline.core.parallel import Parallel
from paceline.kernels.linear import gated_linear, linear
from paceline.kernels.skinny_linear import arrival_counters
from paceline.layers.parameter import Placement, empty_matrix, empty_parameter


class _Fused:
    """Row blocks of one weight, each filled from its own checkpoint tensor."""

    def __init__(self, names: tuple[str, ...], sizes: tuple[int, ...]) -> None:
        self._names = names
        self._sizes = sizes

    def destinations(self, weight: Tensor, bias: Tensor | None, prefix: str) -> dict[str, Tensor]:
        out = {}
        for suffix, tensor in (("weight", weight), ("bias", bias)):
            if tensor is not None:
                blocks = tensor.split(self._sizes)
                for name, block in zip(self._names, blocks, strict=True):
                    out[f"{prefix}{name}.{suffix}"] = block
        return out


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

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the tensor it fills."""
        named: dict[str, Tensor] = {f"{prefix}.weight": self.weight}
        if self.bias is not None:
            named[f"{prefix}.bias"] = self.bias
        return named


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
        rows = tuple(count * head_dim for count in self.heads)
        # [(num_heads + 2 * num_kv_heads) * head_dim, in_features]
        self.weight = empty_matrix(sum(rows), in_features, placement=placement, has_bias=bias)
        self.bias = empty_parameter(sum(rows), placement=placement) if bias else None
        self._fused = _Fused(("q_proj", "k_proj", "v_proj"), rows)

    def forward(self, x: Tensor) -> list[Tensor]:
        """x [tokens, in] -> q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads,
        head_dim], strided views of one tensor."""
        fused = linear(x, self.weight, self.bias)
        return list(fused.view(x.shape[0], -1, self.head_dim).split(self.heads, dim=1))

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the block of rows it fills."""
        return self._fused.destinations(self.weight, self.bias, f"{prefix}.")


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
        self._fused = _Fused(("gate_proj", "up_proj"), (share, share))

    def forward(self, x: Tensor) -> Tensor:
        """x [tokens, hidden] -> [tokens, intermediate]."""
        return gated_linear(x, self.weight, self.bias, self.activation)

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the block of rows it fills."""
        return self._fused.destinations(self.weight, self.bias, f"{prefix}.")
