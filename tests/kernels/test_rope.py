"""The rotation's definition against transformers; `test_rope_write_kv` holds the op to it."""

import pytest
import torch
from test_rope_write_kv import table
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
from transformers.models.qwen2_vl.configuration_qwen2_vl import Qwen2VLTextConfig
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from paceline.core.errors import ModelError
from paceline.core.model.rope import RopeConfig
from paceline.kernels.rope import rope_reference
from paceline.layers.rope import rope_table


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_reference_is_transformers_rotation(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(24)
    fused = torch.randn(5, 7, 24, generator=generator).to(dtype)
    positions = torch.tensor([3, 0, 63, 3, 17])
    cos = torch.cat((table(24)[positions, :12],) * 2, dim=-1).to(dtype)[None]
    sin = torch.cat((table(24)[positions, 12:],) * 2, dim=-1).to(dtype)[None]
    heads_first = fused.transpose(0, 1)[None]
    q, k = apply_rotary_pos_emb(heads_first[:, :3], heads_first[:, 3:5], cos, sin)
    # They round cos, sin, two products and the sum; a pair's length bounds each rounding.
    length = fused.float().abs().max().item() * 2.0**0.5
    atol = 2.5 * torch.finfo(dtype).eps * length
    mine = rope_reference(fused, table(24), positions)
    torch.testing.assert_close(mine[:, :3], q[0].transpose(0, 1), rtol=0.0, atol=atol)
    torch.testing.assert_close(mine[:, 3:5], k[0].transpose(0, 1), rtol=0.0, atol=atol)


POSITIONS = torch.tensor([[0, 1, 1, 1, 7], [0, 1, 2, 9, 8], [0, 1, 3, 5, 40]])


def turned(x: Tensor, sections: tuple[int, ...], *, interleaved: bool) -> Tensor:
    """x [tokens, heads, 32] by POSITIONS."""
    rope = RopeConfig(sections=sections, interleaved=interleaved)
    width = {"rotary_dim": 32, "max_positions": 64, "context_len": 64}
    cos_sin = rope_table(rope, **width, device=torch.device("cpu"))
    return rope_reference(x, cos_sin, POSITIONS, 0, rope.axis_columns)


def theirs(x: Tensor, rotary: torch.nn.Module) -> Tensor:
    """The same by transformers, whose tables are put together from those of every axis."""
    cos, sin = rotary(x, POSITIONS[:, None])
    heads_first = x.transpose(0, 1)[None]
    q, k = apply_rotary_pos_emb(heads_first[:, :3], heads_first[:, 3:], cos, sin)
    return torch.cat((q, k), dim=1)[0].transpose(0, 1)


@pytest.mark.parametrize("sections", [(4, 6, 6), (14, 1, 1), (2, 2, 12)])
def test_sections_are_qwen2_vls(sections: tuple[int, ...]) -> None:
    """A stretch of pairs for each of time, height and width."""
    x = torch.randn(5, 5, 32, generator=torch.Generator().manual_seed(3))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}
    sizes = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    rotary = Qwen2VLRotaryEmbedding(Qwen2VLTextConfig(**sizes, rope_parameters=rope))
    mine = turned(x, sections, interleaved=False)
    torch.testing.assert_close(mine, theirs(x, rotary), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("sections", [(6, 5, 5), (8, 4, 4)])
def test_interleaved_sections_are_qwen3_vls(sections: tuple[int, ...]) -> None:
    x = torch.randn(5, 5, 32, generator=torch.Generator().manual_seed(4))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [*sections]}
    rope["mrope_interleaved"] = True
    rotary = Qwen3VLTextRotaryEmbedding(Qwen3VLTextConfig(head_dim=32, rope_parameters=rope))
    mine = turned(x, sections, interleaved=True)
    torch.testing.assert_close(mine, theirs(x, rotary), rtol=0.0, atol=2e-6)


@pytest.mark.parametrize("interleaved", [False, True])
def test_equal_axes_turn_as_one(interleaved: bool) -> None:
    rope = RopeConfig(sections=(4, 4, 4), interleaved=interleaved)
    x = torch.randn(5, 2, 24, generator=torch.Generator().manual_seed(5))
    one = rope_reference(x, table(24), POSITIONS[2])
    same = POSITIONS[2].expand(3, 5)
    assert torch.equal(rope_reference(x, table(24), same, 0, rope.axis_columns), one)


def test_sections_of_another_width_are_refused() -> None:
    with pytest.raises(ModelError, match=r"rope sections must be 16 in all, .* got \[4, 4\]"):
        turned(torch.zeros(5, 1, 32), (4, 4), interleaved=False)
