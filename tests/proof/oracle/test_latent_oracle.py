"""Absorbed latent attention is latent attention: the oracle over latents against expanded heads."""

from dataclasses import replace

import pytest
import torch
from oracle_cases import PLAIN, TREE
from torch.nn.functional import scaled_dot_product_attention

from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.methods.softmax import attend, visible_keys
from paceline.proof.suite.case import Case

HEADS, RANK, ROPE, NOPE, VALUE = 4, 32, 16, 24, 20


@pytest.mark.parametrize("plain", [PLAIN, TREE], ids=["causal", "tree"])
def test_absorbed_over_latents_is_expanded_heads(plain: Case) -> None:
    """DeepSeek-V2 (arXiv 2405.04434), equations 9 to 19: each head has keys [W_UK c, k_rope] and
    values W_UV c.  Absorbed, W_UK goes to the query and W_UV behind attention."""
    case = replace(
        plain,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        v_head_dim=RANK,
        v_in_k=True,
    )
    batch, data = case.batches[0], make_inputs(case, 0)
    random = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random, dtype=torch.float64)

    up_k, up_v = noise(HEADS, NOPE, RANK), noise(HEADS, VALUE, RANK)
    nope = [noise(extend, HEADS, NOPE) for extend in batch.extend_lens]
    turned = [noise(extend, HEADS, ROPE) for extend in batch.extend_lens]
    absorbed = tuple(
        torch.cat((torch.einsum("thn,hnr->thr", a, up_k), b), 2)[None]
        for a, b in zip(nope, turned, strict=True)
    )
    latent = attend(case, batch, replace(data, queries=absorbed), 0)
    out = torch.einsum("thr,hvr->thv", latent, up_v).split(list(batch.extend_lens))
    for request, kv_len in enumerate(batch.kv_lens):
        rows, rope = data.keys[request][0, :, 0].split((RANK, ROPE), 1)
        seen = torch.zeros(batch.extend_lens[request], kv_len, dtype=torch.bool)
        for row in range(len(seen)):
            seen[row, visible_keys(case, batch, 0, request, row)] = True
        wanted = scaled_dot_product_attention(
            torch.cat((nope[request], turned[request]), 2).transpose(0, 1),
            torch.cat(
                (torch.einsum("kr,hnr->hkn", rows, up_k), rope.expand(HEADS, kv_len, ROPE)), 2
            ),
            torch.einsum("kr,hvr->hkv", rows, up_v),
            attn_mask=seen,
            scale=data.scale,
        )
        torch.testing.assert_close(out[request], wanted.transpose(0, 1))
