"""The `flex` backend: torch's flex_attention, under masks given as functions.

A second opinion on every other backend, and the place for a mask of one's own.  A step's rows are
laid out by request, [reqs, extend], and so are its keys: gathered through the page table, as many
as the longest request has.  What a row sees is then a function of positions.
"""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from paceline.attention.capability import triton_reasons
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.flex_attention import MaskMod, attend
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.step_view import StepView

_COMPILED_DIMS = range(16, 257)  # head dims for which the compiled kernel has room


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexBuffers:
    """Room for the gathered keys and values of one layer: layers take turns."""

    k: Tensor  # [max_reqs * keys * num_kv_heads * head_dim, of the largest layer]  KV dtype
    v: Tensor  # [the same of v_head_dim]  KV dtype; empty where V lies in K
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexRows:
    """A step's rows by request.  A row that its request does not bring is another's, and dropped.

    Worked example, extend_lens [1, 2] behind prefixes of [5, 3]:

        tokens     [[0, 1], [1, 2]]
        positions  [[5, 3], [3, 4]]
        ends       [[6, 4], [4, 5]]
        places     [0, 2, 3]
    """

    tokens: Tensor  # [padded_reqs, extend]  int64  of the step
    places: Tensor  # [padded_tokens]  int64  of each token in padded_reqs * extend
    positions: Tensor  # [padded_reqs, extend]  int64
    ends: Tensor  # [padded_reqs, extend]  int64  a row sees no key at this index, or behind it

    def of(self, x: Tensor) -> Tensor:
        """[padded_reqs, heads, extend, dim] of x: [padded_tokens, heads, dim]."""
        rows = x.index_select(0, self.tokens.view(-1))
        return rows.view(*self.tokens.shape, *x.shape[1:]).transpose(1, 2)

    def flat(self, x: Tensor) -> Tensor:
        """[padded_tokens, heads, ...] of x: [padded_reqs, heads, extend, ...]."""
        return x.transpose(1, 2).flatten(0, 1).index_select(0, self.places)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexPlan:
    """The page-table layout, the rows by request, and room for their keys."""

    table: PageTablePlan
    rows: FlexRows
    width: int  # pages of each request that are gathered: those of the longest
    buffers: FlexBuffers


