"""PagedCall: what one launch of paged attention reads and writes, from a plan to a kernel."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor

from paceline.core.modes import MaskKind
from paceline.kernels.scaled_latents import ScaledLatents

# Of an operator that takes a call; flat() and taken() keep its order.
SCHEMA = (
    "Tensor q, Tensor k_cache, Tensor v_cache, Tensor? k_scale, Tensor? v_scale, "
    "Tensor? turned, Tensor? row_scales, "
    "Tensor page_table, Tensor prefix_lens, Tensor kv_lens, Tensor cu_seqlens_q, "
    "int max_extend_len, Tensor? tree_mask, str mask, Tensor? visible_end, "
    "float scale, int? window, float? soft_cap, bool prefix_only, Tensor? sinks, int? chunk, "
    "Tensor(a!) out, Tensor(b!)? lse"
)
_MASKS = {mask.value: mask for mask in MaskKind}


class PagedCache(NamedTuple):
    """One layer's pages, which may be strided views; a float8_e4m3fn cache has scales: one for K
    and one for V, or, of scaled latents (kernels/scaled_latents.py), one for each row."""

    k: Tensor  # [num_pages, page_size, kv_heads, head_dim]  q's dtype or float8_e4m3fn
    v: Tensor  # [num_pages, page_size, kv_heads, v_head_dim]  k's dtype
    k_scale: Tensor | None = None  # [1]  float32
    v_scale: Tensor | None = None  # [1]  float32
    beside: ScaledLatents | None = None  # of latents whose codes are k, and v: a query's dims are
    # theirs, then those of what turned

    @property
    def head_dim(self) -> int:
        """Of queries."""
        return self.k.shape[3] + (0 if self.beside is None else self.beside.turned.shape[3])

    @property
    def v_in_k(self) -> bool:
        """Whether V is the leading columns of K, and need not be read beside it."""
        if self.beside is not None:
            return True
        is_part = self.v.shape[3] < self.k.shape[3] and self.v.stride() == self.k.stride()
        return is_part and self.v.data_ptr() == self.k.data_ptr()


class PagedRows(NamedTuple):
    """The requests of a step and the pages of one cache group that are theirs."""

    page_table: Tensor  # [reqs, max_pages]  int32  contiguous rows
    prefix_lens: Tensor  # [reqs]  int32
    kv_lens: Tensor  # [reqs]  int32  prefix + extend
    cu_seqlens_q: Tensor  # [reqs + 1]  int32
    max_extend_len: int  # no request extends by more
    tree_mask: Tensor | None = None  # [tokens, >= max_extend_len]  bool  with MaskKind.TREE only
    mask: MaskKind = MaskKind.CAUSAL
    visible_end: Tensor | None = None  # [tokens]  int32  with MaskKind.BLOCK only: each token sees
    # the keys before its own


class Weighing(NamedTuple):
    """How a query weighs its keys."""

    scale: float
    window: int | None = None  # keys visible, the query's own included
    soft_cap: float | None = None
    prefix_only: bool = False  # without the step's own keys; a window counts from the query
    sinks: Tensor | None = None  # [heads]  float32
    chunk: int | None = None  # tokens: a query sees the keys from the last multiple of it that is
    # not behind the query; without a window

    @property
    def most_keys(self) -> int | None:
        """That a query sees at most, its own included; None: all."""
        return self.window if self.chunk is None else self.chunk


class PagedCall(NamedTuple):
    """Attend q to a paged cache, into out and lse, which alone are mutated."""

    q: Tensor  # [tokens, heads, head_dim]  rows may be strided
    cache: PagedCache
    rows: PagedRows
    weighing: Weighing
    out: Tensor  # [tokens, heads, v_head_dim]  q's dtype
    lse: Tensor | None  # [tokens, heads]  float32  natural log, without sinks; None: not wanted,
    # which the CPU's operator of whole steps alone allows

    def flat(self) -> tuple[Any, ...]:
        """The arguments of SCHEMA."""
        q, cache, rows, weighing, out, lse = self
        mask, beside = rows.mask.value, cache.beside or (None, None)
        return (q, *cache[:-1], *beside, *rows[:-2], mask, rows.visible_end, *weighing, out, lse)

    @staticmethod
    def taken(args: Sequence[Any]) -> "tuple[PagedCall, Sequence[Any]]":
        """The call that `args` begin with, and what is behind it."""
        q, k, v, k_scale, v_scale, turned, row_scales = args[:7]
        page_table, prefix_lens, kv_lens, cu_seqlens_q = args[7:11]
        longest, tree_mask, mask, visible_end = args[11:15]
        scale, window, soft_cap, prefix_only, sinks, chunk, out, lse = args[15:23]
        beside = None if turned is None else ScaledLatents(turned, row_scales)
        lens = (prefix_lens, kv_lens, cu_seqlens_q, longest)
        call = PagedCall(
            q,
            PagedCache(k, v, k_scale, v_scale, beside),
            PagedRows(page_table, *lens, tree_mask, _MASKS[mask], visible_end),
            Weighing(scale, window, soft_cap, prefix_only, sinks, chunk),
            out,
            lse,
        )
        return call, args[23:]
