"""Mamba 2 in plain torch, on any device: the definition that other backends are held to."""

from torch import Tensor

from paceline.attention.linear.inputs import Mamba2Inputs, made_rates
from paceline.attention.linear.rows import LinearPlan, convolve, extend_states
from paceline.attention.linear.shape import MAMBA2
from paceline.attention.linear.torch_backend import TorchLinear
from paceline.attention.states import StateLayer
from paceline.kernels.extend_states import StateRows


class TorchMamba2(TorchLinear[Mamba2Inputs]):
    """A state is [value_heads, key_dim, value_dim]: Mamba's own, transposed."""

    kind = MAMBA2

    def extend(self, inputs: Mamba2Inputs, layer: StateLayer, plan: LinearPlan) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        shape = plan.shape
        mixed = convolve(inputs.xbc, inputs.conv_weight, inputs.conv_bias, layer, plan)
        x, b, c = mixed.split((shape.value_size, shape.key_size, shape.key_size), dim=1)
        heads = (-1, shape.key_heads, shape.key_dim)
        decay, dt = made_rates(inputs.rates)
        x = x.reshape(-1, shape.value_heads, shape.value_dim).float()
        rows = StateRows(
            q=c.reshape(heads),
            k=b.reshape(heads),
            v=x * dt.unsqueeze(2),
            decay=decay,
            beta=None,
        )
        out: Tensor = extend_states(rows, layer, plan) + x * inputs.skip.float().unsqueeze(1)
        return out.to(inputs.xbc.dtype)
