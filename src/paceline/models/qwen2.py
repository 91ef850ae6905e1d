"""Qwen 2 and 2.5 (model_type qwen2): pre-norm decoder with biases on Q, K and V."""

import torch

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.prenorm import prenorm_decoder


def build(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; `max_positions` as in `rope_tables`."""
    placement = Placement(device, dtype)
    decoder = prenorm_decoder(
        config,
        qk_norm=False,
        parallel=parallel,
        placement=placement,
        max_positions=max_positions,
    )
    return CausalLM(config, decoder, parallel=parallel, placement=placement)
