"""How much the weights of an EAGLE head are, counted as those of a model are."""

from functools import cache

import torch

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.kernels.stand_in import StandIn
from paceline.models.causal_lm import CausalLM
from paceline.models.size import META, torch_dtype, weight_bytes, weightless
from paceline.speculate.eagle.config import EagleConfig
from paceline.speculate.eagle.head import EagleHead, build_eagle_head


def empty_head(
    config: EagleConfig, target: CausalLM, *, dtype: torch.dtype, max_positions: int
) -> EagleHead:
    """The modules of a draft head on the meta device, on those of its target; as `empty_model`."""
    return build_eagle_head(
        config, target, parallel=Parallel(), device=META, dtype=dtype, max_positions=max_positions
    )


@cache
def eagle_weights_bytes(config: EagleConfig, target: ModelConfig, dtype: str) -> int:
    """Bytes of all weights of a draft head in `dtype`, and of its map to the target's tokens; what
    it shares with the target counts as the target's.  Raises ModelError for another dtype."""
    model = weightless(target, dtype)
    with StandIn("cpu", None):
        head = empty_head(config, model, dtype=torch_dtype(dtype), max_positions=1)
    return weight_bytes(head)
