"""Expanded latents: step and prefixes in pieces, against a softmax over latents in float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from paceline.attention.contract import AttentionSpec, LayerCache
from paceline.attention.expanded import attend_expanded, expanded_plan
from paceline.attention.ragged.contract import RaggedLimits
from paceline.attention.ragged.own import OWN, OwnRagged
from paceline.core.expansion import Expansion, prefix_pieces, whole_step
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView

RANK, ROPE, NOPE, V_DIM, HEADS, PAGE, PIECE = 24, 8, 12, 20, 3, 4, 9
SCALE = 0.3
# Of one decode and four prompts, of which one has no prefix, and one ends with the first piece.
PREFIXES, EXTENDS = (7, 0, 1, 3, 11), (1, 5, 2, 1, 6)
LIMITS = RaggedLimits(
    device=torch.device("cpu"),
    dtype=torch.float32,
    max_reqs=len(EXTENDS),
    max_tokens=sum(EXTENDS),
    max_pieces=2,
    num_heads=HEADS,
    head_dim=NOPE + ROPE,
    v_head_dim=V_DIM,
    scale=SCALE,
)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def make_step(dtype: torch.dtype) -> tuple[StepView, LayerCache]:
    """A step over pages that hold NaN but for its prefixes, of the second of two groups."""
    kv_lens = [prefix + extend for prefix, extend in zip(PREFIXES, EXTENDS, strict=True)]
    tokens, reqs = sum(EXTENDS), len(EXTENDS)
    table = torch.randperm(5 * reqs, generator=torch.Generator().manual_seed(0)).view(reqs, 5).int()
    cache = torch.full((5 * reqs, PAGE, 1, RANK + ROPE), math.nan, dtype=dtype)
    for row, prefix in enumerate(PREFIXES):
        for at, values in enumerate(noise(prefix, RANK + ROPE)):
            cache[table[row, at // PAGE], at % PAGE, 0] = values
    lens, prefix_lens = ints(*kv_lens), ints(*PREFIXES)
    empty = torch.empty(tokens, dtype=torch.int64)
    of_both = {"out_cache_loc": empty, "prefix_lens": prefix_lens, "kv_lens": lens}
    groups = [GroupView(page_table=each, **of_both) for each in (table.flip(0), table)]
    view = StepView(
        row_ids=torch.arange(reqs),
        prefix_lens=prefix_lens,
        extend_lens=ints(*EXTENDS),
        kv_lens=lens,
        cu_seqlens_q=ints(0, *torch.tensor(EXTENDS).cumsum(0).tolist()),
        req_ids=torch.repeat_interleave(torch.arange(reqs), torch.tensor(EXTENDS)),
        positions=empty,
        rope_positions=empty,
        input_ids=empty,
        logits_loc=torch.empty(reqs, dtype=torch.int64),
        groups=tuple(groups),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=max(EXTENDS),
        kv_len_bound=20,
    )
    spec = AttentionSpec(
        layer_id=0,
        group=1,
        num_heads=HEADS,
        num_kv_heads=1,
        head_dim=RANK + ROPE,
        v_head_dim=RANK,
        scale=SCALE,
        window=None,
        soft_cap=None,
        v_in_k=True,
    )
    none = {"k_scale": None, "v_scale": None, "sinks": None}
    return view, LayerCache(spec=spec, k_cache=cache, v_cache=cache[..., :RANK], **none)


def one_hot(rows: int) -> Tensor:
    """[HEADS, rows, RANK] columns of a latent: what is expanded so is exact in any format."""
    columns = torch.randperm(HEADS * RANK, generator=torch.Generator().manual_seed(rows)) % RANK
    return torch.eye(RANK)[columns[: HEADS * rows]].view(HEADS, rows, RANK)


@pytest.mark.parametrize("bound", [0, 2], ids=["exact", "above"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_one_softmax_over_what_is_cached(dtype: torch.dtype, bound: int) -> None:
    """Whatever the host believes of a row that the device knows to be shorter; rounded once."""
    view, layer = make_step(dtype)
    tokens, is_wide = sum(EXTENDS[1:]), dtype == torch.float32
    sizes = ((tokens, HEADS, NOPE), (tokens, HEADS, ROPE), (tokens, RANK + ROPE))
    q, turned, rows = (noise(*size).to(dtype) for size in sizes)
    made = (lambda dim: noise(HEADS, dim, RANK)) if is_wide else one_hot
    keys, values = made(NOPE), made(V_DIM)
    close = {"rtol": 1e-4, "atol": 1e-4} if is_wide else {"rtol": 1.01 * 2**-8, "atol": 1e-5}
    believed = [prefix + bound for prefix in PREFIXES[1:]]
    expansion = Expansion(
        first_row=1,
        first_token=1,
        longest_before=1,
        extend_lens=EXTENDS[1:],
        pieces=prefix_pieces(believed, PIECE),
    )
    assert len(expansion.pieces) > 1
    plan = expanded_plan(view, expansion, OWN, LIMITS)

    def expand(latents: Tensor) -> tuple[Tensor, Tensor]:
        sides = torch.einsum("tr,hnr->thn", latents, torch.cat((keys, values), 1).to(dtype))
        return sides[..., :NOPE], sides[..., NOPE:]

    found = attend_expanded(q, turned, rows, layer, plan, expand)
    begin = 0
    for row, (prefix, extend) in enumerate(zip(PREFIXES[1:], EXTENDS[1:], strict=True), start=1):
        at = torch.arange(prefix)
        cached = layer.k_cache[view.groups[1].page_table[row, at // PAGE].long(), at % PAGE, 0]
        own = slice(begin, begin + extend)
        seen = torch.cat((cached, rows[own])).double()
        absorbed = torch.einsum("thn,hnr->thr", q[own].double(), keys.double())
        queries = torch.cat((absorbed, turned[own].double()), 2)
        scores = torch.einsum("thr,kr->htk", queries, seen) * SCALE
        hidden = torch.arange(len(seen)) > torch.arange(extend).unsqueeze(1) + prefix
        weights = scores.masked_fill(hidden, -math.inf).softmax(2)
        attended = torch.einsum("htk,kr->thr", weights, seen[:, :RANK])
        wanted = torch.einsum("thr,hvr->thv", attended, values.double())
        torch.testing.assert_close(found[own].double(), wanted, **close)
        begin += extend


class ByHost(OwnRagged):
    """Ours, planned on the host."""

    capabilities = replace(OwnRagged.capabilities, host_plan=True)


def test_padded_rows_have_none_of_a_piece_that_the_host_planned() -> None:
    view, _ = make_step(torch.float32)
    plan = expanded_plan(view, whole_step(PIECE, 2), ByHost(), LIMITS)
    assert [piece.starts.tolist() for piece in plan.pieces] == [[0] + [PIECE] * len(PREFIXES)] * 2
