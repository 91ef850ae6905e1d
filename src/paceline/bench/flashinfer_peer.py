"""FlashInfer as a peer of `bench_attention`: its paged wrappers, planned on the host as it wants.

Its cache is ours as it stands: [num_pages, page_size, num_kv_heads, head_dim] is its NHD layout.
"""

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from paceline.bench.attention_shape import AttentionShape
from paceline.bench.attention_workload import Workload

WORKSPACE_BYTES = 256 << 20
MODULE = "flashinfer"
HEAD_DIMS = (64, 128, 256)
PLAIN_GROUPS = (1, 2, 4, 8)  # query heads per KV head of the kernel without tensor cores
Make = Callable[[Workload], Callable[[int], Tensor]]


def absence(shape: AttentionShape, device_type: str) -> str | None:
    """Why FlashInfer cannot run `shape` here; None when it can."""
    if importlib.util.find_spec(MODULE) is None:
        return "the package flashinfer is not installed"
    if device_type != "cuda":
        return f"it needs a CUDA device, not {device_type}"
    if shape.latent_rank is not None:
        return "latents are another wrapper's: name flashinfer_mla among --backends"
    if shape.chunk is not None:
        return "its wrappers know no chunks: name flashinfer among --backends"
    if shape.dtype == "float32" or shape.head_dim not in HEAD_DIMS:
        heads = ", ".join(map(str, HEAD_DIMS))
        return f"it has 16-bit queries of head dims {heads}, not {shape.dtype} of {shape.head_dim}"
    return None


def version() -> str | None:
    """FlashInfer's version; None where it is absent."""
    if importlib.util.find_spec(MODULE) is None:
        return None
    return str(importlib.import_module(MODULE).__version__)


def variants(shape: AttentionShape) -> dict[str, Make]:
    """What may be timed, by name: each takes a workload and gives a run of one of its layers.

    Decode has two kernels: one on tensor cores, made for grouped heads, and one for few groups.
    """
    if shape.extend_len > 1:
        return {"flashinfer": prefill_run}
    found: dict[str, Make] = {"flashinfer tensor cores": partial(decode_run, use_tensor_cores=True)}
    if shape.num_heads // shape.num_kv_heads in PLAIN_GROUPS:
        found["flashinfer"] = partial(decode_run, use_tensor_cores=False)
    return found


def decode_run(workload: Workload, *, use_tensor_cores: bool) -> Callable[[int], Tensor]:
    """Plan a decode of `workload`."""
    wrapper = importlib.import_module(MODULE).BatchDecodeWithPagedKVCacheWrapper(
        _workspace(workload), "NHD", use_tensor_cores=use_tensor_cores
    )
    shape = workload.shape
    wrapper.plan(
        *_csr(workload),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        pos_encoding_mode="NONE",
        q_data_type=workload.q.dtype,
        kv_data_type=workload.layers[0].k_cache.dtype,
        sm_scale=workload.layers[0].spec.scale,
    )
    return _runner(wrapper, workload)


def prefill_run(workload: Workload) -> Callable[[int], Tensor]:
    """Plan an extend of `workload`."""
    wrapper = importlib.import_module(MODULE).BatchPrefillWithPagedKVCacheWrapper(
        _workspace(workload), "NHD"
    )
    shape = workload.shape
    wrapper.plan(
        workload.view.cu_seqlens_q,
        *_csr(workload),
        shape.num_heads,
        shape.num_kv_heads,
        shape.head_dim,
        shape.page_size,
        causal=True,
        pos_encoding_mode="NONE",
        q_data_type=workload.q.dtype,
        kv_data_type=workload.layers[0].k_cache.dtype,
        sm_scale=workload.layers[0].spec.scale,
    )
    return _runner(wrapper, workload)


def _runner(wrapper: Any, workload: Workload) -> Callable[[int], Tensor]:
    # Its scales are Python numbers; every layer of a workload has the same.
    layer = workload.layers[0]
    scales = {}
    if layer.k_scale is not None and layer.v_scale is not None:
        scales = {"k_scale": layer.k_scale.item(), "v_scale": layer.v_scale.item()}
    out = torch.empty_like(workload.q)

    def run(index: int) -> Tensor:
        cache = (workload.layers[index].k_cache, workload.layers[index].v_cache)
        found: Tensor = wrapper.run(workload.q, cache, out=out, **scales)
        return found

    return run


def _workspace(workload: Workload) -> Tensor:
    """[WORKSPACE_BYTES] uint8, zeroed as some of its kernels ask."""
    return torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=workload.q.device)


def _csr(workload: Workload) -> tuple[Tensor, Tensor, Tensor]:
    """(indptr [reqs + 1], indices [pages], last_page_len [reqs]), int32, on the device."""
    table, page_size = workload.view.groups[0].page_table, workload.shape.page_size
    counts = [-(-length // page_size) for length in workload.kv_lens]
    last = [
        length - (count - 1) * page_size
        for length, count in zip(workload.kv_lens, counts, strict=True)
    ]
    indptr = torch.tensor([0, *counts]).cumsum(0)
    indices = torch.cat([table[row, :count] for row, count in enumerate(counts)])
    return (
        indptr.to(table.device, torch.int32),
        indices,
        torch.tensor(last, dtype=torch.int32, device=table.device),
    )
