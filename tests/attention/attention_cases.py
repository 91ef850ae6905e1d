"""Attention steps over a paged pool, and what they mean: a walk in float64, one key at a time.

Every key is a needle: values are as large as the number of keys, so that one key too few, too many
or taken from another place changes an output row by O(1).  Whatever no live row may read (page 0,
free pages, the tail of a last page) is NaN.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.attention.contract import AttentionSpec, LayerCache, Part
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import GroupView, StepView

# A tree of five nodes; a chain would be (-1, 0, 1, 2, 3).
PARENTS = (-1, 0, 0, 1, 1)
SCALES = (0.25, 0.75)  # true value / stored, of K and V
SINKS = (0.5, -1.0, 2.0, 1.5, 0.0, 1.0, -0.5)  # of the first heads


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step and the layer it runs through."""

    prefix_lens: tuple[int, ...] = (0, 7, 18)
    extend_lens: tuple[int, ...] = (1, 2, 5)
    mask: MaskKind = MaskKind.CAUSAL
    window: int | None = None
    soft_cap: float | None = None
    page_size: int = 3
    is_permuted: bool = True
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    part: Part = Part.ALL
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False  # the cache is float8_e4m3fn with SCALES
    has_sinks: bool = False  # SINKS
    padded_reqs: int = 0  # rows behind the live ones, each with prefix 1


def ancestors(node: int) -> set[int]:
    """A node of the tree, its parent, and so on up."""
    found = set()
    while node >= 0:
        found.add(node)
        node = PARENTS[node]
    return found


@dataclass(frozen=True, eq=False)
class Request:
    """One request's contiguous keys and values, in float64."""

    prefix: int
    extend: int
    keys: Tensor  # [prefix + extend, kv_heads, head_dim]
    values: Tensor  # [prefix + extend, kv_heads, v_head_dim]
    queries: Tensor  # [extend, heads, head_dim]


@dataclass(frozen=True, eq=False)
class Built:
    """A case with its data."""

    case: Case
    requests: tuple[Request, ...]
    view: StepView
    layer: LayerCache
    q: Tensor  # [padded_tokens, heads, head_dim]
    num_live: int  # tokens of live requests


