"""FlashInfer's wrapper for latents as the backend calls it, on a CPU: this module is the library.

Emulated is what is used outside of its graph mode, with the kernels of a Hopper GPU.  `plan` leaves
its schedule in the wrapper's workspace, by way of its pinned twin, and the operator reads it when
it runs: a recorded graph replays what was planned last.  Rules are checked whose breach the real
library does not report: room for units of work, the grid of the plan, page ids.

Source: flashinfer-python 0.6.12, `mla/_core.py`, `attention/scheduler.cuh` (MLAPlan),
`attention/mla_hopper.cuh`.
"""

import itertools
import math

import torch
from torch import Tensor

from paceline.kernels.custom_op import define_op
from paceline.proof.emulators.flashinfer_rules import NUM_SMS, error, require, require_list

__all__ = ["BatchMLAPagedAttentionWrapper", "__version__"]
__version__ = "0.6.12"

_DTYPES = (torch.float16, torch.bfloat16)
_MARK = 0x14A  # the first number of a schedule
_MOST_WORKS = 16384
_TILE = 64
_WORKSPACE_BYTES = 8 << 20


class BatchMLAPagedAttentionWrapper:
    """Plans on the host, runs on the device; see the module."""

    def __init__(
        self,
        float_workspace_buffer: Tensor,  # [bytes]  uint8
        use_cuda_graph: bool = False,
        backend: str = "auto",
    ) -> None:
        require(not use_cuda_graph, "use_cuda_graph", "False, which is emulated", use_cuda_graph)
        require(backend in ("auto", "fa3"), "backend", "auto or fa3", backend)
        self._workspace = float_workspace_buffer
        self._int_workspace_buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8)
        self._planned: tuple[object, ...] | None = None

    def plan(
        self,
        qo_indptr: Tensor,  # [reqs + 1]  int32
        kv_indptr: Tensor,  # [reqs + 1]  int32
        kv_indices: Tensor,  # [at least kv_indptr[-1]]  int32  read when the kernel runs
        kv_len_arr: Tensor,  # [reqs]  int32
        num_heads: int,
        head_dim_ckv: int,
        head_dim_kpe: int,
        page_size: int,
        causal: bool,
        sm_scale: float,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
    ) -> None:
        """Write a schedule: what the kernel reads of lengths."""
        lists = {"qo_indptr": qo_indptr, "kv_indptr": kv_indptr, "kv_len_arr": kv_len_arr}
        for name, given in (lists | {"kv_indices": kv_indices}).items():
            require_list(name, given)
        require((head_dim_ckv, head_dim_kpe) == (512, 64), "dims", (512, 64), head_dim_ckv)
        require(q_data_type in _DTYPES, "q_data_type", "a 16-bit float", q_data_type)
        require(kv_data_type == q_data_type, "kv_data_type", q_data_type, kv_data_type)
        offsets, starts, lens = (given.tolist() for given in lists.values())
        reqs = len(lens)
        sizes = (len(offsets), len(starts))
        require(sizes == (reqs + 1, reqs + 1), "lengths of the lists", reqs + 1, sizes)
        for start, end, keys in zip(starts, starts[1:], lens, strict=False):
            pages = -(-keys // page_size)
            require(end - start == pages, "pages of a request", pages, end - start)
        rows = [(end - start) * num_heads for start, end in itertools.pairwise(offsets)]
        if causal:
            for extend, keys in zip(rows, lens, strict=True):
                least = f"at least {extend // num_heads}"
                require(keys * num_heads >= extend, "keys of a causal request", least, keys)
        room = len(kv_indices)
        require(starts[-1] <= room, "kv_indptr[-1]", f"at most {room} pages", starts[-1])
        wide = 2 if sum(rows) // reqs > _TILE else 1
        works = sum(-(-row // (wide * _TILE)) for row in rows) + NUM_SMS
        require(works <= _MOST_WORKS, "units of work", f"at most {_MOST_WORKS}", works)
        self._require_workspaces(head_dim_ckv)
        numbers = torch.tensor([_MARK, wide, *offsets, *starts, *lens], dtype=torch.int32)
        pinned = self._pin_memory_int_workspace_buffer
        pinned[: numbers.nbytes].view(torch.int32).copy_(numbers)
        self._int_workspace_buffer[: numbers.nbytes].copy_(pinned[: numbers.nbytes])
        dims = (offsets[-1], num_heads, head_dim_ckv, head_dim_kpe)
        self._planned = (dims, q_data_type, page_size)
        self._grid = (reqs, wide, causal, sm_scale)
        self._kv_indices = kv_indices

    def _require_workspaces(self, rank: int) -> None:
        """Room that the library's allocators ask for; each part is aligned."""
        sums = 2 * NUM_SMS * _TILE * (2 * rank + 4)
        ints = 4 * (9 * _MOST_WORKS + 5 * NUM_SMS)
        for name, buffer, needed in (
            ("float_workspace_buffer", self._workspace, sums),
            ("int_workspace_buffer", self._int_workspace_buffer, ints),
            ("pinned int_workspace_buffer", self._pin_memory_int_workspace_buffer, ints),
        ):
            require(len(buffer) >= needed, f"bytes of {name}", f"at least {needed}", len(buffer))

    def run(
        self,
        q_nope: Tensor,  # [rows, heads, 512]
        q_pe: Tensor,  # [rows, heads, 64]
        ckv_cache: Tensor,  # [num_pages, page_size, 512]
        kpe_cache: Tensor,  # [num_pages, page_size, 64]
        out: Tensor | None = None,  # [rows, heads, 512]
        lse: Tensor | None = None,  # [rows, heads]  float32
        return_lse: bool = False,
        return_lse_base_on_e: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Attend by the last plan."""
        if self._planned is None:
            raise error("run", "after plan", "no plan")
        found = (
            (*q_nope.shape, q_pe.shape[-1]),
            q_nope.dtype,
            ckv_cache.shape[1],
        )
        require(found == self._planned, "rows, dtype and page size", self._planned, found)
        for name, given in (
            ("q_nope", q_nope),
            ("q_pe", q_pe),
            ("ckv", ckv_cache),
            ("kpe", kpe_cache),
        ):
            require(given.stride(-1) == 1, f"last stride of {name}", 1, given.stride(-1))
        out = torch.empty_like(q_nope) if out is None else out
        require(out.shape == q_nope.shape, "out shape", tuple(q_nope.shape), tuple(out.shape))
        made = torch.empty(q_nope.shape[:2], dtype=torch.float32) if lse is None else lse
        reqs, wide, causal, scale = self._grid
        _RUN(
            q_nope,
            q_pe,
            ckv_cache,
            kpe_cache,
            self._kv_indices,
            self._int_workspace_buffer,
            reqs,
            wide,
            causal,
            scale,
            return_lse_base_on_e,
            out,
            made,
        )
        return (out, made) if return_lse else out


def _run(
    q_nope: Tensor,
    q_pe: Tensor,
    ckv: Tensor,
    kpe: Tensor,
    kv_indices: Tensor,
    schedule: Tensor,
    reqs: int,
    wide: int,
    causal: bool,
    scale: float,
    base_e: bool,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Request by request; a masked key is loaded, and its value multiplied by 0."""
    mark, planned, *numbers = schedule[: 4 * (2 + 3 * reqs + 2)].view(torch.int32).tolist()
    require(mark == _MARK, "schedule", "a plan in int_workspace_buffer", f"mark {mark}")
    require(planned == wide, "tiles beside each other", f"{wide}, as recorded", planned)
    offsets, starts = numbers[: reqs + 1], numbers[reqs + 1 : 2 * reqs + 2]
    lens = numbers[2 * reqs + 2 :]
    require(offsets[-1] == len(q_nope), "planned rows", len(q_nope), offsets[-1])
    for request, keys in enumerate(lens):
        begin, end = offsets[request : request + 2]
        pages = kv_indices[starts[request] : starts[request + 1]].long()
        if len(pages) and not (pages.min() >= 0 and pages.max() < len(ckv)):
            raise error("kv_indices", f"pages below {len(ckv)}", pages.tolist())
        latents, turned = (part[pages].flatten(0, 1)[:keys].float() for part in (ckv, kpe))
        scores = torch.einsum("qhd,kd->qhk", q_nope[begin:end].float(), latents)
        scores += torch.einsum("qhd,kd->qhk", q_pe[begin:end].float(), turned)
        scores *= scale
        if causal:
            own = torch.arange(end - begin).view(-1, 1, 1) + (keys - (end - begin))
            scores.masked_fill_(torch.arange(keys) > own, -math.inf)
        found = scores.logsumexp(-1)
        weights = (scores - found.unsqueeze(-1)).exp().nan_to_num(nan=0.0)
        out[begin:end] = torch.einsum("qhk,kd->qhd", weights, latents).to(out.dtype)
        lse[begin:end] = found if base_e else found / math.log(2.0)


_RUN = define_op(
    "emulated_flashinfer_mla(Tensor q_nope, Tensor q_pe, Tensor ckv, Tensor kpe,"
    " Tensor kv_indices, Tensor schedule, int reqs, int wide, bool causal, float scale,"
    " bool base_e, Tensor(a!) out, Tensor(b!) lse) -> ()",
    cpu=_run,
)
