"""Latents as cases: what a model asks, and causal steps over a page table."""

import torch

from paceline.attention.contract import (
    AttentionConfig,
    AttentionSpec,
    GraphSupport,
    Limits,
)
from paceline.core.model.config import Heads
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView

LATENTS = Heads(16, 1, 576, 512, v_in_k=True)
H200 = AttentionConfig(
    device_type="cuda",
    cuda_arch=(9, 0),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    page_size=64,
    heads=(LATENTS,),
    window=False,
    soft_cap=False,
    sinks=False,
    masks=frozenset({MaskKind.CAUSAL}),
    needs_lse=True,
    graph=GraphSupport.ALWAYS,
)
SPEC = AttentionSpec(
    layer_id=0,
    group=0,
    num_heads=4,
    num_kv_heads=1,
    head_dim=576,
    v_head_dim=512,
    scale=0.1,
    window=None,
    soft_cap=None,
    v_in_k=True,
)
LIMITS = Limits(
    device=torch.device("cpu"),
    dtype=torch.bfloat16,
    kv_dtype=torch.bfloat16,
    layers=(SPEC,),
    max_reqs=4,
    max_tokens=4096,
    max_pages=(3,),
    windows=(None,),
    page_size=64,
)


def view_of(prefixes: list[int], extends: list[int], *, uniform: bool = False) -> StepView:
    """A causal step with pages 1, 2, ... of each request behind one another."""
    lens, steps = torch.tensor(prefixes).int(), torch.tensor(extends).int()
    req_ids = torch.arange(len(prefixes)).repeat_interleave(steps)
    offsets = torch.cat((torch.zeros(1).int(), steps.cumsum(0).int()))
    positions = torch.cat([torch.arange(p, p + e) for p, e in zip(prefixes, extends, strict=True)])
    tables = 1 + torch.arange(3 * len(prefixes)).view(-1, 3).int()
    return StepView(
        row_ids=1 + torch.arange(len(prefixes)),
        prefix_lens=lens,
        extend_lens=steps,
        kv_lens=lens + steps,
        cu_seqlens_q=offsets,
        req_ids=req_ids,
        positions=positions,
        rope_positions=positions,
        input_ids=torch.zeros_like(positions),
        logits_loc=(offsets[1:] - 1).long(),
        groups=(
            GroupView(
                page_table=tables,
                out_cache_loc=torch.zeros_like(positions),
                prefix_lens=lens,
                kv_lens=lens + steps,
            ),
        ),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=max(extends),
        kv_len_bound=192,
    )
