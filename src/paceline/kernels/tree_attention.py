"""tree_attention: a step's new tokens among themselves, each seeing itself and its ancestors.

The part of a tree step that no prefix holds: cascade merges it with the attention of the prefix.
Keys and values are the step's own, not the cache's, so nothing is looked up in page tables.

Worked example, 2 requests of 3 rows, a root with two children: row 5 is the third row of the second
request, so tree_mask[5] = [1, 0, 1], and it sees the keys of rows 3 and 5.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op


def tree_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_mask: Tensor,
    *,
    extend_len: int,
    scale: float,
    soft_cap: float | None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition in `compute_dtype`; arguments as `tree_attention`.  Mutates nothing.

    Returns out [tokens, heads, v_head_dim] in compute_dtype and lse [tokens, heads] float32 natural
    log.  A row that sees no key gives 0 and −inf.
    """
    heads, kv_heads = q.shape[1], k.shape[1]
    # r request, i row, k KV head, g query head of its group, j row seen, d head dim
    grouped = q.to(compute_dtype).reshape(-1, extend_len, kv_heads, heads // kv_heads, q.shape[2])
    keys = k.to(compute_dtype).reshape(-1, extend_len, kv_heads, k.shape[2])
    values = v.to(compute_dtype).reshape(-1, extend_len, kv_heads, v.shape[2])
    scores = torch.einsum("rikgd,rjkd->rkgij", grouped, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)
    seen = tree_mask[:, :extend_len].reshape(-1, 1, 1, extend_len, extend_len)
    scores = scores.masked_fill(~seen, float("-inf"))
    lse = torch.logsumexp(scores, -1)
    weights = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0).unsqueeze(-1))
    out = torch.einsum("rkgij,rjkd->rikgd", weights, values)
    return (
        out.reshape(q.shape[0], heads, v.shape[2]),
        lse.permute(0, 3, 1, 2).reshape(q.shape[0], heads).float(),
    )


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_mask: Tensor,
    *,
    extend_len: int,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
    by_triton: bool = False,
) -> None:
    """Attend each row of a uniform step to the rows of its request that `tree_mask` shows.

    q: [reqs * extend_len, heads, head_dim]; k: [reqs * extend_len, kv_heads, head_dim]; v: the same
    with v_head_dim; all of one dtype, maybe strided slices of a fused projection, their last
    dimension contiguous; tree_mask: [reqs * extend_len, >= extend_len] bool, rows maybe strided.
    Mutates out [tokens, heads, v_head_dim] in q's dtype and contiguous lse [tokens, heads] float32
    (natural log); a row that sees no key gives 0 and −inf.  No sinks: the merge applies them.
    by_triton: on a CPU too, by its interpreter.
    Graph-safe: the grid depends on shapes only; no host sync.  Raises KernelArgumentError.
    """
    _check_queries(q, extend_len)
    tokens, heads, head_dim = q.shape
    for name, rows, dim in (("k", k, head_dim), ("v", v, None)):
        _check_rows(name, rows, q, dim=dim)
    if k.shape[1] != v.shape[1] or heads % k.shape[1]:
        reject(
            "k",
            expected=f"of v's {v.shape[1]} KV heads, a divisor of q's {heads}",
            got=k,
            remedy="use a model whose KV heads divide its heads",
        )
    _check_tree(tree_mask, q, extend_len)
    _check_rows("out", out, q, dim=v.shape[2])
    if out.shape[1] != heads:
        reject("out", expected=f"of {heads} heads", got=out, remedy="allocate one row per query")
    fits = lse.shape == (tokens, heads) and lse.dtype == torch.float32 and lse.is_contiguous()
    if not fits or lse.device != q.device:
        reject(
            "lse",
            expected=f"contiguous float32 [{tokens}, {heads}] on {q.device}",
            got=lse,
            remedy="allocate it per step",
        )
    if tokens:
        run = _BY_TRITON if by_triton else _TREE_ATTENTION
        run(q, k, v, tree_mask, extend_len, scale, soft_cap, out, lse)


def _check_queries(q: Tensor, extend_len: int) -> None:
    if q.dim() != 3 or q.stride(-1) != 1 or extend_len < 1 or q.shape[0] % extend_len:
        reject(
            "q",
            expected=f"[reqs * {extend_len}, heads, head_dim] with a contiguous last dimension",
            got=q,
            remedy="a tree step brings the same number of rows for every request",
        )


def _check_rows(name: str, rows: Tensor, q: Tensor, *, dim: int | None) -> None:
    """[tokens, some heads, dim] beside q; dim None: any."""
    fits = rows.dim() == 3 and rows.shape[0] == q.shape[0] and dim in (None, rows.shape[2])
    same = rows.dtype == q.dtype and rows.device == q.device
    if not fits or not same or rows.stride(-1) != 1:
        reject(
            name,
            expected=f"{q.dtype} [{q.shape[0]}, heads, {dim or 'dim'}] on {q.device} with a "
            "contiguous last dimension",
            got=rows,
            remedy="pass the step's own rows, as the projection made them",
        )


def _check_tree(tree_mask: Tensor, q: Tensor, extend_len: int) -> None:
    fits = tree_mask.dim() == 2 and tree_mask.shape[0] == q.shape[0]
    fits = fits and tree_mask.shape[1] >= extend_len and tree_mask.stride(1) == 1
    if not fits or tree_mask.dtype != torch.bool or tree_mask.device != q.device:
        reject(
            "tree_mask",
            expected=f"bool [{q.shape[0]}, >= {extend_len}] on {q.device} with contiguous rows",
            got=tree_mask,
            remedy="pass the step view's tree_mask",
        )


def _tree_attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_mask: Tensor,
    extend_len: int,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    made, normalizer = tree_attention_reference(
        q,
        k,
        v,
        tree_mask,
        extend_len=extend_len,
        scale=scale,
        soft_cap=soft_cap,
        compute_dtype=torch.float32,
    )
    out.copy_(made)
    lse.copy_(normalizer)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tree_mask: Tensor,
    extend_len: int,
    scale: float,
    soft_cap: float | None,
    out: Tensor,
    lse: Tensor,
) -> None:
    require_triton("tree_attention", otherwise="choose the torch attention backend")
    from paceline.kernels._triton.tree_attention import launch_tree_attention

    launch_tree_attention(
        q, k, v, tree_mask, extend_len=extend_len, scale=scale, soft_cap=soft_cap, out=out, lse=lse
    )


_SCHEMA = (
    "(Tensor q, Tensor k, Tensor v, Tensor tree_mask, int extend_len, float scale, "
    "float? soft_cap, Tensor(a!) out, Tensor(b!) lse) -> ()"
)
_TREE_ATTENTION = define_op("tree_attention" + _SCHEMA, cpu=_tree_attention_cpu, cuda=_launch)
_BY_TRITON = define_op("tree_attention_by_triton" + _SCHEMA, cpu=_launch, cuda=_launch)
