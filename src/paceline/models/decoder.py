"""The decoder stack shared by all architectures: embedding, layers, final norm, taps.

A layer takes the residual stream and the not yet added output of the layer before it (`delta`),
and returns its own; each addition is fused into the norm that follows it, and where ranks share
the model the sum of their parts too, or into the product before it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from paceline.core.errors import ModelError
from paceline.core.model.config import ModelConfig
from paceline.layers.attention import StepContext
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.embedding import Embedding, OverlaidRows
from paceline.layers.rank_sum import Delta, total
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.rope import rope_table
from paceline.layers.weights.weight_format import Named, wholly


class Hidden(NamedTuple):
    """What a forward pass returns."""

    hidden: Tensor  # [rows that are read, hidden]  after the final norm
    taps: dict[str, Tensor]  # [tokens, hidden] each: the hidden states that were asked for


def read_rows(x: Tensor, read: Tensor | None) -> Tensor:
    """x [tokens, hidden], of which a model's caller reads these rows; see `CausalLM.forward`."""
    return x if read is None else x.index_select(0, read)


NameLayer = Callable[[Any, str], Named]  # of a layer and the name of its tensors' place


class Decoder(nn.Module):
    """Embedding, layers and final norm.

    Taps: "embed" is the stream before layer 0, "layer.N" the stream after layer N, "final" the
    result of the final norm.
    """

    def __init__(
        self,
        embedding: Embedding,
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        *,
        named: NameLayer,
    ) -> None:
        """named: the checkpoint names of a layer's tensors."""
        super().__init__()
        self.name_layer = named
        self.embedding = embedding
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.tap_names = ("embed", *(f"layer.{i}" for i in range(len(layers))), "final")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """As of `CausalLM`."""
        self._check_taps(taps)
        early = self._taken_early(read, input_ids.shape[0], taps)
        last = len(self.layers) - 1
        tapped: dict[str, Tensor] = {}
        residual = self.embedding(input_ids)
        if overlaid is not None:  # what the embedding returns, scaled where it scales
            residual = overlaid.over(residual)
        if "embed" in taps:
            tapped["embed"] = residual.clone()
        delta: Delta = None
        for index, layer in enumerate(self.layers):
            rows = early if index == last else None
            delta, residual = layer(delta, residual, positions, ctx, rows)
            if taps and f"layer.{index}" in taps:
                if delta is None:
                    tapped[f"layer.{index}"] = residual.clone()
                else:
                    delta = total(delta)
                    tapped[f"layer.{index}"] = residual + delta
        hidden = self.norm.add(delta, residual)
        if "final" in taps:
            tapped["final"] = hidden
        return Hidden(read_rows(hidden, read) if early is None else hidden, tapped)

    def _taken_early(
        self, read: Tensor | None, num_tokens: int, taps: tuple[str, ...]
    ) -> Tensor | None:
        """The rows that alone go on behind the last layer's mixing: those that are read, where they
        are fewer than the tokens and no tap lies behind it; None: all go on."""
        if read is None or not self.layers or read.shape[0] >= num_tokens:
            return None
        behind = self.tap_names[len(self.layers) :]
        return None if any(tap in behind for tap in taps) else read

    def _check_taps(self, taps: tuple[str, ...]) -> None:
        for name in taps:
            if name not in self.tap_names:
                raise ModelError.about(
                    "tap",
                    expected=f"'embed', 'layer.0' to 'layer.{len(self.layers) - 1}' or 'final'",
                    got=repr(name),
                    remedy="name a hidden state that this model has",
                )

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills."""
        named = self.embedding.held.fill(f"{prefix}.embed_tokens")
        for index, layer in enumerate(self.layers):
            named |= self.name_layer(layer, f"{prefix}.layers.{index}")
        named[f"{prefix}.norm.weight"] = wholly(self.norm.weight)
        return named


def rope_tables(
    config: ModelConfig, *, max_positions: int | None, device: torch.device
) -> tuple[Tensor | None, ...]:
    """[num_layers] of cos_sin [max_positions, rotary_dim]; None where nothing turns.  Layers of
    equal ropes share a table.

    `max_positions` None means the context limit; an engine that writes positions past it (tokens in
    flight) asks for more.
    """
    rows = config.max_position if max_positions is None else max_positions
    tables = {
        (rope, rotary_dim): rope_table(
            rope,
            rotary_dim=rotary_dim,
            max_positions=rows,
            context_len=config.max_position,
            device=device,
        )
        for rope, rotary_dim in config.ropes
    }
    return tuple(
        None if layer.rope is None else tables[layer.rope, layer.rotary_dim]
        for layer in config.layers
    )
