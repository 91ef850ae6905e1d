"""Sizes that are counted are those that model cards state, and that transformers builds."""

import pytest
import tiny_checkpoints

from paceline.core.errors import ModelError
from paceline.models.config import parse_config
from paceline.models.locate import locate, shape_names
from paceline.models.size import weights_bytes

# as the model cards state them
PUBLISHED = {
    "bert-base": 109_482_240 - 590_592,  # without its pooler, which vectors leave unread
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3-7-layers": 49_632_960_512 + 4 * 256,  # as below: the first 3, and 4 with experts
    # rates, steps and skips of each head are float32 whatever the dtype, and count twice
    "falcon-h1-7b": 7_585_513_568 + 44 * 3 * 24,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b": 999_885_952,
    "gpt-oss-20b": 20_914_757_184,
    "granite-4.0-h-small": 32_207_337_984 + 36 * 3 * 128,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.2-1b": 1_235_814_400,
    "mamba2-2.7b": 2_702_599_680 + 64 * 3 * 80,
    "mistral-7b": 7_241_732_096,
    "phi-4-mini": 3_836_021_760,
    "qwen2.5-7b": 7_615_616_512,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "qwen3-embedding-0.6b": 595_776_512,
    "qwen3-next-16-layers": 26_973_018_368 + 768,  # decays, in float32, count twice
    "qwen3-next-80b": 79_674_391_296 + 2304,
}


def test_shapes_have_the_published_number_of_parameters() -> None:
    sizes = {name: parse_config(locate(name).config) for name in shape_names()}
    assert {name: weights_bytes(config, "bfloat16") // 2 for name, config in sizes.items()} == (
        PUBLISHED
    )


def test_the_cut_deepseek_v3_is_the_published_one_but_for_its_layers() -> None:
    config = parse_config(locate("deepseek-v3-7-layers").config | {"num_hidden_layers": 61})
    biases = 58 * 256  # of routers, in float32: they count twice
    assert weights_bytes(config, "bfloat16") // 2 == 671_026_419_200 + biases
    assert str(config.layers[0].heads) == "128 heads over latents of 512 + 64"


@pytest.mark.parametrize("case", sorted(tiny_checkpoints.CASES))
def test_as_many_parameters_are_built_as_transformers_builds(case: str) -> None:
    theirs = tiny_checkpoints.make(case)
    config = parse_config(theirs.config.to_dict())
    biases = [buffer for name, buffer in theirs.named_buffers() if name.endswith("correction_bias")]
    wanted = theirs.num_parameters() + sum(bias.numel() for bias in biases)
    assert weights_bytes(config, "float32") == 4 * wanted


def test_an_unknown_dtype_is_refused() -> None:
    config = parse_config(locate("gemma-3-1b").config)
    with pytest.raises(ModelError, match=r"dtype must be one of bfloat16, .* got 'int3'"):
        weights_bytes(config, "int3")
