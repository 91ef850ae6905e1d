"""The `flex` backend: torch's flex_attention, under masks given as functions.

A second opinion on every other backend, and the place for a mask of one's own.  A step's rows are
laid out by request, [reqs, extend], and so are its keys: gathered through the page table, as many
as a request may have.  What a row sees is then a function of positions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from paceline.attention.capability import triton_reasons
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.core.modes import MaskKind
from paceline.kernels.stand_in import device_type
from paceline.kernels.step_view import StepView

# (batch, head, q_idx, kv_idx), tensors of one number each -> whether the key is seen.
MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]

_BLOCK = 128  # rows and keys of a tile that the compiled kernel passes over as one
_COMPILED_DIMS = range(16, 257)  # head dims for which the compiled kernel has room
_RECOMPILES = 64  # of one engine: by mask, window, soft cap and part, each of few rows and of many


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlexBuffers:
    """Room for the gathered keys and values of one layer: layers take turns."""

    k: Tensor  # [max_reqs * keys * num_kv_heads * head_dim, of the largest layer]  the cache's dtype
    v: Tensor  # the same of v_head_dim; empty where V lies in K


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
        graph=GraphSupport.UNIFORM,  # a graph for any split of its tokens has room for each row
        host_plan=False,
        loads_dead_slots=True,
        step_alone=True,
    )

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, what compiles on CUDA, and what a mask of one's own leaves open."""
        reasons = super().unsupported_reasons(config)
        if config.device_type == "cuda":
            reasons += triton_reasons("cuda")
            dims = {dim for heads in config.heads for dim in (heads.head_dim, heads.v_head_dim)}
            for dim in sorted(dims - set(_COMPILED_DIMS)):
                reasons.append(f"head dim must be 16 to 256 on cuda, got {dim}")
        if self.mask_mod is not None:
            looks_ahead = config.masks & {MaskKind.BLOCK, MaskKind.FULL}
            if looks_ahead or config.cache_free:
                got = sorted(mask.value for mask in looks_ahead) or ["cache-free steps"]
                reasons.append(f"steps must look back alone under a mask of one's own, got {got}")
            if config.encoder:
                reasons.append("keys must have positions under a mask of one's own, got an encoder's")
        return reasons

    def make_buffers(self, limits: Limits) -> FlexBuffers:
        """Keys and values of the largest step of the largest layer."""
        sizes_k, sizes_v = [0], [0]
        for spec in limits.layers:
            rows = limits.max_reqs * limits.max_pages[spec.group] * limits.page_size
            sizes_k.append(rows * spec.num_kv_heads * spec.head_dim)
            sizes_v.append(0 if spec.v_in_k else rows * spec.num_kv_heads * spec.v_head_dim)
        empty = partial(torch.zeros, dtype=limits.kv_dtype, device=limits.device)
        return FlexBuffers(k=empty(max(sizes_k)), v=empty(max(sizes_v)))

    def plan(self, view: StepView, buffers: FlexBuffers) -> FlexPlan:
        """Where each row lies, and how far it sees.  Device-only, static shapes."""
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
        return FlexPlan(table=table, rows=rows, buffers=buffers)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: FlexPlan, part: Part
    ) -> tuple[Tensor, Tensor]:
        """See AttentionBackend.forward."""
        spec, rows = layer.spec, plan.rows
        if part is Part.STEP:
            keys, values = rows.of(k), rows.of(v)
        else:
            pages = plan.table.page_tables[spec.group]
            keys = _gather(layer.k_cache, pages, plan.buffers.k)
            if spec.v_in_k:
                values = keys[..., : spec.v_head_dim]
            else:
                values = _gather(layer.v_cache, pages, plan.buffers.v)
        seen = _mask(plan, part, spec.window, type(self).mask_mod)
        tiles = _tiles(plan, part, keys.shape[2], seen)
        by_request, normalizer = _attend(
            rows.of(q), keys, values, tiles, spec.scale, spec.soft_cap
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


def _mask(plan: FlexPlan, part: Part, window: int | None, own: MaskMod | None) -> MaskMod:
    """Which keys of its request a row sees.  q_idx: the row; kv_idx: the key's index, from the
    first of the part."""
    rows, prefix, tree = plan.rows, plan.table.prefix_lens, plan.table.tree_mask
    last = rows.tokens.shape[1] - 1

    def seen(batch: Tensor, head: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        key = kv_idx + prefix[batch] if part is Part.STEP else kv_idx
        is_prefix = key < prefix[batch]
        row, position = (key - prefix[batch]).clamp(0, last), rows.positions[batch, q_idx]
        if part is Part.PREFIX:
            sees = is_prefix
        else:
            sees = key < rows.ends[batch, q_idx]
            if tree is not None:
                sees = sees & (is_prefix | tree[rows.tokens[batch, q_idx], row])
        if tree is not None:  # two branches have one position each
            key = torch.where(is_prefix, key, rows.positions[batch, row])
        if window is not None:
            sees = sees & (key > position - window)
        return sees if own is None else sees & own(batch, head, position, key)

    return seen


def _tiles(plan: FlexPlan, part: Part, num_keys: int, seen: MaskMod) -> Any:
    """The BlockMask of a part: of each tile of rows the tiles of keys up to its furthest key."""
    from torch.nn.attention.flex_attention import BlockMask

    rows, prefix = plan.rows, plan.table.prefix_lens.long().unsqueeze(1)
    reqs, extend = rows.tokens.shape
    reach = prefix.expand(reqs, extend) if part is Part.PREFIX else rows.ends
    if part is Part.STEP:
        reach = reach - prefix
    spare = -extend % _BLOCK
    furthest = torch.nn.functional.pad(reach, (0, spare)).view(reqs, 1, -1, _BLOCK).amax(-1)
    most = -(-num_keys // _BLOCK)
    indices = torch.arange(most, device=reach.device, dtype=torch.int32)
    return BlockMask.from_kv_blocks(
        ((furthest + _BLOCK - 1) // _BLOCK).clamp(0, most).int(),
        indices.repeat(*furthest.shape, 1),
        BLOCK_SIZE=_BLOCK,
        mask_mod=seen,
        seq_lengths=(extend, num_keys),
        compute_q_blocks=False,
    )


def _score_mod(soft_cap: float | None) -> Callable[..., Tensor]:
    """What becomes of a scaled score."""
    if soft_cap is None:
        return lambda score, batch, head, q_idx, kv_idx: score
    cap = soft_cap
    return lambda score, batch, head, q_idx, kv_idx: cap * torch.tanh(score / cap)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, tiles: Any, scale: float, soft_cap: float | None
) -> tuple[Tensor, Tensor]:
    """(out [reqs, heads, extend, v_head_dim], lse [reqs, heads, extend] float32).

    q: [reqs, heads, extend, head_dim]; k, v: [reqs, kv_heads, keys, *head_dim].
    """
    change = _score_mod(soft_cap)
    if device_type(q.device) == "cuda":
        from torch.nn.attention.flex_attention import AuxRequest

        with torch._dynamo.config.patch(recompile_limit=_RECOMPILES):
            out, more = _compiled()(
                q, k, v, change, tiles, scale, True, return_aux=AuxRequest(lse=True)
            )
        return out, more.lse
    # The public function would have torch._dynamo trace each new shape, on the way to this.
    from torch._higher_order_ops.flex_attention import math_attention

    out, lse, *_ = math_attention(q, k, v, change, tiles.as_tuple(), scale, {})
    return out, lse * math.log(2.0)


@cache
def _compiled() -> Callable[..., Any]:
    """The kernel, for all shapes of a mask."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True, fullgraph=True)