@dataclass(frozen=True)
class FlexBackend(AttentionBackend[FlexBuffers, FlexPlan]):
    """Compiled on CUDA; on a CPU torch's definition of the operator, scores and all.

    Holds the keys of max_reqs requests at full length; a ragged step also takes its requests times
    the longest of them in rows.  A class derived from it with a `mask_mod` of its own hides more
    keys by it: docs/python.md, "A mask of one's own".
    """

    name = "flex"
    mask_mod: ClassVar[MaskMod | None] = None  # of positions; hides keys, and shows none
    capabilities = Capabilities(
        device_types=frozenset({"cpu", "cuda"}),
        min_cuda_arch=(8, 0),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        page_sizes=None,
        head_dims=None,
        v_head_dim_differs=True,
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL, MaskKind.BLOCK}),
        window=True,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.NEVER,  # plan reads how many pages the longest request has
        host_plan=False,
        loads_dead_slots=False,
        step_alone=True,
        chunks=ChunkSupport.ALWAYS,
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, what compiles on CUDA, and what a mask of one's own leaves open."""
        reasons = super().unsupported_reasons(config)
        if config.device_type == "cuda":
            reasons += triton_reasons("cuda")
            dims = {dim for heads in config.heads for dim in (heads.head_dim, heads.v_head_dim)}
            for dim in sorted(dims - set(_COMPILED_DIMS)):
                reasons.append(f"head dim must be 16 to 256 on cuda, got {dim}")
        if type(self).mask_mod is not None:
            looks_ahead = config.masks & {MaskKind.BLOCK, MaskKind.FULL}
            if looks_ahead or config.cache_free:
                got = sorted(mask.value for mask in looks_ahead) or ["cache-free steps"]
                reasons.append(f"steps must look back alone under a mask of one's own, got {got}")
            if config.encoder:
                reasons.append(
                    "keys must have positions under a mask of one's own, got an encoder's"
                )
        return reasons

    def make_buffers(self, limits: Limits) -> FlexBuffers:
        """Keys and values of the largest step of the largest layer."""
        sizes_k, sizes_v = [0], [0]
        for spec in limits.layers:
            rows = limits.max_reqs * limits.max_pages[spec.group] * limits.page_size
            sizes_k.append(rows * spec.num_kv_heads * spec.head_dim)
            sizes_v.append(0 if spec.v_in_k else rows * spec.num_kv_heads * spec.v_head_dim)
        empty = partial(torch.zeros, dtype=limits.kv_dtype, device=limits.device)
        return FlexBuffers(k=empty(max(sizes_k)), v=empty(max(sizes_v)), page_size=limits.page_size)

    def plan(self, view: StepView, buffers: FlexBuffers) -> FlexPlan:
        """Where each row lies, and how far it sees; reads the longest kv_len."""
        table, extend, device = page_table_plan(view), view.max_extend_len, view.positions.device
        starts = table.cu_seqlens_q[:-1].long()
        tokens = starts.unsqueeze(1) + torch.arange(extend, device=device)
        tokens = tokens.clamp(max=view.padded_tokens - 1)
        own = torch.arange(view.padded_tokens, device=device) - starts.index_select(0, view.req_ids)
        if view.mask is MaskKind.CAUSAL:
            ends = view.positions + 1
        elif view.mask is MaskKind.BLOCK:
            assert view.visible_end is not None, "a step of blocks says where they end"
            ends = view.visible_end.long()
        else:  # FULL; of a tree the bits say which
            ends = table.kv_lens.long().index_select(0, view.req_ids)
        rows = FlexRows(
            tokens=tokens,
            places=view.req_ids * extend + own,
            positions=view.positions[tokens],
            ends=ends[tokens],
        )
        longest = int(table.kv_lens.max())
        width = -(-longest // buffers.page_size)
        return FlexPlan(table=table, rows=rows, width=width, buffers=buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FlexPlan, part: Part
    ) -> tuple[Tensor, Tensor]:
        """See AttentionBackend.forward."""
        spec, rows = layer.spec, plan.rows
        if part is Part.STEP:
            keys, values = rows.of(k), rows.of(v)
        else:
            pages = plan.table.page_tables[spec.group][:, : plan.width]
            keys = _gather(layer.k_cache, pages, plan.buffers.k)
            if spec.v_in_k:
                values = keys[..., : spec.v_head_dim]
            else:
                values = _gather(layer.v_cache, pages, plan.buffers.v)
        _clear(values, plan.table, part, spec.window)
        seen, reach = _mask(plan, part, spec.window, type(self).mask_mod)
        by_request, normalizer = attend(
            rows.of(q), keys, values, seen, reach, scale=spec.scale, soft_cap=spec.soft_cap
        )
        out, lse = rows.flat(by_request), rows.flat(normalizer)
        if layer.sinks is not None and part is Part.ALL:
            out = (out * torch.sigmoid(lse - layer.sinks).unsqueeze(-1)).to(q.dtype)
        return out, lse


def _gather(pages: Tensor, table: Tensor, into: Tensor) -> Tensor:
    """[reqs, heads, max_pages * page_size, dim], a view of `into`, which is written.

    pages: [num_pages, page_size, heads, dim]; table: [reqs, max_pages] int32.
    """
    reqs, width = table.shape
    size, *row = pages.shape[1:]
    rows = into[: reqs * width * size * row[0] * row[1]]
    torch.index_select(pages, 0, table.reshape(-1), out=rows.view(reqs * width, size, *row))
    return rows.view(reqs, width * size, *row).transpose(1, 2)


def _clear(values: Tensor, table: PageTablePlan, part: Part, lookback: Lookback | None) -> None:
    """Zero, in place, the values that no row of a request may see: a weight of 0 hides no NaN.
    Where V lies in K, that part of these keys, whose scores nobody counts.

    values: [padded_reqs, num_kv_heads, keys of the part, v_head_dim].
    """
    prefix = table.prefix_lens.unsqueeze(1)
    end = prefix if part is Part.PREFIX else table.kv_lens.unsqueeze(1)
    keys = torch.arange(values.shape[2], device=values.device).unsqueeze(0)
    keys = keys + prefix if part is Part.STEP else keys
    dead = keys >= end
    if lookback is not None:
        dead = dead | (keys <= _last_hidden(lookback, prefix))
    values.masked_fill_(dead[:, None, :, None], 0.0)


def _mask(
    plan: FlexPlan, part: Part, lookback: Lookback | None, own: MaskMod | None
) -> tuple[MaskMod, Tensor]:
    """(which keys a row sees, [padded_reqs, extend] an index that bounds them).

    A row of a tree sees its ancestors, and two branches have one position each.
    """
    rows, prefix, tree = plan.rows, plan.table.prefix_lens, plan.table.tree_mask
    ends, first = rows.ends, torch.zeros_like(prefix)  # of the part: the key at index 0
    if part is Part.PREFIX:
        ends, tree = prefix.long().unsqueeze(1).expand_as(ends), None
    elif part is Part.STEP:
        first = prefix
    last = torch.full_like(prefix[:1], rows.tokens.shape[1] - 1)
    behind = None if lookback is None else _last_hidden(lookback, rows.positions)

    def seen(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = position = kv_idx + first[batch]
        sees = key < ends[batch, q_idx]
        if tree is not None:
            is_prefix = key < prefix[batch]
            row = torch.minimum((key - prefix[batch]).clamp(min=0), last[0])
            sees = sees & (is_prefix | tree[rows.tokens[batch, q_idx], row])
            position = torch.where(is_prefix, key, rows.positions[batch, row])
        if behind is not None:
            sees = sees & (position > behind[batch, q_idx])
        if own is not None:
            sees = sees & own(batch, head, rows.positions[batch, q_idx], position)
        return sees

    return seen, ends - first.unsqueeze(1)


def _last_hidden(lookback: Lookback, positions: Tensor) -> Tensor:
    """The last key before those that rows at `positions` see; negative where they see all."""
    if isinstance(lookback, Chunk):
        return positions // lookback.size * lookback.size - 1
    return positions - lookback
