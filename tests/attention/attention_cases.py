"""What an attention step over a paged case means: a walk in float64, one key at a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from paged_cases import BatchSpec, PagedCase, Shape, ancestors, make_case
from torch import Tensor

from paceline.attention.contract import LayerCache, Part
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step and the layer it runs through."""

    prefix_lens: tuple[int, ...] = (0, 7, 18)
    extend_lens: tuple[int, ...] = (1, 2, 5)
    mask: MaskKind = MaskKind.CAUSAL
    window: Lookback | None = None
    soft_cap: float | None = None
    page_size: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    v_head_dim: int = 8
    part: Part = Part.ALL
    dtype: torch.dtype = torch.float32
    is_fp8: bool = False  # the cache is float8_e4m3fn with scales
    has_sinks: bool = False
    padded_reqs: int = 0  # rows behind the live ones, each with prefix 1


@dataclass(frozen=True, eq=False)
class Request:
    """One request's contiguous keys and values, in float64."""

    prefix: int
    extend: int
    tree: tuple[int, ...]  # [extend] parents; () without a tree
    keys: Tensor  # [prefix + extend, kv_heads, head_dim]
    values: Tensor  # [prefix + extend, kv_heads, v_head_dim]
    queries: Tensor  # [extend, heads, head_dim]


@dataclass(frozen=True, eq=False)
class Built:
    """A case with its data."""

    case: Case
    paged: PagedCase
    requests: tuple[Request, ...]  # copies: what is written to the pool later is not in them
    view: StepView
    layer: LayerCache

    @property
    def q(self) -> Tensor:
        return self.paged.q


def build(case: Case, seed: int = 0) -> Built:
    """Needles in a layer's pool, whose pages lie one behind another."""
    shape = Shape(
        num_heads=case.heads,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        v_head_dim=case.v_head_dim,
        page_size=case.page_size,
        window=case.window,
        soft_cap=case.soft_cap,
        dtype=case.dtype,
        kv_dtype=torch.float8_e4m3fn if case.is_fp8 else None,
        sinks=case.has_sinks,
    )
    batch = BatchSpec(
        prefix_lens=case.prefix_lens, extend_lens=case.extend_lens, padded_reqs=case.padded_reqs
    )
    paged = make_case(batch, shape, seed=seed, mask=case.mask, needles=True)
    paged = replace(paged, k_cache=paged.k_cache.contiguous(), v_cache=paged.v_cache.contiguous())
    requests = tuple(_request(paged, index) for index in range(len(case.prefix_lens)))
    return Built(case=case, paged=paged, requests=requests, view=paged.view(), layer=paged.layer)


def _request(paged: PagedCase, index: int) -> Request:
    keys, values = paged.contiguous(index)
    return Request(
        prefix=paged.batch.prefix_lens[index],
        extend=paged.batch.extend_lens[index],
        tree=paged.trees[index] if paged.trees else (),
        keys=keys,
        values=values,
        queries=paged.q[paged.rows_of(index)].double(),
    )


# --- the oracle -----------------------------------------------------------------------------------


def visible_keys(case: Case, request: Request, row: int) -> list[int]:
    """The key positions one row of a request may see, in order.

    A row's position is prefix + its place in the step; under a tree, prefix + its depth.  A window
    of w shows the keys whose position is more than the row's minus w, chunks of c those that as
    many whole chunks lie before.
    """
    prefix, extend, tree = request.prefix, request.extend, request.tree
    in_step: list[int] = []
    place = {j: prefix + j for j in range(extend)}
    if case.mask is MaskKind.TREE:
        place = {j: prefix + len(ancestors(tree, j)) - 1 for j in range(extend)}
        in_step = sorted(ancestors(tree, row))
    elif case.mask is MaskKind.FULL:
        in_step = list(range(extend))
    else:
        in_step = list(range(row + 1))
    if case.part is Part.PREFIX:
        in_step = []
    before = [] if case.part is Part.STEP else range(prefix)
    positions = {j: j for j in before} | {prefix + j: place[j] for j in in_step}
    if case.window is None:
        return sorted(positions)
    if isinstance(case.window, Chunk):
        size = case.window.size
        return sorted(j for j, at in positions.items() if at // size == place[row] // size)
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
            seen = change(visible_keys(case, request, row))
            for head in range(case.heads):
                out, lse = _attend(built.paged, case, request, row, head, seen)
                outs.append(out)
                lses.append(lse)
    out = torch.stack(outs).view(-1, case.heads, case.v_head_dim)
    return out, torch.stack(lses).view(-1, case.heads)


def _attend(
    paged: PagedCase, case: Case, request: Request, row: int, head: int, seen: list[int]
) -> tuple[Tensor, Tensor]:
    if not seen:
        nothing = torch.zeros(case.v_head_dim, dtype=torch.float64)
        return nothing, torch.tensor(-math.inf, dtype=torch.float64)
    kv_head = head // (case.heads // case.kv_heads)
    scores = paged.scale * (request.keys[seen, kv_head] @ request.queries[row, head])
    if case.soft_cap is not None:
        scores = case.soft_cap * torch.tanh(scores / case.soft_cap)
    weights = scores.exp()
    total = sunk = weights.sum()
    if paged.sinks is not None and case.has_sinks and case.part is Part.ALL:
        sunk = total + paged.sinks[head].double().exp()
    return weights @ request.values[seen, kv_head] / sunk, total.log()


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
        others["window one wider"] = replace(case, window=_wider(case.window, 1))
        others["window one narrower"] = replace(case, window=_wider(case.window, -1))
        others["no window"] = replace(case, window=None)
    if isinstance(case.window, Chunk):
        others["a window of its size"] = replace(case, window=case.window.size)
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
        if not _means_the_same(built, other)
    }


def _wider(window: Lookback, by: int) -> Lookback:
    return Chunk(window.size + by) if isinstance(window, Chunk) else window + by


def _means_the_same(built: Built, other: Case) -> bool:
    """Whether every row gets the same in both; then a mistake between them is none."""
    case = built.case
    for request in built.requests:
        for row in range(request.extend):
            seen = visible_keys(case, request, row)
            if seen and case.has_sinks != other.has_sinks:
                return False
            is_capped_otherwise = case.soft_cap != other.soft_cap and len(seen) > 1
            if is_capped_otherwise or seen != visible_keys(other, request, row):
                return False
    return True
