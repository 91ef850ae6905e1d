"""Mamba 2 in our own kernels."""

from torch import Tensor

from paceline.attention.linear.inputs import Mamba2Inputs
from paceline.attention.linear.rows import LinearPlan
from paceline.attention.linear.shape import MAMBA2
from paceline.attention.linear.triton_backend import DecodePlan, TritonLinear, extend_heads
from paceline.attention.states import StateLayer
from paceline.kernels.gated_norm import Gate, GatedRows
from paceline.kernels.state_inputs import HeadChannels


class TritonMamba2(TritonLinear[Mamba2Inputs]):
    """A state is [value_heads, key_dim, value_dim]: Mamba's own, transposed."""

    kind = MAMBA2

    def extend(
        self, inputs: Mamba2Inputs, layer: StateLayer, plan: LinearPlan | DecodePlan
    ) -> Tensor:
        """[padded_tokens, value_heads, value_dim] in the dtype of the inputs."""
        return self._extend(inputs, None, layer, plan)[0]

    def extend_gated(
        self, inputs: Mamba2Inputs, gate: Gate, layer: StateLayer, plan: LinearPlan | DecodePlan
    ) -> GatedRows | None:
        """Of decodes that are one launch."""
        if not isinstance(plan, DecodePlan):
            return None
        rows, squares = self._extend(inputs, gate, layer, plan)
        assert squares is not None, "there is a gate"
        return GatedRows(rows.flatten(1), squares)

    def _extend(
        self,
        inputs: Mamba2Inputs,
        gate: Gate | None,
        layer: StateLayer,
        plan: LinearPlan | DecodePlan,
    ) -> tuple[Tensor, Tensor | None]:
        """As `extend_heads`."""
        shape = plan.shape
        values, keys = shape.value_size, shape.key_size
        return extend_heads(
            inputs.xbc.unsqueeze(1),
            inputs.conv_weight,
            inputs.conv_bias,
            inputs.rates,
            inputs.skip,
            layer,
            plan,
            channels=HeadChannels(
                first_q=values + keys,
                first_k=values,
                first_v=0,
                step_key=shape.key_dim,
                step_value=shape.per_key * shape.value_dim,
            ),
            eps=None,
            scale=1.0,
            is_delta=False,
            gate=gate,
        )