def build(case: Case, seed: int = 0) -> Built:
    """Random data laid out in a pool of NaN."""
    random = torch.Generator().manual_seed(seed)
    requests = tuple(
        _request(case, prefix, extend, random)
        for prefix, extend in zip(case.prefix_lens, case.extend_lens, strict=True)
    )
    num_pages = [-(-(r.prefix + r.extend) // case.page_size) for r in requests]
    total, width = sum(num_pages), max(num_pages) + 2
    ids = torch.arange(1, total + 1)
    if case.is_permuted:
        ids = 1 + torch.randperm(2 * total, generator=random)[:total]
    stored = torch.float8_e4m3fn if case.is_fp8 else case.dtype
    k_scale, v_scale = SCALES if case.is_fp8 else (1.0, 1.0)
    k_cache = _nan(2 * total + 1, case.page_size, case.kv_heads, case.head_dim, dtype=stored)
    v_cache = _nan(2 * total + 1, case.page_size, case.kv_heads, case.v_head_dim, dtype=stored)
    reqs = len(requests) + case.padded_reqs
    table = torch.zeros(reqs, width, dtype=torch.int32)
    for index, request in enumerate(requests):
        first = sum(num_pages[:index])
        table[index, : num_pages[index]] = ids[first : first + num_pages[index]]
        for position in range(request.prefix + request.extend):
            page = table[index, position // case.page_size]
            slot = position % case.page_size
            k_cache[page, slot] = (request.keys[position] / k_scale).to(stored)
            v_cache[page, slot] = (request.values[position] / v_scale).to(stored)
    stride = max(case.extend_lens)
    q = torch.cat(
        [request.queries for request in requests]
        + [torch.zeros(case.padded_reqs * stride, case.heads, case.head_dim)]
    )
    return Built(
        case=case,
        requests=requests,
        view=_view(case, table, stride),
        layer=LayerCache(
            spec=_spec(case),
            k_cache=k_cache,
            v_cache=v_cache,
            k_scale=torch.tensor([k_scale]) if case.is_fp8 else None,
            v_scale=torch.tensor([v_scale]) if case.is_fp8 else None,
            sinks=torch.tensor(SINKS[: case.heads]) if case.has_sinks else None,
        ),
        q=q.to(case.dtype),
        num_live=sum(case.extend_lens),
    )


def _request(case: Case, prefix: int, extend: int, random: torch.Generator) -> Request:
    keys = prefix + extend

    def rounded(*shape: int, scale: float, stored: float | None = None) -> Tensor:
        made = torch.randn(*shape, generator=random) * scale
        if stored is not None and case.is_fp8:
            return (made / stored).to(torch.float8_e4m3fn).double() * stored
        return made.to(case.dtype).double()

    return Request(
        prefix=prefix,
        extend=extend,
        keys=rounded(keys, case.kv_heads, case.head_dim, scale=0.7, stored=SCALES[0]),
        values=rounded(keys, case.kv_heads, case.v_head_dim, scale=2.0 * keys, stored=SCALES[1]),
        queries=rounded(extend, case.heads, case.head_dim, scale=0.7),
    )


def _nan(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.full(shape, float("nan"), dtype=dtype)


def _spec(case: Case) -> AttentionSpec:
    return AttentionSpec(
        layer_id=0,
        group=0,
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        scale=0.6,
        window=case.window,
        soft_cap=case.soft_cap,
    )


def _view(case: Case, table: Tensor, stride: int) -> StepView:
    prefix = torch.tensor([*case.prefix_lens, *[1] * case.padded_reqs], dtype=torch.int32)
    extend = torch.tensor([*case.extend_lens, *[stride] * case.padded_reqs], dtype=torch.int32)
    ends = extend.cumsum(0).int()
    tokens = int(ends[-1])
    tree_mask = None
    if case.mask is MaskKind.TREE:
        rows = [[j in ancestors(i) for j in range(stride)] for n in extend for i in range(n)]
        tree_mask = torch.tensor(rows)
    return StepView(
        row_ids=torch.arange(1, len(prefix) + 1),
        prefix_lens=prefix,
        extend_lens=extend,
        kv_lens=prefix + extend,
        cu_seqlens_q=torch.cat((torch.zeros(1, dtype=torch.int32), ends)),
        req_ids=torch.repeat_interleave(extend),
        positions=torch.zeros(tokens, dtype=torch.int64),
        input_ids=torch.zeros(tokens, dtype=torch.int64),
        logits_loc=ends.long() - 1,
        groups=(GroupView(page_table=table, out_cache_loc=torch.zeros(tokens, dtype=torch.int64)),),
        mask=case.mask,
        tree_mask=tree_mask,
        max_extend_len=stride,
        kv_len_bound=64,
    )


# --- the oracle -----------------------------------------------------------------------------------


def visible_keys(case: Case, prefix: int, extend: int, row: int) -> list[int]:
    """The key positions one row of a request may see, in order.

    A row's position is prefix + its place in the step; under a tree, prefix + its depth.  A window
    of w shows the keys whose position is more than the row's minus w.
    """
    in_step: list[int] = []
    place = {j: prefix + j for j in range(extend)}
    if case.mask is MaskKind.TREE:
        place = {j: prefix + len(ancestors(j)) - 1 for j in range(extend)}
        in_step = sorted(ancestors(row))
    elif case.mask is MaskKind.FULL:
        in_step = list(range(extend))
    else:
        in_step = list(range(row + 1))
    if case.part is Part.PREFIX:
        in_step = []
    positions = {j: j for j in range(prefix)} | {prefix + j: place[j] for j in in_step}
    if case.window is None:
        return sorted(positions)
    return sorted(j for j, at in positions.items() if at > place[row] - case.window)


def walk(
    built: Built, case: Case | None = None, change: Callable[[list[int]], list[int]] = list
) -> tuple[Tensor, Tensor]:
    """(out [live tokens, heads, v_head_dim], lse [live tokens, heads]) in float64.

    `case` and `change` state a wrong meaning: other rules, or other keys than the visible ones.
    """
    case = case or built.case
    outs, lses = [], []
    for request in built.requests:
        for row in range(request.extend):
            seen = change(visible_keys(case, request.prefix, request.extend, row))
            for head in range(case.heads):
                out, lse = _attend(case, request, request.queries[row, head], head, seen)
                outs.append(out)
                lses.append(lse)
    out = torch.stack(outs).view(-1, case.heads, case.v_head_dim)
    return out, torch.stack(lses).view(-1, case.heads)


def _attend(
    case: Case, request: Request, query: Tensor, head: int, seen: list[int]
) -> tuple[Tensor, Tensor]:
    kv_head = head // (case.heads // case.kv_heads)
    total = torch.zeros((), dtype=torch.float64)
    mixed = torch.zeros(case.v_head_dim, dtype=torch.float64)
    for key in seen:
        score = 0.6 * (query @ request.keys[key, kv_head])
        if case.soft_cap is not None:
            score = case.soft_cap * torch.tanh(score / case.soft_cap)
        weight = score.exp()
        total = total + weight
        mixed = mixed + weight * request.values[key, kv_head]
    if not seen:
        return mixed, torch.tensor(-math.inf, dtype=torch.float64)
    sink = math.exp(SINKS[head]) if case.has_sinks and case.part is Part.ALL else 0.0
    return mixed / (total + sink), total.log()


# --- wrong meanings -------------------------------------------------------------------------------


def wrong_meanings(built: Built) -> dict[str, tuple[Tensor, Tensor]]:
    """What the step would give under each mistake that could matter to it."""
    case = built.case
    meanings = {
        "first key dropped": walk(built, change=lambda keys: keys[1:]),
        "last key dropped": walk(built, change=lambda keys: keys[:-1]),
    }
    others: dict[str, Case] = {}
    if case.window is not None:
        others["window one wider"] = replace(case, window=case.window + 1)
        others["window one narrower"] = replace(case, window=case.window - 1)
        others["no window"] = replace(case, window=None)
    if case.soft_cap is not None:
        others["no soft cap"] = replace(case, soft_cap=None)
    if case.has_sinks and case.part is Part.ALL:
        others["no sinks"] = replace(case, has_sinks=False)
    if case.mask is not MaskKind.CAUSAL and case.part is Part.ALL:
        others["a chain"] = replace(case, mask=MaskKind.CAUSAL)
    if case.mask is MaskKind.TREE and case.part is Part.ALL:
        others["a full mask"] = replace(case, mask=MaskKind.FULL)
    return meanings | {
        name: walk(built, other)
        for name, other in others.items()
        if not _means_the_same(case, other)
    }


def _means_the_same(case: Case, other: Case) -> bool:
    """Whether every row gets the same in both; then a mistake between them is none."""
    for prefix, extend in zip(case.prefix_lens, case.extend_lens, strict=True):
        for row in range(extend):
            seen = visible_keys(case, prefix, extend, row)
            if seen and case.has_sinks != other.has_sinks:
                return False
            is_capped_otherwise = case.soft_cap != other.soft_cap and len(seen) > 1
            if is_capped_otherwise or seen != visible_keys(other, prefix, extend, row):
                return False
    return True
