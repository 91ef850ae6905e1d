"""gpt-oss (model_type gpt_oss): pre-norm decoder with experts, biases and attention sinks; every
second layer has a window."""

from functools import partial

from torch import Tensor

from paceline.layers.moe import SparseMLP
from paceline.layers.prenorm_layer import PreNormLayer
from paceline.models.prenorm import build_prenorm


class StackedLayer(PreNormLayer):
    """A pre-norm layer whose checkpoint has one tensor for all experts, [experts, in, out], with
    gate and up columns interleaved as our rows are."""

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the tensor it fills."""
        others = super().destinations(prefix).items()
        named = {name: tensor for name, tensor in others if not name.startswith(f"{prefix}.mlp.")}
        mlp, experts = self.mlp, f"{prefix}.mlp.experts"
        assert isinstance(mlp, SparseMLP), "every layer of gpt_oss has experts"
        assert mlp.gate_up_bias is not None, "with biases"
        assert mlp.down_bias is not None, "with biases"
        named |= mlp.router.destinations(f"{prefix}.mlp.router")
        named[f"{experts}.gate_up_proj"] = mlp.gate_up.mT
        named[f"{experts}.gate_up_proj_bias"] = mlp.gate_up_bias
        named[f"{experts}.down_proj"] = mlp.down.mT
        named[f"{experts}.down_proj_bias"] = mlp.down_bias
        return named


build = partial(build_prenorm, layer=StackedLayer)
