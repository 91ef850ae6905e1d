"""The decoder that all but Gemma 2 and 3 are: pre-norm layers, or layers given in their place."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from paceline.core.model_config import ModelConfig, QKNorm
from paceline.core.parallel import Parallel, Span
from paceline.kernels.all_reduce import Exchange
from paceline.layers.dense import DENSE
from paceline.layers.embedding import Embedding
from paceline.layers.latent_attention import LatentAttention
from paceline.layers.parameter import Placement
from paceline.layers.prenorm_layer import PreNormLayer
from paceline.layers.rms_norm import RMSNorm, hidden_norm
from paceline.layers.self_attention import RowNormedAttention, SelfAttention
from paceline.layers.weight_format import WeightFormats
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder, NameLayer, rope_tables
from paceline.models.tensor_names import name_prenorm


def build_prenorm(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
    formats: WeightFormats = DENSE,
    exchange: Exchange | None = None,
    layer: Callable[..., nn.Module] = PreNormLayer,
    named: NameLayer = name_prenorm,
    embedding_scale: float | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`.

    layer: another where a model adds otherwise to the stream; named: where checkpoints name a
    layer's tensors otherwise.
    """
    placement = Placement(device, dtype, formats, exchange)
    tables = rope_tables(config, max_positions=max_positions, device=device)
    embedding = Embedding(
        config.vocab_size,
        config.hidden_size,
        scale=embedding_scale if config.multipliers is None else config.multipliers.embedding,
        placement=placement,
    )
    layers = _layers(config, parallel, placement, tables=tables, layer=layer)
    decoder = Decoder(embedding, layers, hidden_norm(config, placement), named=named)
    return CausalLM(config, decoder, parallel=parallel, placement=placement)


def _layers(
    config: ModelConfig,
    parallel: Parallel,
    placement: Placement,
    *,
    tables: Sequence[Tensor | None],
    layer: Callable[..., nn.Module],
) -> list[nn.Module]:
    by_row = config.qk_norm is QKNorm.ROW
    attention_type = RowNormedAttention if by_row else SelfAttention

    def norm(held: Span, head_dim: int) -> RMSNorm:
        size = held.size * head_dim if by_row else head_dim
        return RMSNorm(size, config.rms_norm_eps, kind=config.norm, placement=placement)

    def make_layer(layer_id: int) -> nn.Module:
        heads = config.layers[layer_id].heads
        dim = heads.head_dim
        q = parallel.share(heads.num_heads, "num_heads")
        kv = parallel.share_kv(heads.num_kv_heads, "num_kv_heads")
        norms = norm(q, dim), norm(kv, dim)
        attention = attention_type(
            config,
            layer_id,
            cos_sin=tables[layer_id],
            qk_norms=None if config.qk_norm is QKNorm.NONE else norms,
            parallel=parallel,
            placement=placement,
        )
        return layer(config, attention, parallel=parallel, placement=placement)

    def make_latent(layer_id: int) -> nn.Module:
        cos_sin = tables[layer_id]
        assert cos_sin is not None, "latents have dimensions that turn"
        attention = LatentAttention(
            config, layer_id, cos_sin=cos_sin, parallel=parallel, placement=placement
        )
        return layer(config, attention, parallel=parallel, placement=placement)

    make = make_layer if config.latent is None else make_latent
    return [make(index) for index in range(config.num_layers)]
