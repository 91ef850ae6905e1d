"""The encoder stack: embeddings, layers, and a norm at the end where a model has one.

Its layers cache nothing, so a step holds every text whole, from its first token on.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, Parallel
from paceline.layers.attention import StepContext
from paceline.layers.embedding import Embedding, OverlaidRows
from paceline.layers.encoder_layer import EncoderAttention
from paceline.layers.layer_norm import LayerNorm
from paceline.layers.weights.parameter import Placement, empty_parameter
from paceline.layers.weights.weight_format import Named
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Hidden, NameLayer, read_rows, rope_tables


class LearnedPositions(nn.Module):
    """A row for each position, and one for each token's type, the first where none are told."""

    def __init__(
        self, rows: int, types: int, hidden_size: int, *, first: int, placement: Placement
    ) -> None:
        """first: row of position 0."""
        super().__init__()
        self.first = first
        self.positions = empty_parameter(rows, hidden_size, placement=placement)
        self.types = empty_parameter(types, hidden_size, placement=placement)

    def forward(self, x: Tensor, positions: Tensor, token_types: Tensor | None) -> Tensor:
        """x [tokens, hidden], positions and token_types [tokens] int64 -> a new tensor.  What
        padding has beyond the last row takes that."""
        rows = positions.add(self.first).clamp_(max=self.positions.shape[0] - 1)
        types = self.types[0] if token_types is None else self.types.index_select(0, token_types)
        return (x + types).add_(self.positions.index_select(0, rows))


class Encoder(nn.Module):
    """Stands where a decoder does in `CausalLM`."""

    def __init__(
        self,
        embedding: Embedding,
        learned: LearnedPositions | None,
        embedding_norm: LayerNorm,
        layers: Sequence[nn.Module],
        norm: LayerNorm | None,
        *,
        named: Callable[["Encoder"], Named],
        named_layer: NameLayer,
    ) -> None:
        """named, named_layer: the checkpoint's tensors around the layers, and of each."""
        super().__init__()
        self.embedding = embedding
        self.learned = learned
        self.embedding_norm = embedding_norm
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self._named = named
        self._named_layer = named_layer

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        ctx: StepContext,
        taps: tuple[str, ...] = (),
        overlaid: OverlaidRows | None = None,
        read: Tensor | None = None,
    ) -> Hidden:
        """As of `CausalLM`; nobody taps it."""
        assert not taps, "drafters have targets that generate"
        x = self.embedding(input_ids)
        if overlaid is not None:
            x = overlaid.over(x)
        if self.learned is not None:
            x = self.learned(x, positions, ctx.view.token_types)
        x = self.embedding_norm(x)
        for layer in self.layers:
            x = layer(x, positions, ctx)
        x = read_rows(x, read)
        return Hidden(x if self.norm is None else self.norm(x), {})

    def destinations(self, prefix: str) -> Named:
        """What a checkpoint fills; its names have no prefix."""
        named = self._named(self)
        for index, layer in enumerate(self.layers):
            named |= self._named_layer(layer, str(index))
        return named


def build_encoder(
    config: ModelConfig,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int | None = None,
    layer: Callable[[int, EncoderAttention, Placement], nn.Module],
    learned: Callable[[Placement], LearnedPositions] | None = None,
    norm_bias: bool = True,
    has_final_norm: bool = False,
    **named: Any,
) -> CausalLM:
    """The model with uninitialised weights; layer: of a number and its attention; named: as of
    `Encoder`."""
    assert parallel == ALONE, "plan.contradictions refuses more ranks"
    tables = rope_tables(config, max_positions=max_positions, device=placement.device)
    hidden, eps = config.hidden_size, config.rms_norm_eps

    def norm() -> LayerNorm:
        return LayerNorm(hidden, eps, bias=norm_bias, placement=placement)

    attentions = [
        EncoderAttention(config, index, cos_sin=tables[index], placement=placement)
        for index in range(config.num_layers)
    ]
    encoder = Encoder(
        Embedding(config.vocab_size, hidden, scale=None, placement=placement),
        None if learned is None else learned(placement),
        norm(),
        [layer(index, each, placement) for index, each in enumerate(attentions)],
        norm() if has_final_norm else None,
        **named,
    )
    return CausalLM(config, encoder, parallel=parallel, placement=placement)
