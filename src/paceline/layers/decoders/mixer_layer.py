"""The decoder layer of models that keep states and have no feed-forward block: norm, mixer."""

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.attention import StepContext
from paceline.layers.mixers.mamba2 import Mamba2
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement


class MixerLayer(nn.Module):
    """x += mixer(norm(x))."""

    def __init__(
        self, config: ModelConfig, mixer: Mamba2, *, parallel: Parallel, placement: Placement
    ) -> None:
        super().__init__()
        self.mixer = mixer
        self.norm = hidden_norm(config, placement)

    def forward(
        self, delta: Tensor | None, residual: Tensor, positions: Tensor, ctx: StepContext
    ) -> Tensor:
        """delta, residual [tokens, hidden] -> the mixer's output; residual += delta."""
        x = self.norm(residual) if delta is None else self.norm.add(delta, residual)
        out: Tensor = self.mixer(x, positions, ctx)
        return out
