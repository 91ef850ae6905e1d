"""Paged attention workloads on which a wrong index cannot hide; shared by tests and benchmarks.

Pages are randomly permuted; page 0, free pages and the tail of each last page hold NaN; unused
page-table entries name page 0; q is a slice of a fused row and the caches are views of one pool.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_attention_reference,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """One batch of requests."""

    prefix_lens: tuple[int, ...]  # [reqs]
    extend_lens: tuple[int, ...]  # [reqs]


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer's shape and options."""

    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # None: dtype; float8_e4m3fn has scales
    sinks: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCase:
    """The tensors of one workload."""

    shape: Shape
    q: Tensor  # [tokens, heads, head_dim]  strided rows
    k_cache: Tensor  # [num_pages, page_size, kv_heads, head_dim]  strided pages
    v_cache: Tensor  # [num_pages, page_size, kv_heads, v_head_dim]  strided pages
    k_scale: Tensor | None  # [1]  float32
    v_scale: Tensor | None  # [1]  float32
    sinks: Tensor | None  # [heads]  float32
    page_table: Tensor  # [reqs, max_pages]  int32  unused entries 0
    prefix_lens: Tensor  # [reqs]  int32
    extend_lens: Tensor  # [reqs]  int32
    kv_lens: Tensor  # [reqs]  int32
    cu_seqlens_q: Tensor  # [reqs + 1]  int32
    mask: MaskKind
    tree_mask: Tensor | None  # [tokens, longest extend + 3]  bool  True behind a request's extend

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @property
    def cache(self) -> PagedCache:
        return PagedCache(self.k_cache, self.v_cache, self.k_scale, self.v_scale)

    @property
    def rows(self) -> PagedRows:
        return PagedRows(
            self.page_table,
            self.prefix_lens,
            self.kv_lens,
            self.cu_seqlens_q,
            int(self.extend_lens.max()),
            self.tree_mask,
            self.mask,
        )

    @property
    def weighing(self) -> Weighing:
        return Weighing(self.scale, self.shape.window, self.shape.soft_cap, sinks=self.sinks)

    def call(self, *, prefix_only: bool = False) -> PagedCall:
        """A launch into outputs full of NaN."""
        weighing = self.weighing
        if prefix_only:
            weighing = weighing._replace(prefix_only=True, sinks=None)
        return PagedCall(self.q, self.cache, self.rows, weighing, *self.empty_outputs())

    def empty_outputs(self) -> tuple[Tensor, Tensor]:
        """(out, lse) full of NaN, to be written by a kernel."""
        tokens, heads, _ = self.q.shape
        out = self.q.new_full((tokens, heads, self.shape.v_head_dim), float("nan"))
        return out, self.q.new_full((tokens, heads), float("nan"), dtype=torch.float32)


def make_case(
    batch: BatchSpec,
    shape: Shape,
    *,
    seed: int,
    device: str = "cpu",
    mask: MaskKind = MaskKind.CAUSAL,
) -> PagedCase:
    """Random tensors for `batch`; the same seed gives the same case on every device."""
    generator = torch.Generator().manual_seed(seed)
    pairs = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    kv_lens = [prefix + extend for prefix, extend in pairs]
    page_table, num_pages = _permuted_pages(kv_lens, shape.page_size, generator)
    k_cache, v_cache = _poisoned_caches(kv_lens, page_table, num_pages, shape, generator)
    tokens = sum(batch.extend_lens)
    fused = torch.randn(
        tokens, shape.num_heads + 2, shape.head_dim, generator=generator, dtype=torch.float32
    )
    ends = torch.tensor(batch.extend_lens).cumsum(0)
    cu_seqlens_q = torch.cat((torch.zeros(1, dtype=torch.int64), ends))
    sinks = torch.randn(shape.num_heads, generator=generator) * 2.0 + 1.0
    is_quantised = shape.kv_dtype == torch.float8_e4m3fn
    tree_mask = _random_trees(batch, generator) if mask is MaskKind.TREE else None
    return PagedCase(
        shape=shape,
        q=(fused * 0.5).to(shape.dtype).to(device)[:, 1:-1],
        k_cache=k_cache.to(device)[:, 1],
        v_cache=v_cache.to(device)[:, 1],
        k_scale=torch.tensor([0.37], device=device) if is_quantised else None,
        v_scale=torch.tensor([1.9], device=device) if is_quantised else None,
        sinks=sinks.to(device) if shape.sinks else None,
        page_table=page_table.to(device),
        prefix_lens=torch.tensor(batch.prefix_lens, dtype=torch.int32, device=device),
        extend_lens=torch.tensor(batch.extend_lens, dtype=torch.int32, device=device),
        kv_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
        cu_seqlens_q=cu_seqlens_q.to(torch.int32).to(device),
        mask=mask,
        tree_mask=None if tree_mask is None else tree_mask.to(device),
    )


