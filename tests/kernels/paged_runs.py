"""Launches of the attention kernels on paged cases, and their comparison with the definition."""

import torch
from paged_cases import BatchSpec, PagedCase, first_key_dropped, reference, worst_error
from torch import Tensor

from paceline.kernels.paged_attention import (
    SplitWorkspace,
    paged_decode,
    paged_extend,
    split_workspace,
)

CPU = torch.device("cpu")
DECODE = BatchSpec(prefix_lens=(96, 0, 42), extend_lens=(1, 1, 1))
RAGGED = BatchSpec(prefix_lens=(45, 0, 17), extend_lens=(3, 21, 1))


def workspace_of(case: PagedCase, max_reqs: int) -> SplitWorkspace:
    """Full of NaN, but for the counters."""
    shape = case.shape
    workspace = split_workspace(
        max_reqs,
        shape.num_heads,
        shape.num_kv_heads,
        v_head_dim=shape.v_head_dim,
        device=CPU,
    )
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    return workspace


def run_decode(case: PagedCase, kv_lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, lse = case.empty_outputs()
    workspace = workspace_of(case, case.q.shape[0])
    paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.kv_lens if kv_lens is None else kv_lens,
        scale=case.scale,
        window=case.shape.window,
        soft_cap=case.shape.soft_cap,
        out=out,
        lse=lse,
        workspace=workspace,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        sinks=case.sinks,
    )
    assert not workspace.finished.any()
    return out, lse


def run_extend(
    case: PagedCase, *, prefix_only: bool = False, workspace: SplitWorkspace | None = None
) -> tuple[Tensor, Tensor]:
    out, lse = case.empty_outputs()
    paged_extend(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.prefix_lens,
        case.kv_lens,
        case.cu_seqlens_q,
        max_extend_len=int(case.extend_lens.max()),
        scale=case.scale,
        window=case.shape.window,
        soft_cap=case.shape.soft_cap,
        out=out,
        lse=lse,
        mask=case.mask,
        tree_mask=case.tree_mask,
        prefix_only=prefix_only,
        k_scale=case.k_scale,
        v_scale=case.v_scale,
        sinks=None if prefix_only else case.sinks,
        workspace=workspace,
    )
    return out, lse


def assert_matches(
    case: PagedCase, actual: tuple[Tensor, Tensor], *, prefix_only: bool = False
) -> None:
    out, lse = actual
    assert worst_error(case, out, prefix_only=prefix_only) <= 1.0
    _, expected_lse = reference(case, prefix_only=prefix_only)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    wrong = first_key_dropped(case, prefix_only=prefix_only)
    assert worst_error(case, wrong, prefix_only=prefix_only) > 1.0
