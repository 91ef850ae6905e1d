"""One attention step on a paged cache in which a wrong index cannot hide, for `bench_attention`.

Pages are permuted.  Page 0, free pages and the tail of each last page are NaN, so that a kernel
that reads a slot it may not shows NaN, and random values elsewhere show any other confusion.  A
library that multiplies masked slots by 0 gets large numbers there instead.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.contract import AttentionSpec, LayerCache, Limits
from paceline.attention.paged import cache_of
from paceline.bench.attention_shape import AttentionShape
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.kernels.paged_attention import PagedRows, Weighing
from paceline.kernels.scaled_latents import ScaledLatents, latents_of, quantise_latents
from paceline.kernels.step_view import GroupView, StepView
from paceline.proof.rig.paged import errors, permuted_pages

FREE_PAGES = 8  # poisoned, besides page 0
LARGE = 4096.0  # a finite poison, of any dtype but fp8
FP8_NAN, FP8_LARGE = 0x7F, 0x7E  # NaN and 448
REFERENCE_ROWS = 1024  # queries of one pass of the definition, whose scores are float64
KV_SCALES = (0.5, 2.0)  # of K and V in an fp8 cache; powers of two keep the comparison exact


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """One step over several layers, which differ in their K and V alone."""

    shape: AttentionShape
    kv_lens: tuple[int, ...]  # [reqs]
    view: StepView
    layers: tuple[LayerCache, ...]
    q: Tensor  # [tokens, num_heads, head_dim]  the model's dtype
    k: Tensor  # [tokens, num_kv_heads, head_dim]  the model's dtype; new keys of layer 0
    v: Tensor  # [tokens, num_kv_heads, v_head_dim]  the model's dtype; new values of layer 0

    @property
    def limits(self) -> Limits:
        """What a backend allocates for."""
        shape, table = self.shape, self.view.groups[0].page_table
        return Limits(
            device=self.q.device,
            dtype=self.q.dtype,
            kv_dtype=self.layers[0].k_cache.dtype,
            layers=tuple(layer.spec for layer in self.layers),
            max_reqs=len(self.kv_lens),
            max_tokens=self.q.shape[0],
            max_pages=(table.shape[1],),
            windows=(shape.lookback,),
            page_size=shape.page_size,
        )

    @property
    def step(self) -> Step:
        """The step as its scheduler would have decided it."""
        reqs, extend = len(self.kv_lens), self.shape.extend_len
        return Step(
            epoch=1,
            layout=StepLayout(
                rows=tuple(range(1, reqs + 1)), extend_lens=(extend,) * reqs, emits=(True,) * reqs
            ),
            is_ragged=extend > 1,
            prefix_lens_bound=tuple(length - extend for length in self.kv_lens),
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=(),
        )

    def worst_error(self, out: Tensor, requests: Sequence[int]) -> float:
        """The largest error of `requests`, in the unit of `proof.rig.paged.errors`.

        out: [tokens, num_heads, v_head_dim], of layer 0.
        """
        worst = 0.0
        for request in requests:
            for start in range(0, self.shape.extend_len, REFERENCE_ROWS):
                rows = range(start, min(start + REFERENCE_ROWS, self.shape.extend_len))
                worst = max(worst, self._error_of(out, request, rows))
        return worst

    def _error_of(self, out: Tensor, request: int, rows: range) -> float:
        """The largest error among some rows of a request; rows before them are their prefix."""
        one, layer = slice(request, request + 1), self.layers[0]
        first = request * self.shape.extend_len
        mine = slice(first + rows.start, first + rows.stop)
        prefix_lens = self.view.prefix_lens[one] + rows.start
        found = errors(
            out[mine],
            self.q[mine],
            cache_of(layer),
            PagedRows(
                self.view.groups[0].page_table[one],
                prefix_lens,
                prefix_lens + len(rows),
                self.view.cu_seqlens_q[:2].clamp(max=len(rows)),
                len(rows),
            ),
            Weighing(layer.spec.scale, chunk=self.shape.chunk),
        )
        return float(found.max())


def make_workload(
    shape: AttentionShape,
    kv_lens: Sequence[int],
    *,
    layers: int,
    device: torch.device,
    seed: int,
    finite: bool = False,
) -> Workload:
    """A step of `shape` whose requests have `kv_lens` keys each, at least extend_len.

    finite: poison with large numbers, for a backend that loads_dead_slots.
    """
    generator = torch.Generator(device).manual_seed(seed)
    page_table, num_pages = permuted_pages(kv_lens, shape.page_size, generator, spare=FREE_PAGES)
    slots = _slots(page_table, kv_lens, shape.page_size)
    pool = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    caches = tuple(_layer(shape, pool, slots, generator, finite=finite) for _ in range(layers))
    view = _view(shape, kv_lens, page_table)
    tokens = len(kv_lens) * shape.extend_len
    q = torch.randn(tokens, shape.num_heads, shape.head_dim, generator=generator, device=device)
    dtype: torch.dtype = getattr(torch, shape.dtype)
    new_k, new_v = _new_rows(caches[0], view.groups[0].out_cache_loc)
    return Workload(
        shape=shape,
        kv_lens=tuple(kv_lens),
        view=view,
        layers=caches,
        q=q.to(dtype),
        k=new_k.to(dtype),
        v=new_v.to(dtype),
    )


def kv_dtype_of(shape: AttentionShape) -> torch.dtype:
    """The dtype of the cache."""
    if shape.kv_dtype == "auto":
        dtype: torch.dtype = getattr(torch, shape.dtype)
        return dtype
    return torch.float8_e4m3fn


def _slots(page_table: Tensor, kv_lens: Sequence[int], page_size: int) -> Tensor:
    """[sum of kv_lens] int64: where the keys of each request lie, in order."""
    offsets = torch.arange(page_size, device=page_table.device)
    every = (page_table.long().unsqueeze(2) * page_size + offsets).flatten(1)
    return torch.cat([every[row, :length] for row, length in enumerate(kv_lens)])


def _layer(
    shape: AttentionShape,
    pool: tuple[int, ...],
    slots: Tensor,
    generator: torch.Generator,
    *,
    finite: bool,
) -> LayerCache:
    scales: tuple[Tensor | None, Tensor | None] = (None, None)
    if shape.kv_dtype != "auto":
        device = slots.device
        scales = (
            torch.tensor([KV_SCALES[0]], device=device),
            torch.tensor([KV_SCALES[1]], device=device),
        )
    spec = AttentionSpec(
        layer_id=0,
        group=0,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        v_head_dim=shape.heads.v_head_dim,
        scale=shape.head_dim**-0.5,
        window=shape.lookback,
        soft_cap=None,
        v_in_k=shape.heads.v_in_k,
    )
    if spec.v_in_k and shape.kv_dtype != "auto":
        dtype: torch.dtype = getattr(torch, shape.dtype)
        rows = _poisoned(pool, dtype, slots, generator, finite=finite)
        codes, of_rows = quantise_latents(rows[..., : spec.v_head_dim])
        beside = ScaledLatents(rows[..., spec.v_head_dim :].contiguous(), of_rows)
        return LayerCache(
            spec=spec,
            k_cache=codes,
            v_cache=codes,
            k_scale=None,
            v_scale=None,
            sinks=None,
            beside=beside,
        )
    k_cache = _poisoned(pool, kv_dtype_of(shape), slots, generator, finite=finite)
    if spec.v_in_k:
        v_cache = k_cache[..., : spec.v_head_dim]
    else:
        v_cache = _poisoned(pool, kv_dtype_of(shape), slots, generator, finite=finite)
    return LayerCache(
        spec=spec,
        k_cache=k_cache,
        v_cache=v_cache,
        k_scale=scales[0],
        v_scale=scales[1],
        sinks=None,
    )


def _poisoned(
    pool: tuple[int, ...],
    dtype: torch.dtype,
    slots: Tensor,
    generator: torch.Generator,
    *,
    finite: bool,
) -> Tensor:
    """A pool of NaN, or of large numbers, with random values at `slots`."""
    values = torch.randn(
        len(slots), *pool[2:], generator=generator, device=slots.device, dtype=torch.float32
    ).to(dtype)
    if dtype != torch.float8_e4m3fn:
        poison = LARGE if finite else float("nan")
        cache = torch.full(pool, poison, dtype=dtype, device=slots.device)
        cache.flatten(0, 1)[slots] = values
        return cache
    byte = FP8_LARGE if finite else FP8_NAN
    raw = torch.full(pool, byte, dtype=torch.uint8, device=slots.device)
    raw.flatten(0, 1)[slots] = values.view(torch.uint8)
    return raw.view(dtype)


def _view(shape: AttentionShape, kv_lens: Sequence[int], page_table: Tensor) -> StepView:
    """What derive would write for the step; every request extends by extend_len."""
    device, reqs, extend = page_table.device, len(kv_lens), shape.extend_len
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    req_ids = torch.arange(reqs, device=device).repeat_interleave(extend)
    steps = torch.arange(extend, device=device).repeat(reqs)
    positions = (lens - extend).long()[req_ids] + steps
    pages = page_table[req_ids, positions // shape.page_size].long()
    loc = pages * shape.page_size + positions % shape.page_size
    cu_seqlens_q = torch.arange(reqs + 1, dtype=torch.int32, device=device) * extend
    prefix_lens = lens - extend
    group = GroupView(
        page_table=page_table, out_cache_loc=loc, prefix_lens=prefix_lens, kv_lens=lens
    )
    return StepView(
        row_ids=1 + torch.arange(reqs, device=device),
        prefix_lens=prefix_lens,
        extend_lens=torch.full_like(lens, extend),
        kv_lens=lens,
        cu_seqlens_q=cu_seqlens_q,
        req_ids=req_ids,
        positions=positions,
        rope_positions=positions,
        input_ids=torch.zeros_like(positions),
        logits_loc=(cu_seqlens_q[1:] - 1).long(),
        groups=(group,),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=extend,
        kv_len_bound=page_table.shape[1] * shape.page_size,
    )


def _new_rows(layer: LayerCache, slots: Tensor) -> tuple[Tensor, Tensor]:
    """[tokens, num_kv_heads, head_dim] both: the true keys and values at some slots."""
    k, v = (_rows(cache, slots) for cache in (layer.k_cache, layer.v_cache))
    if layer.beside is not None:
        turned, scales = (_rows(part, slots) for part in layer.beside)
        latents = latents_of(k, scales)
        return torch.cat((latents, turned.float()), 2), latents
    if layer.k_scale is None or layer.v_scale is None:
        return k, v
    return k.float() * layer.k_scale, v.float() * layer.v_scale


def _rows(cache: Tensor, slots: Tensor) -> Tensor:
    """[tokens, heads, dim] as they are stored; fp8 has no indexing everywhere, its bytes do."""
    flat = cache.flatten(0, 1)
    if flat.dtype != torch.float8_e4m3fn:
        return flat[slots]
    return flat.view(torch.uint8)[slots].view(flat.dtype)
