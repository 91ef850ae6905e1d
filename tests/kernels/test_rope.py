"""The rotation's definition against transformers; `test_rope_write_kv` holds the op to it."""

import pytest
import torch
from test_rope_write_kv import table
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from paceline.kernels.rope import rope_reference


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
