"""A gated delta net block (arXiv:2412.06464): projections, convolution, states, gated norm."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from paceline.attention.linear.inputs import GdnInputs
from paceline.attention.linear.shape import LinearShape
from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel, Span, whole
from paceline.kernels.decay_rates import ENDLESS, RawRates
from paceline.kernels.gated_norm import gated_head_norm
from paceline.layers.attention import StepContext
from paceline.layers.linear import Linear
from paceline.layers.rank_sum import Unsummed, summed
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Destination, TensorPart, hold


class GatedDeltaNet(nn.Module):
    """One layer; of ranks each holds some key heads and the value heads that share them.

    What is projected lies key head by key head: query, key, values, gates of the values; and behind
    all of that rates and decays of its values.  Convolution and states keep that order.
    """

    def __init__(
        self, config: ModelConfig, layer_id: int, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        parts = {part.name: part.shape for part in config.layers[layer_id].state}
        model = LinearShape.of(parts)
        self.layer_id = layer_id
        self.keys = keys = parallel.share(model.key_heads, "linear_num_key_heads")
        self.values = values = keys.times(model.per_key)
        self.shape = shape = replace(model, key_heads=keys.size, value_heads=values.size)
        self._head = (2 * shape.key_dim, shape.per_key * shape.value_dim)  # q and k, v
        rows = [keys.times(self._head[0] + 2 * self._head[1]), keys.times(2 * shape.per_key)]
        self._rows = [span.size for span in rows]
        format_ = placement.formats.linear
        weight = format_.allocate(rows, whole(config.hidden_size), bias=False, placement=placement)
        self.held = hold(self, format_, weight)
        # [channels, width]  key head by key head, as what it convolves
        self.conv_weight = empty_parameter(shape.channels, shape.conv_width, placement=placement)
        wide = replace(placement, dtype=torch.float32)
        self.decay_log = empty_parameter(values.size, placement=wide)  # [value_heads]  float32
        self.decay_bias = empty_parameter(values.size, placement=wide)  # [value_heads]  float32
        self.norm = RMSNorm(shape.value_dim, config.rms_norm_eps, placement=placement)
        out = Linear(
            values.times(shape.value_dim),
            whole(config.hidden_size),
            bias=False,
            placement=placement,
        )
        self.out = summed(out, parallel, placement)

    def forward(self, x: Tensor, positions: Tensor, ctx: StepContext) -> Tensor | Unsummed:
        """x [tokens, hidden] -> [tokens, hidden]; positions are not read: states know the order."""
        shape, tokens = self.shape, x.shape[0]
        fused = self.held.format.apply(x, self.held.weight)
        heads, rates = fused.split(self._rows, dim=1)
        qkv, gates = heads.view(tokens, shape.key_heads, -1).split(
            (sum(self._head), self._head[1]), dim=2
        )
        mixed = ctx.mix(
            self.layer_id,
            GdnInputs(
                qkv=qkv,
                conv_weight=self.conv_weight,
                rates=RawRates(
                    rates.view(tokens, shape.key_heads, -1),
                    self.decay_bias,
                    self.decay_log,
                    ENDLESS,
                    has_beta=True,
                ),
            ),
        )
        gated = gated_head_norm(mixed, gates, self.norm.weight, eps=self.norm.eps)
        out: Tensor | Unsummed = self.out(gated)
        return out

    def conv_target(self) -> Destination:
        """What the stored weight fills, [channels, 1, width]: all queries, all keys, all values."""
        shape, keys, width = self.shape, self.keys, self.shape.conv_width
        per_head = shape.channels // shape.key_heads
        sizes = (shape.key_dim, shape.key_dim, self._head[1])
        total = sum(sizes) * keys.total
        blocks = []
        for local, head in enumerate(range(keys.first, keys.end)):
            views = self.conv_weight[local * per_head : (local + 1) * per_head].split(sizes)
            begins = 0
            for view, size in zip(views, sizes, strict=True):
                rows = Span(begins + head * size, size, total)
                blocks.append(TensorPart(view.unsqueeze(1), (rows, whole(1), whole(width))))
                begins += keys.total * size
        return Destination((total, 1, width), self.conv_weight.dtype, tuple(blocks))
