"""Phi-3, 3.5 and 4 (model_type phi3): Llama, whose checkpoints store Q, K, V and gate, up fused.

The longer contexts come with longrope; Phi-4-mini turns three quarters of each head.
"""

from functools import partial

from torch import Tensor

from paceline.layers.prenorm_layer import PreNormLayer
from paceline.models.prenorm import build_prenorm


class FusedLayer(PreNormLayer):
    """A pre-norm layer whose checkpoint has one tensor where we have one: rows of Q, K, V, and rows
    of gate, up, in our order."""

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the tensor it fills."""
        parts = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
        named = {
            name: tensor
            for name, tensor in super().destinations(prefix).items()
            if not name.endswith(tuple(f".{part}.weight" for part in parts))
        }
        named[f"{prefix}.self_attn.qkv_proj.weight"] = self.attention.qkv.weight
        named[f"{prefix}.mlp.gate_up_proj.weight"] = self.mlp.gate_up.weight
        return named


build = partial(build_prenorm, layer=FusedLayer)
