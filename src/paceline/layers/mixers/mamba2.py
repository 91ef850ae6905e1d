"""A Mamba-2 mixer: one projection to all that a token brings, what its heads read of their states,
gate and norm, one projection back (Dao and Gu 2024, arXiv:2405.21060)."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.attention.linear.inputs import Mamba2Inputs
from paceline.attention.linear.shape import LinearShape
from paceline.core.model.config import GateOrder, ModelConfig
from paceline.core.parallel import Parallel, whole
from paceline.kernels.decay_rates import RawRates
from paceline.kernels.gated_norm import Gate, gated_norm
from paceline.kernels.rms_norm import RowScale
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.rank_sum import Unscaled
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement, empty_parameter


class Mamba2(nn.Module):
    """One layer.  What is projected is z, which gates; x, B and C, which a convolution sees; and a
    time step of each head."""

    def __init__(
        self, config: ModelConfig, layer_id: int, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        own = config.mamba2
        assert own is not None, "a model of such layers has a config of them"
        assert parallel.size == 1, "ranks are refused before"
        shape = LinearShape.of({p.name: p.shape for p in config.layers[layer_id].state})
        self.layer_id = layer_id
        self.order, self.num_groups = own.order, shape.key_heads
        self.step_limits = own.step_limits
        inner, channels, heads = shape.value_size, shape.channels, shape.value_heads
        self.sizes = [inner, channels, heads]
        hidden, of_heads = whole(config.hidden_size), replace(placement, dtype=torch.float32)
        self.in_proj = Linear(hidden, whole(sum(self.sizes)), bias=own.in_bias, placement=placement)
        self.conv = empty_parameter(
            channels, shape.conv_width, placement=placement
        )  # [channels, taps]
        self.conv_bias: nn.Parameter | None = None  # [channels]
        if own.conv_bias:
            self.conv_bias = empty_parameter(channels, placement=placement)
        self.a_log = empty_parameter(heads, placement=of_heads)  # [heads]  float32
        self.dt_bias = empty_parameter(heads, placement=of_heads)  # [heads]  float32
        self.skip = empty_parameter(heads, placement=of_heads)  # [heads]  float32  D
        self.norm: RMSNorm | None = None
        if own.order is not GateOrder.GATE:
            self.norm = RMSNorm(inner, config.rms_norm_eps, placement=placement)
        self.out_proj = Linear(whole(inner), hidden, bias=own.out_bias, placement=placement)
        # What is not scaled yet may exceed float16; a bias, or one of several groups, would not be
        # scaled behind the product as before it.
        is_whole = own.order is GateOrder.GATE_NORM and self.num_groups == 1 and not own.out_bias
        self._can_leave = is_whole and placement.dtype is not torch.float16
        self._leaves = False
        self.scales: Tensor | None = None  # [z, x, B, C, dt]  the model's dtype
        if own.scales is not None:
            each = zip((inner, inner, *[shape.key_size] * 2, heads), own.scales, strict=True)
            self.scales = torch.cat(
                [torch.full((size,), scale, device=placement.device) for size, scale in each]
            ).to(placement.dtype)

    def leave_scale(self) -> None:
        """Return an `Unscaled`, for `RMSNorm.add`, in steps whose backend gates at once."""
        self._leaves = self._can_leave

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor | Unscaled:
        """x [tokens, hidden] -> [tokens, hidden]; nothing turns by positions."""
        projected = self.in_proj(x)
        if self.scales is not None:
            projected.mul_(self.scales)
        z, xbc, dt = projected.split(self.sizes, dim=1)
        given, limits = dt.unsqueeze(1), self.step_limits
        rates = RawRates(given, self.dt_bias, self.a_log, limits, has_beta=False)
        inputs = Mamba2Inputs(
            xbc=xbc,
            conv_weight=self.conv,
            conv_bias=self.conv_bias,
            rates=rates,
            skip=self.skip,
        )
        norm = self.norm
        if self._leaves:
            assert norm is not None, "a scale is left of one"
            found = ctx.mix_gated(self.layer_id, inputs, Gate(z, norm.weight))
            if found is not None:
                scale = RowScale(found.squares, z.shape[1], norm.eps)
                return Unscaled(self.out_proj(found.rows), scale)
        y = ctx.mix(self.layer_id, inputs).flatten(1)
        gated = gated_norm(
            y,
            z,
            None if norm is None else norm.weight,
            eps=0.0 if norm is None else norm.eps,
            groups=self.num_groups,
            order=self.order,
        )
        out: Tensor = self.out_proj(gated)
        return out
