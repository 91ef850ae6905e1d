"""Sizes of heads computed from their configuration are those of what is built."""

from typing import Any

import eagle_checkpoints as heads
import pytest
import torch

from paceline.core.parallel import Parallel
from paceline.models.config import parse_config
from paceline.models.eagle_config import EagleConfig, parse_eagle_config
from paceline.models.eagle_head import EagleHead, build_eagle_head
from paceline.models.locate import locate
from paceline.models.registry import builder
from paceline.models.size import eagle_parameter_count, eagle_weights_bytes


def built(config: EagleConfig, target: dict[str, Any]) -> EagleHead:
    """On no device: shapes alone."""
    where = {"parallel": Parallel(), "device": torch.device("meta"), "dtype": torch.bfloat16}
    model = builder("llama")(parse_config(target), **where, max_positions=8)
    return build_eagle_head(config, model, **where, max_positions=8)


@pytest.mark.parametrize(
    "raw",
    [
        heads.HEAD,
        heads.HEAD | {"num_hidden_layers": 2, "attention_bias": True},
        heads.EAGLE3,
        heads.EAGLE3 | {"num_hidden_layers": 3, "fc_norm": True, "bias": True},
        heads.EAGLE3 | {"hidden_size": 32, "target_hidden_size": 48},
        heads.EAGLE3 | {"draft_vocab_size": None, "eagle_config": {"use_aux_hidden_state": False}},
        heads.EAGLE3 | {"model_type": "qwen3"},
    ],
)
def test_the_formula_counts_what_is_built(raw: dict[str, Any]) -> None:
    config = parse_eagle_config(raw, "EAGLE3" if "draft_vocab_size" in raw else "EAGLE")
    head = built(config, heads.HEAD)
    count = eagle_parameter_count(config, config.layer)
    assert count == sum(parameter.numel() for parameter in head.parameters())
    offsets = 0 if head.d2t is None else head.d2t.nbytes
    assert eagle_weights_bytes(config, config.layer, "bfloat16") == 2 * count + offsets


def test_the_shipped_head_has_the_published_size() -> None:
    """As the released file: fc, one layer of double width, norms and 32,000 rows of a head."""
    target = locate("llama-3.1-8b").config
    config = parse_eagle_config(locate("eagle3-llama-3.1-8b").config, "EAGLE3")
    layer = 6144 * 8192 + 4096 * 4096 + 3 * 14336 * 4096
    expected = 12288 * 4096 + layer + 32000 * 4096 + 4 * 4096
    assert eagle_parameter_count(config, parse_config(target)) == expected
    head = built(config, target)
    assert sum(parameter.numel() for parameter in head.parameters()) == expected
