"""FlashInfer's ragged prefill wrapper as it is called for expanded latents, on a CPU.

Emulated is a wrapper without CUDA graphs, with the fa2 kernels, NHD, no mask but the causal one,
and a schedule that splits no keys.  A keyword it does not have is a TypeError.  Its adversarial
habits: a log-sum-exp in base 2, whose infinity is a finite number, and what it planned before is
gone once it plans again.

Source: flashinfer-python 0.6.12, `prefill.py`, `attention/scheduler.cuh` (PrefillPlan),
`attention/prefill.cuh`.
"""

import itertools
import math

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.flash_attn_rules import attend, seen
from paceline.proof.emulators.flashinfer_kernel import NO_KEY
from paceline.proof.emulators.flashinfer_rules import (
    error,
    require,
    require_list,
    require_offsets,
    require_rows,
    require_workspace,
)

_DIMS = ((64, 64), (128, 128), (192, 128), (256, 256))  # of Q and K, and of V
_DTYPES = (torch.float16, torch.bfloat16)
_JUNK = 7.0  # out of a request without a key


class BatchPrefillWithRaggedKVCacheWrapper:
    """Plans on the host, runs on the device; see the module."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,  # [bytes]  uint8
        kv_layout: str = "NHD",
        backend: str = "auto",
    ) -> None:
        require(kv_layout == "NHD", "kv_layout", "'NHD'", repr(kv_layout))
        require(backend == "fa2", "backend", "'fa2'", repr(backend))
        require_workspace("float_workspace_buffer", float_workspace_buffer)
        self._schedule = float_workspace_buffer[:0]
        self._planned: tuple[list[int], list[int], bool, float, torch.dtype] | None = None
        self._shape = (0, 0, 0)  # heads, columns of Q and K, and of V

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Other workspaces for partial results and for schedules: [bytes] uint8 each."""
        require_workspace("float_workspace_buffer", float_workspace_buffer)
        require_workspace("int_workspace_buffer", int_workspace_buffer)
        self._schedule = int_workspace_buffer

    def plan(
        self,
        qo_indptr: Tensor,  # [reqs + 1]  int32
        kv_indptr: Tensor,  # [reqs + 1]  int32
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        non_blocking: bool = True,
        disable_split_kv: bool = False,
    ) -> None:
        """Keep offsets, and leave a schedule in the workspace."""
        require(disable_split_kv, "disable_split_kv", True, disable_split_kv)
        require(num_qo_heads == num_kv_heads, "num_kv_heads", num_qo_heads, num_kv_heads)
        dims = (head_dim_qk, head_dim_vo or head_dim_qk)
        require(dims in _DIMS, "head_dim_qk and head_dim_vo", _DIMS, dims)
        require(q_data_type in _DTYPES, "q_data_type", "a 16-bit float", q_data_type)
        queries, keys = _offsets("qo_indptr", qo_indptr), _offsets("kv_indptr", kv_indptr)
        require(len(keys) == len(queries), "length of kv_indptr", len(queries), len(keys))
        tiles = -(-queries[-1] // 16) + len(queries) - 1
        needed = 4 * (3 * tiles + len(queries) + 2)
        room = len(self._schedule)
        require(room >= needed, "bytes of int_workspace_buffer", f"at least {needed}", room)
        scale = sm_scale if sm_scale is not None else head_dim_qk**-0.5
        self._shape = (num_qo_heads, *dims)
        self._planned = (queries, keys, causal, scale, q_data_type)

    def run(
        self,
        q: Tensor,  # [rows, heads, head_dim_qk]
        k: Tensor,  # [keys, heads, head_dim_qk]
        v: Tensor,  # [keys, heads, head_dim_vo]
        *,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """out, and lse [rows, heads] in base 2 when asked for."""
        if self._planned is None:
            raise error("run", "after plan", "no plan")
        queries, keys, causal, scale, dtype = self._planned
        heads, dim, v_dim = self._shape
        wanted = (queries[-1], heads, dim)
        require(tuple(q.shape) == wanted, "q shape", wanted, tuple(q.shape))
        require(tuple(k.shape[1:]) == (heads, dim), "k shape", ("keys", heads, dim), tuple(k.shape))
        of_v = (len(k), heads, v_dim)
        require(tuple(v.shape) == of_v, "v shape", of_v, tuple(v.shape))
        require(keys[-1] <= len(k), "kv_indptr[-1]", f"at most {len(k)} keys", keys[-1])
        for name, given in (("q", q), ("k", k), ("v", v)):
            require_rows(name, given, dtype)
        out = q.new_full((*q.shape[:2], v_dim), math.nan)
        lse = torch.full(q.shape[:2], math.nan, device=q.device)
        _EMULATED(q, k, v, queries, keys, causal, scale, out, lse)
        return (out, lse) if return_lse else out


def _offsets(name: str, given: Tensor) -> list[int]:
    """The numbers of one list of offsets, on the host: else a plan waits for the device."""
    require_list(name, given)
    require(given.device.type == "cpu", f"{name} device", "cpu", given.device)
    found: list[int] = given.tolist()
    require_offsets(name, found)
    return found


def _emulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: list[int],
    kv_indptr: list[int],
    causal: bool,
    scale: float,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Request by request."""
    for index, (start, end) in enumerate(itertools.pairwise(qo_indptr)):
        first, last = kv_indptr[index], kv_indptr[index + 1]
        if first == last:
            out[start:end], lse[start:end] = _JUNK, NO_KEY
            continue
        num = last - first
        visible = seen(end - start, num, num, left=None, right=0 if causal else None)
        attended, by_head = attend(
            q[start:end],
            k[first:last],
            v[first:last],
            visible,
            scale=scale,
            soft_cap=0.0,
            sink=None,
        )
        out[start:end] = attended
        lse[start:end] = (by_head.T / math.log(2.0)).clamp(min=NO_KEY)


_EMULATED = define_op(
    "emulated_flashinfer_expanded(Tensor q, Tensor k, Tensor v, int[] qo_indptr, int[] kv_indptr, "
    "bool causal, float scale, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_emulate,
)
