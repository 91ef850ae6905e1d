"""Gemma (model_type gemma): a pre-norm decoder whose norms multiply by 1 + weight, with embeddings
times sqrt(hidden_size)."""

import torch

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.layers.embedding import root_scale
from paceline.models.causal_lm import CausalLM
from paceline.models.prenorm import build_prenorm


def build(
    config: ModelConfig,
    *,
    parallel: Parallel,
    device: torch.device,
    dtype: torch.dtype,
    max_positions: int | None = None,
) -> CausalLM:
    """The model with uninitialised weights; arguments as of `build_prenorm`."""
    return build_prenorm(
        config,
        parallel=parallel,
        device=device,
        dtype=dtype,
        max_positions=max_positions,
        embedding_scale=root_scale(config.hidden_size, dtype),
    )