def _random_trees(batch: BatchSpec, generator: torch.Generator) -> Tensor:
    """[tokens, longest extend + 3] bool: ancestors in one random tree per request."""
    width = max(batch.extend_lens) + 3
    rows = []
    for extend in batch.extend_lens:
        tree = torch.ones(extend, width, dtype=torch.bool)
        tree[:, :extend] = False
        for node in range(extend):
            if node:
                parent = int(torch.randint(node, (), generator=generator))
                tree[node, :extend] = tree[parent, :extend]
            tree[node, node] = True
        rows.append(tree)
    return torch.cat(rows)


def reference(
    case: PagedCase,
    *,
    prefix_only: bool = False,
    window: int | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition of `case`; `window` replaces the case's own."""
    weighing = case.weighing._replace(prefix_only=prefix_only)
    if window is not None:
        weighing = weighing._replace(window=window)
    return paged_attention_reference(
        case.q, case.cache, case.rows, weighing, compute_dtype=compute_dtype
    )


def worst_error(case: PagedCase, actual: Tensor, *, prefix_only: bool = False) -> float:
    """The largest error of any token in units of its limit: up to 1 is right.

    The limit is twice plain torch's own error at the case's dtype plus one rounding, token by
    token, so that a long row's small values are not measured with a short row's large ones.
    """
    expected, _ = reference(case, prefix_only=prefix_only)
    plain, _ = reference(case, prefix_only=prefix_only, compute_dtype=case.shape.dtype)
    plain_error = (plain.double() - expected).abs().amax(dim=(1, 2))
    rounding = torch.finfo(case.shape.dtype).eps * expected.abs().amax(dim=(1, 2))
    error = (actual.double() - expected).abs().amax(dim=(1, 2))
    tiny = torch.finfo(torch.float32).tiny
    return (error / (2.0 * plain_error + rounding + tiny)).max().item()


def first_key_dropped(case: PagedCase, *, prefix_only: bool = False) -> Tensor:
    """A wrong answer: the window is one key too narrow, or the longest row loses its first key."""
    longest = int(case.kv_lens.max())
    width = min(case.shape.window or longest, longest)
    return reference(case, prefix_only=prefix_only, window=width - 1)[0]


def _permuted_pages(
    kv_lens: list[int], page_size: int, generator: torch.Generator
) -> tuple[Tensor, int]:
    """A page table over randomly permuted pages, and the number of pages in the pool."""
    needed = [-(-length // page_size) for length in kv_lens]
    num_pages = sum(needed) + 4
    pool = (torch.randperm(num_pages - 1, generator=generator) + 1).to(torch.int32)
    page_table = torch.zeros(len(kv_lens), max(needed) + 1, dtype=torch.int32)
    taken = 0
    for row, count in enumerate(needed):
        page_table[row, :count] = pool[taken : taken + count]
        taken += count
    return page_table, num_pages


def _poisoned_caches(
    kv_lens: list[int],
    page_table: Tensor,
    num_pages: int,
    shape: Shape,
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Two pools [num_pages, 2 layers, page_size, kv_heads, dim], NaN but for live keys."""
    nan = float("nan")
    base = (num_pages, 2, shape.page_size, shape.num_kv_heads)
    dtype = shape.kv_dtype or shape.dtype
    k_pool = torch.full((*base, shape.head_dim), nan, dtype=dtype)
    v_pool = torch.full((*base, shape.v_head_dim), nan, dtype=dtype)
    for row, length in enumerate(kv_lens):
        positions = torch.arange(length)
        pages = page_table[row, positions // shape.page_size].long()
        slots = positions % shape.page_size
        for pool in (k_pool, v_pool):
            rows = torch.randn(length, shape.num_kv_heads, pool.shape[-1], generator=generator)
            pool[pages, 1, slots] = rows.to(dtype)
    return k_pool, v_pool
