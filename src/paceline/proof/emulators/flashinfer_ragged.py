"""FlashInfer's ragged prefill wrapper as the backend calls it: keys behind one another, under bits.

Emulated is CUDA-graph mode with the fa2 kernels, NHD, no position encoding, no window, and a mask
that the caller leaves in the bound buffers.  A keyword it does not have is a TypeError: so are
`custom_mask`, which would wait for the device, and `packed_custom_mask`, for which `plan` writes
offsets in bits that the kernels take for bytes.

Source: flashinfer-python 0.6.12, `prefill.py`, `attention/scheduler.cuh` (PrefillPlan),
`attention/prefill.cuh` and `attention/variants.cuh` (LogitsMask).
"""

import torch
from torch import Tensor

from paceline.proof.emulators.flashinfer_kernel import emulated_ragged, write_schedule
from paceline.proof.emulators.flashinfer_rules import (
    BoundWrapper,
    PlanFacts,
    bound_buffer,
    outputs,
    require,
    require_heads,
    require_list,
    require_offsets,
    require_rows,
    require_workspaces,
)

_DTYPES = (torch.float16, torch.bfloat16)


class BatchPrefillWithRaggedKVCacheWrapper(BoundWrapper):
    """Plans on the host, runs on the device; see the module."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,  # [bytes]  uint8
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Tensor | None = None,  # [reqs + 1]  int32
        kv_indptr_buf: Tensor | None = None,  # [reqs + 1]  int32
        custom_mask_buf: Tensor | None = None,  # [bytes]  uint8
        mask_indptr_buf: Tensor | None = None,  # [reqs + 1]  int32  in bytes
        backend: str = "auto",
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        device = float_workspace_buffer.device
        self._qo_indptr = bound_buffer("qo_indptr_buf", qo_indptr_buf, device)
        self._kv_indptr = bound_buffer("kv_indptr_buf", kv_indptr_buf, device)
        self._mask_indptr = bound_buffer("mask_indptr_buf", mask_indptr_buf, device)
        self._mask = bound_buffer("custom_mask_buf", custom_mask_buf, device, dtype=torch.uint8)
        self._reqs = len(self._qo_indptr) - 1
        for name, buffer in (
            ("kv_indptr_buf", self._kv_indptr),
            ("mask_indptr_buf", self._mask_indptr),
        ):
            size = self._reqs + 1
            require(len(buffer) == size, f"length of {name}", size, len(buffer))

    def plan(
        self,
        qo_indptr: Tensor,  # [reqs + 1]  int32
        kv_indptr: Tensor,  # [reqs + 1]  int32
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        kv_data_type: torch.dtype | None = None,
        non_blocking: bool = True,
    ) -> None:
        """Copy offsets to the bound buffers and a schedule to the workspace; the mask stays."""
        kv_dtype = kv_data_type or q_data_type
        require(not causal, "causal under a mask", False, causal)
        require(pos_encoding_mode == "NONE", "pos_encoding_mode", "'NONE'", pos_encoding_mode)
        require(window_left == -1, "window_left", -1, window_left)
        require(q_data_type in _DTYPES, "q_data_type", "a 16-bit float", q_data_type)
        require(kv_dtype == q_data_type, "kv_data_type", q_data_type, kv_dtype)
        require_heads(num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo or head_dim_qk)
        offsets = self._offsets("qo_indptr", qo_indptr)
        keys = self._offsets("kv_indptr", kv_indptr)
        rows = offsets[-1]
        most = rows if self._most_rows is None else self._most_rows
        require(rows <= most, "rows (fixed by the first plan)", f"at most {most}", rows)
        self._most_rows = most
        require_workspaces(
            self._workspace,
            self._schedule,
            rows=most,
            reqs=self._reqs,
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
        )
        self._qo_indptr.copy_(qo_indptr)
        self._kv_indptr.copy_(kv_indptr)
        write_schedule(self._schedule, offsets, keys)
        self._facts = PlanFacts(
            rows=rows,
            num_heads=num_qo_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim_qk,
            page_size=None,
            causal=False,
            scale=sm_scale if sm_scale is not None else head_dim_qk**-0.5,
            window_left=-1,
            soft_cap=logits_soft_cap or 0.0,
            q_dtype=q_data_type,
            kv_dtype=kv_dtype,
        )

    def _offsets(self, name: str, given: Tensor) -> list[int]:
        """The numbers of one list of offsets."""
        require_list(name, given)
        size = self._reqs + 1
        require(len(given) == size, f"length of {name} (fixed in graph mode)", size, len(given))
        found: list[int] = given.tolist()
        require_offsets(name, found)
        return found

    def run(
        self,
        q: Tensor,  # [rows, heads, head_dim]
        k: Tensor,  # [keys, kv_heads, head_dim]
        v: Tensor,  # [keys, kv_heads, head_dim]
        *,
        out: Tensor | None = None,  # as q
        lse: Tensor | None = None,  # [rows, heads]  float32
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, and lse base 2 when asked for."""
        facts = self._planned()
        _require_rows(facts, q, k, v)
        out, lse = outputs(q, out, lse)
        emulated_ragged(
            q,
            k,
            v,
            self._qo_indptr,
            self._kv_indptr,
            self._mask,
            self._mask_indptr,
            self._schedule,
            facts.soft_cap,
            facts.scale,
            out,
            lse,
        )
        return (out, lse) if return_lse else out


def _require_rows(facts: PlanFacts, q: Tensor, k: Tensor, v: Tensor) -> None:
    """What `run` is given against what was planned, and what 16-byte loads can reach."""
    wanted = (facts.rows, facts.num_heads, facts.head_dim)
    require(tuple(q.shape) == wanted, "q shape", wanted, tuple(q.shape))
    per_key = (facts.num_kv_heads, facts.head_dim)
    require(tuple(k.shape[1:]) == per_key, "k shape", ("keys", *per_key), tuple(k.shape))
    require(v.shape == k.shape, "v shape", tuple(k.shape), tuple(v.shape))
    for name, given, dtype in (
        ("q", q, facts.q_dtype),
        ("k", k, facts.kv_dtype),
        ("v", v, facts.kv_dtype),
    ):
        require_rows(name, given, dtype)
