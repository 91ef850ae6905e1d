"""The three ways in which files say a window that reaches to both sides, each against the mask that
transformers makes of the same number."""

import pytest
import torch
import transformers
from transformers import masking_utils
from transformers.models.gemma3 import modeling_gemma3

from paceline.kernels.ragged_attention import ragged_attention
from paceline.models.config import parse_config

LENGTH, SAID = 13, 6
_SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "layer_types": ["sliding_attention"] * 2,
    "vocab_size": 32,
    "pad_token_id": 0,
}


def visible(window: int) -> torch.Tensor:
    """[query, key] whether a layer of ours with this window sees it: V has a column per key."""
    q = torch.zeros(LENGTH, 1, LENGTH)
    v = torch.eye(LENGTH).unsqueeze(1)
    cu = torch.tensor([0, LENGTH], dtype=torch.int32)
    out, _ = ragged_attention(q, q, v, cu, cu, causal=False, scale=1.0, window=window)
    return out[:, 0] > 0


def theirs(mask) -> torch.Tensor:
    places = range(LENGTH)
    return torch.tensor([[bool(mask(0, 0, query, key)) for key in places] for query in places])


def stated(config: transformers.PretrainedConfig) -> int:
    """The window that we read of the file that transformers writes."""
    window = parse_config(config.to_dict()).layers[0].window
    assert window is not None
    return window


def test_modernbert_says_a_width_whose_halves_include_their_ends() -> None:
    config = transformers.ModernBertConfig(**_SIZES, local_attention=SAID)
    mask = masking_utils.sliding_window_bidirectional_overlay(config.local_attention // 2)
    assert torch.equal(visible(stated(config)), theirs(mask))
    assert stated(config) == SAID // 2 + 1


def test_gemma3_says_a_width_whose_halves_leave_their_ends_out() -> None:
    """Its class halves the number as it reads it, and writes it back whole."""
    config = transformers.Gemma3TextConfig(
        **_SIZES, sliding_window=SAID, use_bidirectional_attention=True
    )
    mask = modeling_gemma3._bidirectional_window_overlay(config.sliding_window)
    assert torch.equal(visible(stated(config)), theirs(mask))
    assert config.to_dict()["sliding_window"] == SAID


def test_embeddinggemma2_says_a_radius_that_includes_its_end() -> None:
    """No file of its is read yet: what a window of ours must be for one."""
    config = transformers.EmbeddingGemma2TextConfig(sliding_window=SAID)
    mask = masking_utils.sliding_window_bidirectional_overlay(config.sliding_window)
    assert torch.equal(visible(SAID + 1), theirs(mask))


@pytest.mark.parametrize("window", [SAID // 2, SAID // 2 + 2])
def test_one_more_or_less_would_show(window: int) -> None:
    mask = masking_utils.sliding_window_bidirectional_overlay(SAID // 2)
    assert not torch.equal(visible(window), theirs(mask))
