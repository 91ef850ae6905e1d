"""Checks a configuration against a backend's capabilities, collecting every reason."""

import importlib.util
import os

import torch

from paceline.attention.contract import AttentionConfig, Capabilities, ChunkSupport
from paceline.core.modes import MaskKind
from paceline.core.plugins import can_find


def capability_reasons(can: Capabilities, want: AttentionConfig) -> list[str]:
    """All reasons why `can` does not cover `want`, each naming what was expected and got."""
    reasons: list[str] = []

    def need(covered: bool, name: str, expected: object, got: object) -> None:
        reason = f"{name} must be {expected}, got {got}"
        if not covered and reason not in reasons:  # layers of several head counts say it once
            reasons.append(reason)

    need(
        want.device_type in can.device_types,
        "device",
        " or ".join(sorted(can.device_types)),
        want.device_type,
    )
    arch, least, most = want.cuda_arch or (0, 0), can.min_cuda_arch, can.max_cuda_arch
    if want.device_type == "cuda" and least is not None:
        need(arch >= least, "CUDA arch", f"at least {least}", arch)
    if most is not None:
        need(arch <= most, "CUDA arch", f"at most {most}", arch)
    need(want.dtype in can.dtypes, "dtype", sorted(map(str, can.dtypes)), want.dtype)
    kv_dtypes = can.kv_dtypes  # float8 beside a dtype that is refused would be no advice
    if want.dtype in can.dtypes:
        kv_dtypes = kv_dtypes & {want.dtype, torch.float8_e4m3fn} or kv_dtypes
    need(want.kv_dtype in kv_dtypes, "KV dtype", sorted(map(str, kv_dtypes)), want.kv_dtype)
    if can.page_sizes is not None:
        need(want.page_size in can.page_sizes, "page size", sorted(can.page_sizes), want.page_size)
    for heads in want.heads:
        latents = can.latent_dims if heads.v_in_k else None
        dim, v_dim = heads.head_dim, heads.v_head_dim
        # Absorbed layers read the cache whatever the step says: skipped writes would go unseen.
        reads_cache = want.cache_free and heads.v_in_k
        need(
            not reads_cache, "steps", "with a cache where layers are of latents", "cache-free ones"
        )
        is_scaled = heads.v_in_k and want.kv_dtype == torch.float8_e4m3fn
        is_read = can.scaled_latents or not is_scaled or want.kv_dtype not in can.kv_dtypes
        need(is_read, "latents", f"cached in {want.dtype}", "float8 with a scale for each row")
        if can.head_dims == frozenset() and not heads.v_in_k:
            need(False, "each layer", "of latents, with V in K", heads)
            continue
        if latents is not None:
            need(
                (v_dim, dim - v_dim) in latents,
                "latent dims",
                sorted(latents),
                (v_dim, dim - v_dim),
            )
        elif can.head_dims is not None:
            need(dim in can.head_dims, "head dim", sorted(can.head_dims), dim)
            need(v_dim in can.head_dims, "V head dim", sorted(can.head_dims), v_dim)
        same = can.v_head_dim_differs or dim == v_dim or latents is not None
        need(same, "V head dim", f"that of K ({dim})", v_dim)
    need(can.window or not want.window, "sliding window", "absent", "present")
    has_chunks = can.chunks is not ChunkSupport.NEVER or not want.chunks
    need(has_chunks, "chunk-local attention", "absent", "present")
    if can.chunks is ChunkSupport.WHOLE_PAGES:
        for size in sorted(want.chunks):
            pages = f"of whole pages of {want.page_size} tokens"
            need(size % want.page_size == 0, "chunks", pages, f"{size} tokens")
    sees_ahead = want.chunks and MaskKind.BLOCK in want.masks  # nobody says how far, past a chunk
    need(not sees_ahead, "chunk-local attention beside blocks", "absent", "present")
    has_tree_window = MaskKind.TREE in want.masks and want.window
    need(can.tree_windows or not has_tree_window, "sliding window in a tree", "absent", "present")
    has_tree_chunk = MaskKind.TREE in want.masks and bool(want.chunks)
    need(can.tree_windows or not has_tree_chunk, "chunks in a tree", "absent", "present")
    need(can.soft_cap or not want.soft_cap, "soft cap", "absent", "present")
    need(can.sinks or not want.sinks, "attention sinks", "absent", "present")
    need(can.returns_lse or not want.needs_lse, "log-sum-exp", "not needed", "needed")
    need(can.step_alone or not want.step_alone, "the step's own rows alone", "absent", "asked for")
    is_rounded = want.step_alone and want.kv_dtype != want.dtype  # parts would not be one whole
    need(not is_rounded, "KV dtype of a step read as computed", want.dtype, want.kv_dtype)
    need(can.returns_lse or not want.encoder, "attention to an encoder's rows", "absent", "present")
    plans_blindly = can.host_plan and want.encoder  # their lengths are on the device alone
    need(
        not plans_blindly, "plan where layers read an encoder", "made on the device", "a host plan"
    )
    missing = want.masks - can.masks
    need(
        not missing,
        "mask kind",
        sorted(kind.value for kind in can.masks),
        sorted(kind.value for kind in want.masks),
    )
    need(can.graph >= want.graph, "graph support", f"at least {want.graph.name}", can.graph.name)
    return reasons


def module_reasons(module: str, name: str | None = None) -> list[str]:
    """On a machine with a GPU, why a library's module cannot be found; nothing is imported.  name:
    how the reason calls it, where the module's own says too little."""
    if not torch.cuda.is_available() or can_find(module):
        return []  # planning for another machine: what is installed here says nothing
    return [f"{name or module} must be importable, got no such module"]


def triton_reasons(device_type: str) -> list[str]:
    """Why Triton's kernels cannot be launched on this device."""
    if device_type == "cuda" and not torch.cuda.is_available():
        return []  # planning for another machine: what is installed here says nothing
    if importlib.util.find_spec("triton") is None:
        return ["triton must be installed, got no such package"]
    if device_type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        return ["device must be cuda, got cpu without TRITON_INTERPRET=1 (Triton's interpreter)"]
    return []
