"""The decoder that the Gemmas are: sandwich layers, and embeddings times sqrt(hidden_size)."""

from paceline.core.model.config import ModelConfig, QKNorm
from paceline.core.parallel import Parallel
from paceline.layers.decoders.sandwich_layer import SandwichLayer
from paceline.layers.embedding import Embedding, root_scale
from paceline.layers.rms_norm import hidden_norm
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder, rope_tables
from paceline.models.tensor_names import name_sandwich


def build_sandwich(
    config: ModelConfig,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`."""
    tables = rope_tables(config, max_positions=max_positions, device=placement.device)
    layers = [
        SandwichLayer(
            config,
            layer_id,
            cos_sin=tables[layer_id],
            qk_norm=config.qk_norm is QKNorm.HEAD,
            parallel=parallel,
            placement=placement,
        )
        for layer_id in range(config.num_layers)
    ]
    embedding = Embedding(
        config.vocab_size,
        config.hidden_size,
        scale=root_scale(config.hidden_size, placement.dtype),
        placement=placement,
        has_head=config.tie_word_embeddings,
    )
    decoder = Decoder(embedding, layers, hidden_norm(config, placement), named=name_sandwich)
    return CausalLM(config, decoder, parallel=parallel, placement=placement)
