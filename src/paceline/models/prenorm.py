"""The pre-norm decoder that Llama, Mistral, Phi and the Qwens are."""

import torch
from torch import Tensor

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.embedding import Embedding
from paceline.layers.parameter import Placement
from paceline.layers.prenorm_layer import PreNormLayer
from paceline.layers.rms_norm import RMSNorm
from paceline.layers.self_attention import SelfAttention
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Decoder, rope_tables
from paceline.models.registry import architecture


def build_prenorm(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
    layer: type[PreNormLayer] = PreNormLayer,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`.

    `layer` differs where a checkpoint names its tensors otherwise.  Whether Q and K have per-head
    norms is a fact of the architecture's registry entry.
    """
    placement = Placement(device, dtype)
    tables = rope_tables(config, max_positions=max_positions, device=device)
    decoder = _stack(config, parallel, placement, cos_sin=tables[config.rope], layer=layer)
    return CausalLM(config, decoder, parallel=parallel, placement=placement)


def _stack(
    config: ModelConfig,
    parallel: Parallel,
    placement: Placement,
    *,
    cos_sin: Tensor,
    layer: type[PreNormLayer],
) -> Decoder:
    qk_norm = architecture(config.model_type).qk_norm

    def head_norm() -> RMSNorm:
        return RMSNorm(config.head_dim, config.rms_norm_eps, placement=placement)

    def make_layer(layer_id: int) -> PreNormLayer:
        attention = SelfAttention(
            config,
            layer_id,
            cos_sin=cos_sin,
            qk_norms=(head_norm(), head_norm()) if qk_norm else None,
            parallel=parallel,
            placement=placement,
        )
        return layer(config, attention, parallel=parallel, placement=placement)

    embedding = Embedding(
        config.vocab_size, config.hidden_size, scale=None, parallel=parallel, placement=placement
    )
    norm = RMSNorm(config.hidden_size, config.rms_norm_eps, placement=placement)
    return Decoder(embedding, [make_layer(i) for i in range(config.num_layers)], norm)
