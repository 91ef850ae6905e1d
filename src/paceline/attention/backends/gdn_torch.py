"""Gated delta net in plain torch, on any device: the definition that other backends are held to."""

from torch import Tensor

from paceline.attention.linear.inputs import NORM_EPS, GdnInputs, made_rates
from paceline.attention.linear.rows import LinearPlan, convolve, extend_states
from paceline.attention.linear.shape import GDN
from paceline.attention.linear.torch_backend import TorchLinear
from paceline.attention.states import StateLayer
from paceline.kernels.extend_states import StateRows


class TorchGdn(TorchLinear[GdnInputs]):
    """Queries and keys have length 1 behind the convolution; queries are scaled by their number of
    dimensions."""

    kind = GDN

    def extend(self, inputs: GdnInputs, layer: StateLayer, plan: LinearPlan) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        shape = plan.shape
        mixed = convolve(inputs.qkv.flatten(1), inputs.conv_weight, None, layer, plan)
        q, k, v = mixed.view(-1, shape.key_heads, shape.channels // shape.key_heads).split(
            (shape.key_dim, shape.key_dim, shape.per_key * shape.value_dim), dim=2
        )
        decay, beta = made_rates(inputs.rates)
        rows = StateRows(
            q=_unit(q) * shape.key_dim**-0.5,
            k=_unit(k),
            v=v.reshape(-1, shape.value_heads, shape.value_dim),
            decay=decay,
            beta=beta,
        )
        return extend_states(rows, layer, plan).to(inputs.qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    """[..., dim] float32, of length 1."""
    wide = x.float()
    return wide * (wide.square().sum(-1, keepdim=True) + NORM_EPS).rsqrt()
