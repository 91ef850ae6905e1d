"""The decoder stack shared by all architectures: embedding, layers, final norm, taps.

A layer takes the residual stream and the not yet added output of the layer before it (`delta`),
and returns its own; each addition is fused into the norm that follows it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.core.model_config import ModelConfig, RopeConfig
from paceline.layers.attention import AttentionContext
from paceline.layers.embedding import Embedding
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.rope import rope_table


class Hidden(NamedTuple):
    """What a forward pass returns."""

    hidden: Tensor  # [tokens, hidden]  after the final norm
    taps: dict[str, Tensor]  # [tokens, hidden] each: the hidden states that were asked for


# A layer, the name of its tensors' place -> checkpoint tensor name -> the tensor it fills.
NameLayer = Callable[[Any, str], dict[str, Tensor]]


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Taps: "embed" is the stream before layer 0, "layer.N" the stream after layer N, "final" the
    result of the final norm.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[nn.Module],
        norm: RMSNorm,
        *,
        named: NameLayer,
    ) -> None:
        """named: the checkpoint names of a layer's tensors."""
        super().__init__()
        self._named = named
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.tap_names = ("embed", *(f"layer.{i}" for i in range(len(layers))), "final")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: AttentionContext,
        taps: tuple[str, ...] = (),
    ) -> Hidden:
        """As of `CausalLM`."""
        self._check_taps(taps)
        tapped: dict[str, Tensor] = {}
        residual = self.embedding(input_ids)
        if "embed" in taps:
            tapped["embed"] = residual.clone()
        delta: Tensor | None = None
        for index, layer in enumerate(self.layers):
            delta = layer(delta, residual, positions, ctx)
            if taps and f"layer.{index}" in taps:
                tapped[f"layer.{index}"] = residual + delta
        hidden = self.norm(residual) if delta is None else self.norm.add(delta, residual)
        if "final" in taps:
            tapped["final"] = hidden
        return Hidden(hidden, tapped)

    def _check_taps(self, taps: tuple[str, ...]) -> None:
        for name in taps:
            if name not in self.tap_names:
                raise ModelError.about(
                    "tap",
                    expected=f"'embed', 'layer.0' to 'layer.{len(self.layers) - 1}' or 'final'",
                    got=repr(name),
                    remedy="name a hidden state that this model has",
                )

    def destinations(self, prefix: str) -> dict[str, Tensor]:
        """Checkpoint tensor name -> the tensor it fills."""
        named = {f"{prefix}.embed_tokens.weight": self.embedding.weight}
        for index, layer in enumerate(self.layers):
            named |= self._named(layer, f"{prefix}.layers.{index}")
        named[f"{prefix}.norm.weight"] = self.norm.weight
        return named


def rope_tables(
    config: ModelConfig, *, max_positions: int | None, device: torch.device
) -> dict[RopeConfig, Tensor]:
    """One cos_sin table [max_positions, rotary_dim] per distinct rope; layers share them.

    `max_positions` None means the context limit; an engine that writes positions past it (tokens in
    flight) asks for more.
    """
    ropes = {config.rope, config.rope_local or config.rope}
    rows = config.max_position if max_positions is None else max_positions
    return {
        rope: rope_table(
            rope,
            rotary_dim=config.rotary_dim,
            max_positions=rows,
            context_len=config.max_position,
            device=device,
        )
        for rope in ropes
    }
