"""Rope tables equal transformers' for every kind and for the numbers of released models."""

import math

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from paceline.core.model.rope import RopeConfig, RopeKind
from paceline.layers.rope import rope_attention_factor, rope_frequencies, rope_table
from paceline.models.config_rope import read_rope
from paceline.models.fields import Fields

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 4096,
    "short_factor": [1.0 + i / 40 for i in range(32)],
    "long_factor": [1.2 + 2.0 * i for i in range(32)],
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

CASES = {
    "linear": (64, 10000.0, {"rope_type": "linear", "factor": 8.0}),
    "llama-3.1": (128, 500000.0, LLAMA3),
    "llama-3.2": (64, 500000.0, LLAMA3 | {"factor": 32.0}),
    "llama-4-scout": (128, 500000.0, LLAMA3 | {"factor": 16.0, "high_freq_factor": 1.0}),
    "qwen-yarn": (128, 1000000.0, YARN),
    "yarn-betas": (80, 10000.0, YARN | {"beta_fast": 16, "beta_slow": 2}),
    "yarn-not-truncated": (64, 150000.0, YARN | {"factor": 32.0, "truncate": False}),
    "yarn-mscale": (64, 10000.0, YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.7}),
    "yarn-attention-factor": (64, 10000.0, YARN | {"attention_factor": 1.25}),
    "yarn-tiny-context": (16, 10000.0, YARN | {"original_max_position_embeddings": 8}),
    "longrope": (64, 10000.0, LONGROPE),
    "longrope-factor": (64, 10000.0, LONGROPE | {"factor": 3.0}),
    "longrope-attention-factor": (64, 500.0, LONGROPE | {"attention_factor": 1.25}),
}


def parse(theta: float, scaling: dict[str, object]) -> RopeConfig:
    return read_rope(
        Fields({"rope_theta": theta, "rope_scaling": scaling, "max_position_embeddings": 131072})
    )


@pytest.mark.parametrize("case", sorted(CASES))
def test_frequencies_and_factor_equal_transformers(case: str) -> None:
    dim, theta, scaling = CASES[case]
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        head_dim=dim,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    theirs, their_factor = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](config, torch.device("cpu"))
    rope = parse(theta, scaling)
    ours = rope_frequencies(rope, dim, context_len=4096)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert rope_attention_factor(rope) == pytest.approx(their_factor, rel=1e-12)


@pytest.mark.parametrize("case", sorted(CASES))
def test_every_scaling_differs_from_the_default(case: str) -> None:
    dim, theta, scaling = CASES[case]
    plain = rope_frequencies(RopeConfig(theta=theta), dim, context_len=4096)
    scaled = rope_frequencies(parse(theta, scaling), dim, context_len=4096)
    assert not torch.allclose(scaled, plain, rtol=0.1)


@pytest.mark.parametrize("case", sorted(CASES))
def test_only_longrope_depends_on_the_context_limit(case: str) -> None:
    dim, theta, scaling = CASES[case]
    rope = parse(theta, scaling)
    within, beyond = (rope_frequencies(rope, dim, context_len=n) for n in (4096, 4097))
    assert torch.equal(within, beyond) == (rope.kind is not RopeKind.LONGROPE)


def test_beyond_the_trained_context_longrope_takes_the_long_factors_of_transformers() -> None:
    dim, theta, scaling = CASES["longrope"]
    config = transformers.LlamaConfig(
        hidden_size=4 * dim,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=scaling | {"rope_theta": theta},
    )
    init = ROPE_INIT_FUNCTIONS["longrope"]
    theirs, their_factor = init(config, torch.device("cpu"), seq_len=4097)
    rope = parse(theta, scaling)
    ours = rope_frequencies(rope, dim, context_len=4097)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    assert rope_attention_factor(rope) == pytest.approx(their_factor, rel=1e-12)
    assert their_factor == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


def test_default_frequencies_are_those_of_the_paper() -> None:
    frequencies = rope_frequencies(RopeConfig(theta=10000.0), 8, context_len=64)
    expected = torch.tensor([1.0, 0.1, 0.01, 0.001])
    torch.testing.assert_close(frequencies, expected, rtol=1e-6, atol=0)


def test_yarn_multiplies_by_the_published_factor() -> None:
    rope = RopeConfig(kind=RopeKind.YARN, factor=32.0, original_max_position=4096)
    assert rope_attention_factor(rope) == pytest.approx(0.1 * math.log(32.0) + 1.0)


def test_table_rows_are_cosines_then_sines_times_the_factor() -> None:
    rope = RopeConfig(
        kind=RopeKind.YARN, factor=4.0, original_max_position=64, attention_factor=1.5
    )
    table = rope_table(
        rope, rotary_dim=16, max_positions=50, context_len=50, device=torch.device("cpu")
    )
    frequencies = rope_frequencies(rope, 16, context_len=50)
    angles = torch.arange(50.0)[:, None].double() * frequencies.double()
    expected = 1.5 * torch.cat((angles.cos(), angles.sin()), dim=-1)
    assert table.dtype == torch.float32
    assert table.is_contiguous()
    torch.testing.assert_close(table, expected.float(), rtol=0, atol=1e-5)


def test_table_equals_transformers_far_into_the_context() -> None:
    config = transformers.LlamaConfig(
        hidden_size=256,
        num_attention_heads=4,
        max_position_embeddings=131072,
        rope_parameters=LLAMA3 | {"rope_theta": 500000.0},
    )
    positions = torch.tensor([0, 1, 4095, 65537, 131071])
    module = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(config)
    cos, sin = module(torch.zeros(1), positions[None])
    table = rope_table(
        parse(500000.0, LLAMA3),
        rotary_dim=64,
        max_positions=131072,
        context_len=131072,
        device=torch.device("cpu"),
    )
    # one ulp of the frequency is 131071 * 6e-8 radians there
    torch.testing.assert_close(table[positions, :32], cos[0, :, :32], rtol=0, atol=2e-2)
    torch.testing.assert_close(table[positions, 32:], sin[0, :, :32], rtol=0, atol=2e-2)
