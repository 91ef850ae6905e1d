"""What FlashInfer's prefill wrappers ask of their callers, each rule refused by its name."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError

HEAD_DIMS = (64, 128, 256)
NUM_SMS = 1  # of the emulated device
_CTAS_PER_SM = 2
_LOADED = 16  # bytes at once
_ALIGNMENT = 16  # bytes, of every part of a workspace
_WORKSPACE_BYTES = 8 << 20  # of a wrapper's own schedule, until reset


def error(name: str, expected: object, got: object) -> KernelArgumentError:
    """A broken rule."""
    remedy = "see the library's plan and run: the real kernels would read elsewhere, or refuse"
    return KernelArgumentError.about(
        f"flashinfer {name}", expected=expected, got=got, remedy=remedy
    )


def require(holds: bool, name: str, expected: object, got: object) -> None:
    """Raise KernelArgumentError unless `holds`."""
    if not holds:
        raise error(name, expected, got)


def require_offsets(name: str, given: Sequence[int]) -> None:
    """Where runs begin, and the last ends."""
    require(given[0] == 0, f"{name}[0]", 0, given[0])
    is_monotone = all(a <= b for a, b in itertools.pairwise(given))
    require(is_monotone, name, "monotone", given)


def require_rows(name: str, given: Tensor, dtype: torch.dtype) -> None:
    """Rows of a planned dtype [rows, heads, head_dim], as the kernels load them."""
    require(given.dtype == dtype, f"{name} dtype", dtype, given.dtype)
    require(given.stride(-1) == 1, f"last stride of {name}", 1, given.stride(-1))
    steps = [stride * given.element_size() for stride in given.stride()[:2]]
    at = [given.data_ptr() % _LOADED, *(step % _LOADED for step in steps)]
    require(not any(at), f"address and strides of {name}", f"multiples of {_LOADED} bytes", at)


# --- what a wrapper is bound to -------------------------------------------------------------------


def require_workspace(name: str, workspace: Tensor) -> None:
    """One of the two workspaces: [bytes] uint8."""
    require(workspace.dtype == torch.uint8, f"{name} dtype", torch.uint8, workspace.dtype)
    require(workspace.dim() == 1, f"dims of {name}", 1, workspace.dim())
    offset = workspace.data_ptr() % _ALIGNMENT
    require(offset == 0, f"{name} address", f"a multiple of {_ALIGNMENT}", f"{offset} more")


def bound_buffer(
    name: str,
    buffer: Tensor | None,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.int32,
) -> Tensor:
    """A buffer that graph mode needs: [size] of `dtype` on the workspace's device."""
    if buffer is None:
        raise error(name, "a tensor in CUDA graph mode", None)
    require_list(name, buffer, dtype)
    require(buffer.device == device, f"{name} device", device, buffer.device)
    return buffer


def require_list(name: str, given: Tensor, dtype: torch.dtype = torch.int32) -> None:
    """[size] of `dtype`, contiguous."""
    require(given.dtype == dtype, f"{name} dtype", dtype, given.dtype)
    require(given.dim() == 1, f"dims of {name}", 1, given.dim())
    require(given.is_contiguous(), name, "contiguous", f"strides {given.stride()}")


# --- plan -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFacts:
    """What `plan` leaves on the host for `run`."""

    rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int | None  # None: keys behind one another
    causal: bool
    scale: float
    window_left: int
    soft_cap: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanLists:
    """The lists of one plan, as host numbers."""

    qo_indptr: list[int]  # [reqs + 1]
    kv_indptr: list[int]  # [reqs + 1]
    last_page_len: list[int]  # [reqs]
    num_indices: int

    @classmethod
    def read(
        cls, qo_indptr: Tensor, kv_indptr: Tensor, indices: Tensor, last_page_len: Tensor
    ) -> Self:
        """Read what `plan` was given; raises where one is no [size] int32 contiguous tensor."""
        for name, given in (
            ("qo_indptr", qo_indptr),
            ("paged_kv_indptr", kv_indptr),
            ("paged_kv_indices", indices),
            ("paged_kv_last_page_len", last_page_len),
        ):
            require_list(name, given)
        return cls(
            qo_indptr=qo_indptr.tolist(),
            kv_indptr=kv_indptr.tolist(),
            last_page_len=last_page_len.tolist(),
            num_indices=len(indices),
        )

    @property
    def rows(self) -> int:
        """Query rows."""
        return self.qo_indptr[-1]

    @property
    def extends(self) -> list[int]:
        """[reqs] query rows of each."""
        return [end - start for start, end in itertools.pairwise(self.qo_indptr)]

    def kv_lens(self, page_size: int) -> list[int]:
        """[reqs] keys of each."""
        pages = [end - start for start, end in itertools.pairwise(self.kv_indptr)]
        last = self.last_page_len
        return [(n - 1) * page_size + k if n else 0 for n, k in zip(pages, last, strict=True)]


def require_heads(num_heads: int, num_kv_heads: int, head_dim: int, v_head_dim: int) -> None:
    """Heads and head dims the paged fa2 kernels are compiled for."""
    require(num_heads % num_kv_heads == 0, "num_qo_heads", f"n * {num_kv_heads}", num_heads)
    require(head_dim in HEAD_DIMS, "head_dim_qk", HEAD_DIMS, head_dim)
    require(v_head_dim == head_dim, "head_dim_vo", head_dim, v_head_dim)


