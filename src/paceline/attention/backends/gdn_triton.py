"""Gated delta net in our own kernels."""

from torch import Tensor

from paceline.attention.linear.inputs import NORM_EPS, GdnInputs
from paceline.attention.linear.rows import LinearPlan
from paceline.attention.linear.shape import GDN
from paceline.attention.linear.triton_backend import DecodePlan, TritonLinear, extend_heads
from paceline.attention.states import StateLayer
from paceline.kernels.state_inputs import HeadChannels


class TritonGdn(TritonLinear[GdnInputs]):
    """Queries and keys have length 1 behind the convolution; queries are scaled by their number of
    dimensions."""

    kind = GDN

    def extend(self, inputs: GdnInputs, layer: StateLayer, plan: LinearPlan | DecodePlan) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        shape = plan.shape
        step, dim = shape.channels // shape.key_heads, shape.key_dim
        out, _ = extend_heads(
            inputs.qkv,
            inputs.conv_weight,
            None,
            inputs.rates,
            None,
            layer,
            plan,
            channels=HeadChannels(0, dim, 2 * dim, step, step),
            eps=NORM_EPS,
            scale=dim**-0.5,
            is_delta=True,
        )
        return out
