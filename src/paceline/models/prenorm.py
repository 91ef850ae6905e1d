"""The decoder that all but Gemma 2 and 3 are: pre-norm layers, or layers given in their place."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn

from paceline.core.model.config import SOFTMAX, ModelConfig, QKNorm
from paceline.core.parallel import Parallel, Span
from paceline.layers.decoders.decoder_layer import DecoderLayer
from paceline.layers.decoders.prenorm_layer import PreNormLayer
from paceline.layers.embedding import Embedding
from paceline.layers.mixers.latent_attention import LatentAttention
from paceline.layers.mixers.self_attention import RowNormedAttention, SelfAttention
from paceline.layers.rms_norm import RMSNorm, hidden_norm
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder, NameLayer, rope_tables
from paceline.models.tensor_names import name_prenorm

NO_MIXERS: Mapping[str, type[nn.Module]] = MappingProxyType({})


def build_prenorm(
    config: ModelConfig,
    *,
    parallel: Parallel,
    placement: Placement,
    max_positions: int | None = None,
    layer: Callable[..., DecoderLayer] = PreNormLayer,
    attention: Callable[..., SelfAttention] = SelfAttention,
    mixers: Mapping[str, type[nn.Module]] = NO_MIXERS,
    named: NameLayer = name_prenorm,
    embedding_scale: float | None = None,
    embedding: Embedding | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`.

    layer: another where a model adds otherwise to the stream; attention: another than the usual;
    mixers: by kind, the blocks of layers that mix otherwise than by attention; named: where
    checkpoints name a layer's tensors otherwise.
    """
    tables = rope_tables(config, max_positions=max_positions, device=placement.device)
    if embedding is None:
        embedding = Embedding(
            config.vocab_size,
            config.hidden_size,
            scale=embedding_scale if config.multipliers is None else config.multipliers.embedding,
            placement=placement,
            has_head=config.tie_word_embeddings,
        )
    if config.qk_norm is QKNorm.ROW:
        attention = RowNormedAttention
    attends = attention if config.latent is None else LatentAttention
    blocks: dict[str, Callable[..., nn.Module]] = {SOFTMAX: attends, **mixers}
    layers = _layers(config, parallel, placement, tables=tables, layer=layer, blocks=blocks)
    decoder = Decoder(embedding, layers, hidden_norm(config, placement), named=named)
    return CausalLM(config, decoder, parallel=parallel, placement=placement)


def _layers(
    config: ModelConfig,
    parallel: Parallel,
    placement: Placement,
    *,
    tables: Sequence[Tensor | None],
    layer: Callable[..., DecoderLayer],
    blocks: Mapping[str, Callable[..., nn.Module]],
) -> list[DecoderLayer]:
    by_row = config.qk_norm is QKNorm.ROW

    def norm(held: Span, head_dim: int) -> RMSNorm:
        size = held.size * head_dim if by_row else head_dim
        return RMSNorm(size, config.rms_norm_eps, kind=config.norm, placement=placement)

    def own(layer_id: int) -> dict[str, Any]:
        """What the block of a layer takes beside what all take."""
        spec = config.layers[layer_id]
        if not spec.attends:
            return {}
        if config.latent is not None:
            assert tables[layer_id] is not None, "latents have dimensions that turn"
            return {"cos_sin": tables[layer_id]}
        heads, dim = spec.heads, spec.heads.head_dim
        q = parallel.share(heads.num_heads, "num_heads")
        kv = parallel.share_kv(heads.num_kv_heads, "num_kv_heads")
        has_none = config.qk_norm in (QKNorm.NONE, QKNorm.UNIT)
        norms = None if has_none else (norm(q, dim), norm(kv, dim))
        return {"cos_sin": tables[layer_id], "qk_norms": norms}

    def make(layer_id: int) -> DecoderLayer:
        spec = config.layers[layer_id]
        mixer = blocks[SOFTMAX if spec.attends else spec.mixer](
            config, layer_id, parallel=parallel, placement=placement, **own(layer_id)
        )
        return layer(config, mixer, parallel=parallel, placement=placement)

    return [make(index) for index in range(config.num_layers)]
