"""Sizes computed from a configuration are those of the model that is built."""

import pytest
import tiny_checkpoints
import torch

from paceline.core.errors import ModelError
from paceline.core.parallel import Parallel
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.models.registry import builder
from paceline.models.size import parameter_count, weights_bytes

# as the model cards state them
PUBLISHED = {
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mistral-7b": 7_241_732_096,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
}


def test_shapes_have_the_published_number_of_parameters() -> None:
    counts = {name: parameter_count(parse_config(locate(name).config)) for name in shape_names()}
    assert counts == PUBLISHED


@pytest.mark.parametrize("name", sorted(PUBLISHED))
def test_the_formula_counts_what_is_built(name: str) -> None:
    config = parse_config(locate(name).config)
    model = builder(config.model_type)(
        config, parallel=Parallel(), device=torch.device("meta"), dtype=torch.bfloat16
    )
    assert sum(parameter.numel() for parameter in model.parameters()) == parameter_count(config)
    assert weights_bytes(config, "bfloat16") == 2 * parameter_count(config)


@pytest.mark.parametrize("case", sorted(tiny_checkpoints.CASES))
def test_the_formula_counts_what_transformers_builds(case: str) -> None:
    theirs = tiny_checkpoints.make(case)
    config = parse_config(theirs.config.to_dict())
    assert parameter_count(config) == theirs.num_parameters()


def test_an_unknown_dtype_is_refused() -> None:
    config = parse_config(locate("gemma-3-1b").config)
    with pytest.raises(ModelError, match=r"dtype must be one of bfloat16, .* got 'int3'"):
        weights_bytes(config, "int3")
