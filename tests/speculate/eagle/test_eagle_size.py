"""Sizes of heads: the released one, and what is a head's own."""

from dataclasses import replace
from typing import Any

import eagle_checkpoints as heads
import pytest

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.kernels.stand_in import StandIn
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.models.size import META, torch_dtype, weight_bytes, weightless
from paceline.speculate.eagle.config import EagleConfig, parse_eagle_config
from paceline.speculate.eagle.head import build_eagle_head


def size_of(config: EagleConfig, target: ModelConfig, dtype: str) -> int:
    """Bytes of a head's own weights, and of its map to the target's tokens."""
    model = weightless(target, dtype)
    with StandIn("cpu", None):
        head = build_eagle_head(
            config,
            model,
            parallel=Parallel(),
            placement=Placement(META, torch_dtype(dtype), DENSE),
            max_positions=1,
        )
    return weight_bytes(head)


def test_the_shipped_head_has_the_published_size() -> None:
    """As the released file: fc, one layer of double width, norms and 32,000 rows of a head."""
    target = locate("llama-3.1-8b").config
    config = parse_eagle_config(locate("eagle3-llama-3.1-8b").config, "EAGLE3")
    layer = 6144 * 8192 + 4096 * 4096 + 3 * 14336 * 4096
    expected = 12288 * 4096 + layer + 32000 * 4096 + 4 * 4096
    offsets = 8 * 32000
    assert size_of(config, parse_config(target), "bfloat16") == 2 * expected + offsets


@pytest.mark.parametrize("raw", [heads.HEAD, heads.EAGLE3], ids=["EAGLE", "EAGLE3"])
def test_what_a_head_shares_with_its_target_is_not_its_own(raw: dict[str, Any]) -> None:
    """Nothing of the target's table or head."""
    algorithm = "EAGLE3" if raw is heads.EAGLE3 else "EAGLE"
    target = parse_config(heads.HEAD)
    config = parse_eagle_config(raw, algorithm)
    table = target.vocab_size * target.hidden_size
    wider = replace(target, vocab_size=2 * target.vocab_size)
    size = size_of(config, target, "float32")
    assert size_of(config, wider, "float32") == size > 0
    own = replace(config, has_own_embedding=True) if algorithm == "EAGLE3" else config
    difference = size_of(own, target, "float32") - size
    assert difference == (4 * table if own is not config else 0)