def require_lists(
    lists: PlanLists,
    *,
    reqs: int,
    most_rows: int | None,
    room: int,
    page_size: int,
    causal: bool,
    longest: int | None,
) -> None:
    """The lists of one plan.

    reqs: of the wrapper; most_rows: query rows of its first plan; room: entries of its index
    buffer; longest: query rows of a request, as told.
    """
    named = (
        ("qo_indptr", lists.qo_indptr, reqs + 1),
        ("paged_kv_indptr", lists.kv_indptr, reqs + 1),
        ("paged_kv_last_page_len", lists.last_page_len, reqs),
    )
    for name, given, size in named:
        require(len(given) == size, f"length of {name} (fixed in graph mode)", size, len(given))
    for name, given, _ in named[:2]:
        require_offsets(name, given)
    rows, pages = lists.rows, lists.kv_indptr[-1]
    most = rows if most_rows is None else most_rows
    require(rows <= most, "rows (fixed by the first plan)", f"at most {most}", rows)
    told = lists.num_indices
    require(told <= room, "length of paged_kv_indices", f"at most {room}", told)
    require(pages <= room, "paged_kv_indptr[-1]", f"at most {room} pages", pages)
    for (start, end), last in zip(
        itertools.pairwise(lists.kv_indptr), lists.last_page_len, strict=True
    ):
        low, high = (1, page_size) if end > start else (0, 0)
        expected = f"{low}..{high} of {end - start} pages"
        require(low <= last <= high, "paged_kv_last_page_len", expected, last)
    if causal:
        for extend, keys in zip(lists.extends, lists.kv_lens(page_size), strict=True):
            require(keys >= extend, "keys of a causal request", f"at least {extend}", keys)
    if longest is not None:
        most = max(lists.extends)
        require(longest >= most, "max_token_per_sequence", f"at least {most}", longest)


def require_workspaces(
    partial: Tensor,
    schedule: Tensor,
    *,
    rows: int,
    reqs: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
) -> None:
    """Room for a graph-mode plan, which always splits keys (scheduler.cuh, PrefillPlan).

    partial: [bytes] uint8, results of units of work; schedule: [bytes] uint8.
    """
    group = num_heads // num_kv_heads
    packed = (rows - reqs + 1) * group  # of the longest request there could be
    tile = 16 if 0 <= packed <= 16 else 64
    if not 0 <= packed <= 64 and head_dim < 256:
        tile = 128
    units = max(_CTAS_PER_SM * NUM_SMS // num_kv_heads, -(-rows * group // tile) + reqs - 1)
    tiles = num_heads * units * tile
    ints = (units, units, units, reqs + 1, 1, 1, rows + 1)
    for name, buffer, needed in (
        ("float_workspace_buffer", partial, _aligned(4 * tiles * head_dim) + _aligned(4 * tiles)),
        ("int_workspace_buffer", schedule, sum(_aligned(4 * n) for n in ints) + _aligned(units)),
    ):
        require(len(buffer) >= needed, f"bytes of {name}", f"at least {needed}", len(buffer))


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


# --- run ------------------------------------------------------------------------------------------


def require_inputs(facts: PlanFacts, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """What `run` is given against what was planned."""
    require(q.dtype == facts.q_dtype, "q dtype", facts.q_dtype, q.dtype)
    wanted = (facts.rows, facts.num_heads, facts.head_dim)
    require(tuple(q.shape) == wanted, "q shape", wanted, tuple(q.shape))
    per_page = (facts.page_size, facts.num_kv_heads, facts.head_dim)
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(cache.dtype == facts.kv_dtype, f"{name} dtype", facts.kv_dtype, cache.dtype)
        shape = tuple(cache.shape)
        require(shape[1:] == per_page, f"{name} shape", ("pages", *per_page), shape)
    strides = k_cache.stride()
    require(v_cache.stride() == strides, "v_cache strides", strides, v_cache.stride())
    for name, given in (("q", q), ("k_cache", k_cache)):
        require(given.stride(-1) == 1, f"last stride of {name}", 1, given.stride(-1))


def outputs(q: Tensor, out: Tensor | None, lse: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out as q, lse [rows, heads] float32) to write to, contiguous; made where not given."""
    if out is None:
        out = torch.zeros_like(q)
    if lse is None:
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    for name, given, shape, dtype in (
        ("out", out, tuple(q.shape), q.dtype),
        ("lse", lse, tuple(q.shape[:2]), torch.float32),
    ):
        require(tuple(given.shape) == shape, f"{name} shape", shape, tuple(given.shape))
        require(given.dtype == dtype, f"{name} dtype", dtype, given.dtype)
        require(given.is_contiguous(), name, "contiguous", f"strides {given.stride()}")
    return out, lse


# --- what both wrappers share ---------------------------------------------------------------------


class BoundWrapper:
    """What graph mode binds both wrappers to, besides their buffers; and what they have planned."""

    def __init__(
        self, float_workspace_buffer: Tensor, kv_layout: str, use_cuda_graph: bool, backend: str
    ) -> None:
        require(kv_layout == "NHD", "kv_layout", "'NHD'", repr(kv_layout))
        require(use_cuda_graph, "use_cuda_graph", True, use_cuda_graph)
        require(backend == "fa2", "backend", "'fa2'", repr(backend))
        require_workspace("float_workspace_buffer", float_workspace_buffer)
        device = float_workspace_buffer.device
        self._workspace = float_workspace_buffer
        self._schedule = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self._most_rows: int | None = None  # set by the first plan
        self._facts: PlanFacts | None = None

    def reset_workspace_buffer(
        self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor
    ) -> None:
        """Other workspaces for partial results and for schedules: [bytes] uint8 each."""
        require_workspace("float_workspace_buffer", float_workspace_buffer)
        require_workspace("int_workspace_buffer", int_workspace_buffer)
        self._workspace, self._schedule = float_workspace_buffer, int_workspace_buffer

    def _planned(self) -> PlanFacts:
        if self._facts is None:
            raise error("run", "after plan", "no plan")
        return self._facts
