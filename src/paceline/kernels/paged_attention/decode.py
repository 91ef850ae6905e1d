"""paged_decode: one query per request over its paged keys, split along the keys.

Each program takes one KV head of one request and one split of its keys (many requests have splits
by their lengths, decision 145), with the whole group of query heads as the rows of one matrix tile;
the last split to finish merges all by their log-sum-exp (Dao et al. 2023, "Flash-Decoding").  The
definition is paged_attention_reference with extend 1.
"""

from typing import Any

from paceline.core.errors import KernelArgumentError
from paceline.kernels._check import require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.paged_attention.call import SCHEMA, PagedCall
from paceline.kernels.paged_attention.checks import check_call, check_index
from paceline.kernels.paged_attention.shared_prefix import SharedPrefixes, sharing_rule
from paceline.kernels.paged_attention.splits import (
    SplitWorkspace,
    check_workspace,
    decode_slots,
    decode_splits,
    most_keys,
    shared_chunks,
    takes_one_warp,
)


def paged_decode(
    call: PagedCall, workspace: SplitWorkspace, shared: SharedPrefixes | None = None
) -> None:
    """Attend one query per request, at position kv_len − 1.

    call: with q [reqs, heads, head_dim], and not of the prefix alone; of the rows page_table and
    kv_lens are read, as under any mask a single row sees itself.  Mutates out, lse and the
    workspace.  kv_len 0 gives out 0, lse −inf.
    shared: what `find_shared` found for these rows: such prefixes are read once for several
    requests.  Few requests, windows and chunks read for each all the same.
    Graph-safe: grids depend on padded sizes only; no host sync.  Raises KernelArgumentError.
    """
    q, cache, rows, weighing = call[:4]
    check_call(call, q.shape[0])
    num_reqs, num_heads, _ = q.shape
    check_index("kv_lens", rows.kv_lens, (num_reqs,))
    if weighing.prefix_only:
        raise KernelArgumentError.about(
            "prefix_only",
            expected="False, as a decode reads its own key too",
            got="True",
            remedy="call paged_extend for the prefix alone",
        )
    max_keys = most_keys(rows.page_table, cache.k, weighing.most_keys)
    if cache.beside is not None:
        raise KernelArgumentError.about(
            "k_cache",
            expected="of heads, or latents in the model's dtype",
            got="latents with scales",
            remedy="call paged_extend, which reads them",
        )
    kv_heads = cache.k.shape[2]
    splits = decode_splits(num_reqs, kv_heads, max_keys=max_keys, device=q.device)
    slots = decode_slots(
        num_reqs,
        kv_heads,
        max_keys=max_keys,
        in_one_warp=takes_one_warp(q, cache.k, cache.v),
        device=q.device,
    )
    partials, turn = num_reqs * splits, None
    if slots is not None:
        turn, splits = slots
        partials = splits
    chunks = 0
    if shared is not None and slots is not None and weighing.most_keys is None:
        chunks = shared_chunks(num_reqs, num_heads, kv_heads, q.device)
    partials += num_reqs * chunks
    check_workspace(workspace, partials, num_reqs, num_heads, cache.v.shape[3])
    if num_reqs == 0:
        return
    found = None if shared is None or not chunks else shared
    _PAGED_DECODE(
        *call.flat(),
        splits,
        turn,
        None if found is None else found.shared_lens,
        None if found is None else found.places,
        chunks,
        workspace.partial_out,
        workspace.partial_lse,
        workspace.finished,
    )


def _launch(*args: Any) -> None:
    require_triton("paged_decode", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.paged_decode import launch_paged_decode

    call, (splits, turn, shared_lens, places, chunks, out, lse, finished) = PagedCall.taken(args)
    workspace = SplitWorkspace(partial_out=out, partial_lse=lse, finished=finished)
    if places is not None:
        from paceline.kernels._triton.shared_prefix import launch_shared

        _, page_size, kv_heads, _ = call.cache.k.shape
        launch_shared(
            call,
            workspace,
            shared_lens,
            places,
            sharing_rule(call.q.shape[1] // kv_heads, page_size),
            first_partial=splits,
            chunks=chunks,
        )
    launch_paged_decode(
        call, workspace, splits=splits, turn=turn, shared_lens=shared_lens, chunks=chunks
    )


_PAGED_DECODE = define_op(
    f"paged_decode({SCHEMA}, int splits, int? turn, Tensor? shared_lens, Tensor? places, "
    "int chunks, Tensor(c!) partial_out, Tensor(d!) partial_lse, Tensor(e!) finished) -> ()",
    cpu=_launch,
    cuda=_launch,
)
