"""Paged attention workloads on which a wrong index cannot hide; shared by tests and benchmarks.

Pages are randomly permuted; page 0, free pages and the tail of each last page hold NaN; unused
page-table entries name page 0; q is a slice of a fused row and the caches are views of one pool.
A kernel reads a case as `call`, a backend as `view`, `layer`, `limits` and `fresh_rows`.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from paceline.attention.contract import AttentionSpec, LayerCache, Limits
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_attention_reference,
)
from paceline.kernels.step_view import GroupView, StepView
from paceline.proof.rig.paged import errors, permuted_pages

SCALES = (0.25, 0.75)  # true value / stored, of K and V in fp8; products are exact in any dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSpec:
    """One batch of requests."""

    prefix_lens: tuple[int, ...]  # [reqs]
    extend_lens: tuple[int, ...]  # [reqs]
    padded_reqs: int = 0  # behind them: a prefix of 1, the longest extend, no pages

    @property
    def num_live(self) -> int:
        """Tokens of requests that are not padded."""
        return sum(self.extend_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """One layer's shape and options."""

    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 64
    v_head_dim: int = 64
    page_size: int = 16
    window: Lookback | None = None
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None  # None: dtype; float8_e4m3fn has scales
    sinks: bool = False

    @property
    def is_quantised(self) -> bool:
        return self.kv_dtype == torch.float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PagedCase:
    """The tensors of one workload."""

    shape: Shape
    batch: BatchSpec
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
    trees: tuple[tuple[int, ...], ...]  # [reqs] parents, -1: none; () without a tree
    tree_mask: Tensor | None  # [tokens, longest extend + 3]  bool  True behind a request's extend
    visible_end: Tensor | None = None  # [tokens]  int32  of blocks: keys before it are seen

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
            self.visible_end,
        )

    @property
    def weighing(self) -> Weighing:
        plain = Weighing(self.scale, soft_cap=self.shape.soft_cap, sinks=self.sinks)
        return looking_back(plain, self.shape.window)

    @property
    def spec(self) -> AttentionSpec:
        shape = self.shape
        return AttentionSpec(
            layer_id=0,
            group=0,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            v_head_dim=shape.v_head_dim,
            scale=self.scale,
            window=shape.window,
            soft_cap=shape.soft_cap,
        )

    @property
    def layer(self) -> LayerCache:
        return LayerCache(
            spec=self.spec,
            k_cache=self.k_cache,
            v_cache=self.v_cache,
            k_scale=self.k_scale,
            v_scale=self.v_scale,
            sinks=self.sinks,
        )

    @property
    def limits(self) -> Limits:
        """The least a backend must allocate for this one step."""
        shape = self.shape
        return Limits(
            device=self.q.device,
            dtype=shape.dtype,
            kv_dtype=self.k_cache.dtype,
            layers=(self.spec,),
            max_reqs=len(self.kv_lens),
            max_tokens=len(self.q),
            max_pages=(self.page_table.shape[1],),
            windows=(shape.window,),
            page_size=shape.page_size,
        )

    def view(self) -> StepView:
        """What attention reads of the step: the case's lengths and pages, a copy of its trees."""
        reqs, tokens, size = len(self.kv_lens), len(self.q), self.shape.page_size
        longest = int(self.extend_lens.max())
        req_ids = torch.arange(reqs, device=self.q.device).repeat_interleave(self.extend_lens)
        starts = (self.prefix_lens - self.cu_seqlens_q[:-1])[req_ids]
        places = torch.arange(tokens, device=self.q.device) + starts
        loc = self.page_table[req_ids, places // size].long() * size + places % size
        loc[self.batch.num_live :] = 0
        mask, positions = None, places
        if self.tree_mask is not None:
            mask = self.tree_mask[:, :longest].contiguous()
            positions = self.prefix_lens[req_ids] + mask.sum(1) - 1
        return StepView(
            row_ids=torch.arange(1, reqs + 1, device=self.q.device),
            prefix_lens=self.prefix_lens,
            extend_lens=self.extend_lens,
            kv_lens=self.kv_lens,
            cu_seqlens_q=self.cu_seqlens_q,
            req_ids=req_ids,
            positions=positions.long(),
            rope_positions=torch.zeros_like(loc),
            input_ids=torch.zeros_like(loc),
            logits_loc=self.cu_seqlens_q[1:].long() - 1,
            groups=(
                GroupView(
                    page_table=self.page_table,
                    out_cache_loc=loc,
                    prefix_lens=self.prefix_lens,
                    kv_lens=self.kv_lens,
                ),
            ),
            mask=self.mask,
            tree_mask=mask,
            visible_end=self.visible_end,
            max_extend_len=longest,
            kv_len_bound=self.page_table.shape[1] * size,
        )

    def fresh_rows(self) -> tuple[Tensor, Tensor]:
        """The step's own k and v [tokens, kv_heads, *], slices of one projection."""
        loc, size = self.view().groups[0].out_cache_loc, self.shape.page_size
        made = [
            (cache[loc // size, loc % size].float() * (1.0 if scale is None else scale)).flatten(1)
            for cache, scale in ((self.k_cache, self.k_scale), (self.v_cache, self.v_scale))
        ]
        k, v = torch.cat(made, 1).to(self.q.dtype).split([rows.shape[1] for rows in made], 1)
        heads = self.shape.num_kv_heads
        return k.unflatten(1, (heads, -1)), v.unflatten(1, (heads, -1))

    def rows_of(self, request: int) -> slice:
        """Its tokens in the step."""
        return slice(int(self.cu_seqlens_q[request]), int(self.cu_seqlens_q[request + 1]))

    def contiguous(self, request: int) -> tuple[Tensor, Tensor]:
        """Its true k and v [kv_len, kv_heads, *] float64, collected slot by slot."""
        size, pages = self.shape.page_size, self.page_table[request].tolist()
        slots = [(pages[j // size], j % size) for j in range(int(self.kv_lens[request]))]
        k, v = (
            torch.stack([cache[slot].double() for slot in slots])
            for cache in (self.k_cache, self.v_cache)
        )
        if self.k_scale is not None and self.v_scale is not None:
            return k * self.k_scale.double(), v * self.v_scale.double()
        return k, v

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
    needles: bool = False,
) -> PagedCase:
    """Random tensors for `batch`; the same seed gives the same case on every device.

    needles: values as large as their request has keys, so that one key too few, too many or taken
    from another place changes an output row by O(1).
    """
    generator = torch.Generator().manual_seed(seed)
    pairs = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    live_lens = [prefix + extend for prefix, extend in pairs]
    prefix_lens = torch.tensor(batch.prefix_lens + (1,) * batch.padded_reqs).int()
    longest = max(batch.extend_lens)
    extends = batch.extend_lens + (longest,) * batch.padded_reqs
    extend_lens = torch.tensor(extends).int()
    page_table, num_pages = permuted_pages(live_lens, shape.page_size, generator, spare=3)
    k_cache, v_cache = _poisoned_caches(
        live_lens, page_table, num_pages, shape, generator, needles=needles
    )
    page_table = F.pad(page_table, (0, 1, 0, batch.padded_reqs))
    fused = torch.randn(batch.num_live, shape.num_heads + 2, shape.head_dim, generator=generator)
    fused = F.pad(fused, (0, 0, 0, 0, 0, sum(extends) - batch.num_live))
    sinks = torch.randn(shape.num_heads, generator=generator) * 2.0 + 1.0
    trees = _random_trees(extends, generator) if mask is MaskKind.TREE else ()
    has_blocks = mask is MaskKind.BLOCK
    k_scale, v_scale = (
        torch.tensor([scale], device=device) if shape.is_quantised else None for scale in SCALES
    )
    return PagedCase(
        shape=shape,
        batch=batch,
        q=(fused * 0.5).to(shape.dtype).to(device)[:, 1:-1],
        k_cache=k_cache.to(device)[:, 1],
        v_cache=v_cache.to(device)[:, 1],
        k_scale=k_scale,
        v_scale=v_scale,
        sinks=sinks.to(device) if shape.sinks else None,
        page_table=page_table.to(device),
        prefix_lens=prefix_lens.to(device),
        extend_lens=extend_lens.to(device),
        kv_lens=(prefix_lens + extend_lens).to(device),
        cu_seqlens_q=F.pad(extend_lens.cumsum(0), (1, 0)).int().to(device),
        mask=mask,
        trees=trees,
        tree_mask=_tree_mask(trees, width=longest + 3).to(device) if trees else None,
        visible_end=_block_ends(prefix_lens, extends).to(device) if has_blocks else None,
    )


def ancestors(tree: tuple[int, ...], node: int) -> list[int]:
    """A node, its parent, and so on up."""
    return [node, *ancestors(tree, tree[node])] if node >= 0 else []


def _random_trees(
    extends: tuple[int, ...], generator: torch.Generator
) -> tuple[tuple[int, ...], ...]:
    """The parents of one random tree per request."""
    return tuple(
        tuple(
            int(torch.randint(node, (), generator=generator)) if node else -1
            for node in range(extend)
        )
        for extend in extends
    )


def _tree_mask(trees: tuple[tuple[int, ...], ...], *, width: int) -> Tensor:
    """[tokens, width] bool: the ancestors of each node, and True behind the tree."""
    seen = [
        [j >= len(tree) or j in ancestors(tree, node) for j in range(width)]
        for tree in trees
        for node in range(len(tree))
    ]
    return torch.tensor(seen)


def _block_ends(prefix_lens: Tensor, extends: tuple[int, ...]) -> Tensor:
    """[tokens] int32: in turn a token stands alone and five, or fewer, see each other."""
    ends = []
    for prefix, extend in zip(prefix_lens.tolist(), extends, strict=True):
        for row in range(extend):
            last = row if row % 6 == 0 else min(row - row % 6 + 5, extend - 1)
            ends.append(prefix + last + 1)
    return torch.tensor(ends, dtype=torch.int32)


def reference(
    case: PagedCase,
    *,
    prefix_only: bool = False,
    window: Lookback | None = None,
    compute_dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """The definition of `case`; `window` replaces the case's own."""
    weighing = case.weighing._replace(prefix_only=prefix_only)
    if window is not None:
        weighing = looking_back(weighing, window)
    return paged_attention_reference(
        case.q, case.cache, case.rows, weighing, compute_dtype=compute_dtype
    )


def looking_back(weighing: Weighing, window: Lookback | None) -> Weighing:
    if isinstance(window, Chunk):
        return weighing._replace(window=None, chunk=window.size)
    return weighing._replace(window=window, chunk=None)


def worst_error(case: PagedCase, actual: Tensor, *, prefix_only: bool = False) -> float:
    """The largest error of any token, in the unit of `proof.rig.paged.errors`."""
    weighing = case.weighing._replace(prefix_only=prefix_only)
    return float(errors(actual, case.q, case.cache, case.rows, weighing).max())


def first_key_dropped(case: PagedCase, *, prefix_only: bool = False) -> Tensor:
    """A wrong answer: the window, or the chunk, is one key too narrow, or the longest row loses its
    first key."""
    longest, window = int(case.kv_lens.max()), case.shape.window
    if isinstance(window, Chunk):
        shorter = Chunk(min(window.size, longest) - 1)
        return reference(case, prefix_only=prefix_only, window=shorter)[0]
    width = min(window or longest, longest)
    return reference(case, prefix_only=prefix_only, window=width - 1)[0]


def _poisoned_caches(
    kv_lens: list[int],
    page_table: Tensor,
    num_pages: int,
    shape: Shape,
    generator: torch.Generator,
    *,
    needles: bool,
) -> tuple[Tensor, Tensor]:
    """Two pools [num_pages, 2 layers, page_size, kv_heads, dim], NaN but for live keys."""
    nan = float("nan")
    base = (num_pages, 2, shape.page_size, shape.num_kv_heads)
    dtype = shape.kv_dtype or shape.dtype
    k_pool = torch.full((*base, shape.head_dim), nan, dtype=dtype)
    v_pool = torch.full((*base, shape.v_head_dim), nan, dtype=dtype)
    k_scale, v_scale = SCALES if shape.is_quantised else (1.0, 1.0)
    for row, length in enumerate(kv_lens):
        positions = torch.arange(length)
        pages = page_table[row, positions // shape.page_size].long()
        slots = positions % shape.page_size
        size = 2.0 * length if needles else 1.0
        for pool, factor in ((k_pool, 1.0 / k_scale), (v_pool, size / v_scale)):
            rows = torch.randn(length, shape.num_kv_heads, pool.shape[-1], generator=generator)
            pool[pages, 1, slots] = (rows * factor).to(dtype)
    return k_pool, v_pool
