"""The decoder layer of models that keep states and have no feed-forward block: norm, mixer."""

from torch import Tensor

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.rank_sum import Delta
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement


class MixerLayer(DecoderLayer):
    """x += mixer(norm(x))."""

    def __init__(
        self, config: ModelConfig, mixer: Mamba2, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        mixer.leave_scale()
        self.mixer = mixer
        self.norm = hidden_norm(config, placement)

    def mix(
        self,
        delta: Delta,
        residual: Tensor,
        positions: Tensor,
        ctx: StepContext,
    ) -> Delta:
        x = self.norm.add(delta, residual)
        out: Delta = self.mixer(x, positions, ctx)
        return out

    def feed(self, mixed: Delta, residual: Tensor, ctx: StepContext, rows: Tensor | None) -> Delta:
        return mixed  # which the next norm adds
