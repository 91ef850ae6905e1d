"""FlashInfer as the backend calls it, on a CPU: this module is the library.

Emulated are the paged prefill wrapper and, in flashinfer_ragged.py, the ragged one under a mask;
both in CUDA-graph mode with the fa2 kernels, NHD, no position encoding.  A keyword it does not have
is a TypeError.  `plan` leaves its schedule in the workspace the wrapper is bound to, and the
operator reads schedule, offsets and page ids when it runs, as the kernels do: a recorded graph
replays what was planned last.  There the rules are checked whose breach the real kernels do not
report.

Source: flashinfer-python 0.6.12, `prefill.py`, `attention/scheduler.cuh` (PrefillPlan),
`attention/prefill.cuh` and `attention/variants.cuh` (masks, lse).
"""

import torch
from torch import Tensor

from paceline.proof.emulators.flashinfer_kernel import emulated_paged, write_schedule
from paceline.proof.emulators.flashinfer_ragged import BatchPrefillWithRaggedKVCacheWrapper
from paceline.proof.emulators.flashinfer_rules import (
    BoundWrapper,
    PlanFacts,
    PlanLists,
    bound_buffer,
    outputs,
    require,
    require_heads,
    require_inputs,
    require_lists,
    require_workspaces,
)

__all__ = [
    "BatchPrefillWithPagedKVCacheWrapper",
    "BatchPrefillWithRaggedKVCacheWrapper",
    "__version__",
]
__version__ = "0.6.12"

_DTYPES = (torch.float16, torch.bfloat16)


class BatchPrefillWithPagedKVCacheWrapper(BoundWrapper):
    """Plans on the host, runs on the device; see the module."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,  # [bytes]  uint8
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,  # [reqs + 1]  int32
        paged_kv_indptr_buf: Tensor | None = None,  # [reqs + 1]  int32
        paged_kv_indices_buf: Tensor | None = None,  # [most pages]  int32
        paged_kv_last_page_len_buf: Tensor | None = None,  # [reqs]  int32
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        device = float_workspace_buffer.device
        self._qo_indptr = bound_buffer("qo_indptr_buf", qo_indptr_buf, device)
        self._kv_indptr = bound_buffer("paged_kv_indptr_buf", paged_kv_indptr_buf, device)
        self._kv_indices = bound_buffer("paged_kv_indices_buf", paged_kv_indices_buf, device)
        self._last_page_len = bound_buffer(
            "paged_kv_last_page_len_buf", paged_kv_last_page_len_buf, device
        )
        self._reqs = len(self._qo_indptr) - 1
        for name, buffer, size in (
            ("paged_kv_indptr_buf", self._kv_indptr, self._reqs + 1),
            ("paged_kv_last_page_len_buf", self._last_page_len, self._reqs),
        ):
            require(len(buffer) == size, f"length of {name}", size, len(buffer))

    def plan(
        self,
        qo_indptr: Tensor,  # [reqs + 1]  int32
        paged_kv_indptr: Tensor,  # [reqs + 1]  int32
        paged_kv_indices: Tensor,  # [pages]  int32  may be empty: then the buffer is not written
        paged_kv_last_page_len: Tensor,  # [reqs]  int32
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """Copy offsets to the bound buffers and a schedule to the workspace."""
        kv_dtype = kv_data_type or q_data_type
        require(pos_encoding_mode == "NONE", "pos_encoding_mode", "'NONE'", pos_encoding_mode)
        require(q_data_type in _DTYPES, "q_data_type", "a 16-bit float", q_data_type)
        stored = (q_data_type, torch.float8_e4m3fn)
        require(kv_dtype in stored, "kv_data_type", stored, kv_dtype)
        require_heads(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk)
        require(page_size >= 1, "page_size", "at least 1", page_size)
        require(window_left >= -1, "window_left", "-1 or at least 0", window_left)
        lists = PlanLists.read(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        require_lists(
            lists,
            reqs=self._reqs,
            most_rows=self._most_rows,
            room=len(self._kv_indices),
            page_size=page_size,
            causal=causal,
            longest=max_token_per_sequence,
        )
        self._most_rows = self._most_rows or lists.rows
        require_workspaces(
            self._workspace,
            self._schedule,
            rows=self._most_rows,
            reqs=self._reqs,
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
        )
        self._qo_indptr.copy_(qo_indptr)
        self._kv_indptr.copy_(paged_kv_indptr)
        self._last_page_len.copy_(paged_kv_last_page_len)
        self._kv_indices[: len(paged_kv_indices)].copy_(paged_kv_indices)
        write_schedule(self._schedule, lists.qo_indptr, lists.kv_indptr, lists.last_page_len)
        self._facts = PlanFacts(
            rows=lists.rows,
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=page_size,
            causal=causal,
            scale=sm_scale if sm_scale is not None else head_dim_qk**-0.5,
            window_left=window_left,
            soft_cap=logits_soft_cap or 0.0,
            q_dtype=q_data_type,
            kv_dtype=kv_dtype,
        )

    def run(
        self,
        q: Tensor,  # [rows, heads, head_dim]
        paged_kv_cache: tuple[Tensor, Tensor],  # of [num_pages, page_size, kv_heads, head_dim]
        *,
        out: Tensor | None = None,  # as q
        lse: Tensor | None = None,  # [rows, heads]  float32
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, and lse base 2 when asked for."""
        facts = self._planned()
        k_cache, v_cache = paged_kv_cache
        require_inputs(facts, q, k_cache, v_cache)
        out, lse = outputs(q, out, lse)
        emulated_paged(
            q,
            k_cache,
            v_cache,
            self._qo_indptr,
            self._kv_indptr,
            self._kv_indices,
            self._last_page_len,
            self._schedule,
            facts.causal,
            facts.window_left,
            facts.soft_cap,
            facts.scale,
            out,
            lse,
        )
        return (out, lse) if return_lse else out
