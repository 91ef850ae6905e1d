"""FlashInfer's ragged wrapper for trees: the rows of a step among themselves, under a mask of bits.

Facts of flashinfer-python 0.6.12 this relies on (prefill.py, attention/variants.cuh):

* Query i of a request with n rows sees its row j when bit i * n + j is set, counted from the
  request's byte offset, a byte's lowest bit first.
* A wrapper that is bound to a mask masks by it.  `plan` without a mask leaves the bound tensors
  alone, so both are ours to fill on the device.  (`plan` with a packed mask counts its offsets in
  bits, the kernels count bytes.)
* In CUDA-graph mode a schedule follows from lengths.  Rows of a tree step are as many for every
  request and in every step of a shape, so its one plan, at the start, serves all of them.
"""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_wrappers import (
    StepShape,
    distinct_constants,
    schedule_bytes,
)
from paceline.attention.contract import AttentionSpec, LayerCache, Limits
from paceline.kernels.merge_partials import merge_partials

BITS = 8  # of a byte
LN2 = 0.6931471805599453


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TreeMask:
    """The mask of trees of one shape as the kernels read it; rows * rows bits per request."""

    rows_indptr: Tensor  # [reqs + 1]  int32  in rows, of queries and of keys
    bytes_indptr: Tensor  # [reqs + 1]  int32  in bytes
    bits: Tensor  # [reqs * bytes of a request]  uint8
    places: Tensor  # [8]  uint8  the value of each bit of a byte, the lowest first

    @classmethod
    def make(cls, shape: StepShape, device: torch.device) -> Self:
        """Constants, and bits that `pack` fills."""
        size = -(-shape.rows * shape.rows // BITS)
        numbers = torch.arange(shape.reqs + 1, dtype=torch.int32, device=device)
        return cls(
            rows_indptr=numbers * shape.rows,
            bytes_indptr=numbers * size,
            bits=torch.zeros(shape.reqs * size, dtype=torch.uint8, device=device),
            places=torch.tensor([1 << bit for bit in range(BITS)], dtype=torch.uint8).to(device),
        )

    def pack(self, tree_mask: Tensor) -> None:
        """Write a step's mask, [tokens, rows] bool, contiguous, as bits.  Recordable."""
        reqs = len(self.rows_indptr) - 1
        seen = tree_mask.view(reqs, -1)
        unused = len(self.bits) // reqs * BITS - seen.shape[1]
        places = torch.nn.functional.pad(seen, (0, unused)).view(-1, BITS) * self.places
        self.bits.copy_(places.sum(1))


class TreeRows:
    """The wrappers of one shape of tree steps, one for each set of layer constants."""

    def __init__(self, library: Any, limits: Limits, shape: StepShape, workspace: Tensor) -> None:
        self.mask = TreeMask.make(shape, limits.device)
        self._wrappers = {
            spec: _planned(library, limits, spec=spec, shape=shape, mask=self.mask, work=workspace)
            for spec in distinct_constants(limits.layers)
        }

    def add_to(
        self,
        out: Tensor,  # [tokens, heads, v_head_dim]  of the prefix
        lse: Tensor,  # [tokens, heads]  float32  natural log, of the prefix
        q: Tensor,  # [tokens, heads, head_dim]
        k: Tensor,  # [tokens, kv_heads, head_dim]
        v: Tensor,  # [tokens, kv_heads, v_head_dim]
        *,
        spec: AttentionSpec,
        sinks: Tensor | None,  # [heads]  float32
    ) -> None:
        """Add the step's own rows, and the sinks, to the attention of its prefix: out and lse."""
        own_out, own_lse = torch.empty_like(out), torch.empty_like(lse)
        self._wrappers[spec].run(q, k, v, out=own_out, lse=own_lse, return_lse=True)
        own_lse.mul_(LN2)  # the library's is base 2
        merge_partials(out, lse, own_out, own_lse, sinks=sinks, out=out, lse=lse)


def as_cached(k: Tensor, v: Tensor, layer: LayerCache, loc: Tensor) -> tuple[Tensor, Tensor]:
    """The step's keys and values as the cache rounded them, without its scales.

    k, v: [tokens, kv_heads, head_dim]; loc: [tokens] int64, the slots they were written to.
    """
    stored_as = layer.k_cache.dtype
    if stored_as == k.dtype:
        return k, v
    caches = (cache.flatten(0, 1).view(torch.uint8) for cache in (layer.k_cache, layer.v_cache))
    keys, values = (cache.index_select(0, loc).view(stored_as) for cache in caches)
    return keys.to(k.dtype), values.to(v.dtype)


def _planned(
    library: Any,
    limits: Limits,
    *,
    spec: AttentionSpec,
    shape: StepShape,
    mask: TreeMask,
    work: Tensor,  # [workspace_bytes]  uint8  partial results
) -> Any:
    """A wrapper with its only plan; compiles what is missing."""
    schedule = torch.zeros(
        schedule_bytes(spec, shape, limits.device), dtype=torch.uint8, device=limits.device
    )
    wrapper = library.BatchPrefillWithRaggedKVCacheWrapper(
        work,
        "NHD",
        use_cuda_graph=True,
        qo_indptr_buf=mask.rows_indptr,
        kv_indptr_buf=mask.rows_indptr,
        custom_mask_buf=mask.bits,
        mask_indptr_buf=mask.bytes_indptr,
        backend="fa2",  # as the paged wrappers; of the library's the one that takes masks
    )
    wrapper.reset_workspace_buffer(work, schedule)
    offsets = torch.arange(shape.reqs + 1, dtype=torch.int32) * shape.rows
    wrapper.plan(
        offsets,
        offsets,
        spec.num_heads,
        spec.num_kv_heads,
        spec.head_dim,
        head_dim_vo=spec.v_head_dim,
        causal=False,
        pos_encoding_mode="NONE",
        sm_scale=spec.scale,
        window_left=-1,
        logits_soft_cap=spec.soft_cap,
        q_data_type=limits.dtype,
        kv_data_type=limits.dtype,
        non_blocking=True,
    )
    return wrapper
