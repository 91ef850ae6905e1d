"""FlashInfer's paged wrappers: what they are bound to, how large, and how they are planned.

Facts of flashinfer-python 0.6.12 this relies on (prefill.py, attention/scheduler.cuh):

* With use_cuda_graph=True a wrapper keeps the addresses of its buffers, its number of requests and
  of query rows; `plan` copies offsets, last pages and a schedule to the device, and what a graph
  freezes (tile size, grid, workspace offsets) follows from these two numbers and the heads alone,
  whatever the lengths.  So one wrapper serves eager runs, capture and replay.
* `plan` takes its lists from the CPU; nothing synchronises then.  It does not read page ids but to
  copy them: with an empty list the bound buffer stays ours to fill on the device.
* `plan` builds the schedule in one pinned tensor per wrapper and copies it asynchronously, so a
  second plan of the wrapper could overwrite a copy under way.  See `WrapperRing`.
"""

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionSpec, Limits, Part
from paceline.attention.layouts.chunks import chunk_limits
from paceline.attention.layouts.csr import CsrBuffers, CsrLens
from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.kernels.stand_in import multiprocessors

MODULE = "flashinfer"
RING = 4  # wrappers that take turns; deeper than any number of steps in flight
CTAS_PER_SM = 2  # of a schedule
LARGEST_TILE = 128  # query rows, group heads counted, of one unit of work
SMALLEST_TILE = 16
ALIGNMENT = 16  # bytes
WRAPPER_BYTES = 1 << 17  # a wrapper's own lengths, of which it allocates 32,768 whatever is asked


def absence(device_type: str) -> list[str]:
    """On a machine with a GPU, why the package is not here; nothing is imported."""
    if device_type != "cuda" or not torch.cuda.is_available():
        return []  # planning for another machine: what is installed here says nothing
    if importlib.util.find_spec(MODULE) is None:
        return [f"{MODULE} must be installed, got no such package"]
    return []


@dataclass(frozen=True, slots=True)
class StepShape:
    """What a wrapper is made for."""

    part: Part
    mask: MaskKind
    reqs: int  # virtual ones, where layers have chunks and the prefix is not all
    tokens: int
    chunk: Chunk | None = None  # of the layers it serves; None: those without

    @property
    def rows(self) -> int:
        """Of each request, where they are as many for all."""
        return self.tokens // self.reqs


def window_left(spec: AttentionSpec, shape: StepShape) -> int | None:
    """Keys visible before a query's own, -1 for all; None where the library cannot say it.

    The library counts a query's position from the end of the keys it is given, so over the prefix
    alone query i of n is where query i - n of the step would be.  In a tree a position is no row.
    Without a causal mask a schedule covers a window and one tile of keys: queries must fit a tile.
    """
    window = spec.sliding if spec.chunk is None else None
    if window is None:
        return -1
    if shape.part is Part.ALL:
        return window - 1
    left = window - 1 - shape.rows
    can_say = left >= 0 and shape.rows <= SMALLEST_TILE and shape.mask is MaskKind.CAUSAL
    return left if can_say else None


def unplanned(part: Part, spec: AttentionSpec) -> KernelArgumentError:
    """What is wrong with asking for a part that no wrapper was planned for."""
    return KernelArgumentError.about(
        "flashinfer forward",
        expected="a part and layer constants of the step's host plan",
        got=f"{part} with window {spec.window}",
        remedy="call host_plan before plan; trees with windows run by cascade; a window over "
        f"the prefix alone must be longer than a request's rows, at most {SMALLEST_TILE}",
    )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class KeyLists:
    """What wrappers of one part are bound to, for layers with one size of chunks, or without."""

    qo_indptr: Tensor  # [max_reqs + 1]  int32  the library's copy of the tokens before each request
    csr: CsrBuffers  # of the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class HostLens:
    """What the host knows of one part of a step."""

    qo_indptr: Tensor  # [padded_reqs + 1]  int32  on the CPU
    csr: CsrLens  # of the keys
    max_extend_len: int


def workspace_bytes(limits: Limits) -> int:
    """Of partial results: the largest step's, each tile of queries in float32 with its lse."""
    ctas = CTAS_PER_SM * multiprocessors(limits.device)
    largest = 0
    for spec in distinct_constants(limits.layers):
        group = spec.num_heads // spec.num_kv_heads
        rows = max(
            ctas // spec.num_kv_heads * LARGEST_TILE,
            limits.max_tokens * group + most_reqs(limits, spec) * LARGEST_TILE,
        )
        largest = max(largest, spec.num_heads * rows * (spec.v_head_dim + 1) * 4)
    return largest + 2 * ALIGNMENT


def schedule_bytes(spec: AttentionSpec, shape: StepShape, device: torch.device) -> int:
    """Of one schedule: at least what the library's allocator will ask for."""
    group = spec.num_heads // spec.num_kv_heads
    tiles = -(-shape.tokens * group // SMALLEST_TILE) + shape.reqs
    units = max(CTAS_PER_SM * multiprocessors(device), tiles)
    ints = 3 * units + shape.reqs + 1 + 2 + shape.tokens + 1
    return 4 * ints + units + 16 * ALIGNMENT


def rings_bytes(limits: Limits) -> int:
    """Of the wrappers of one shape, at most: schedules of ring and tree, and what each keeps."""
    found, tokens = 0, limits.max_tokens
    for spec in distinct_constants(limits.layers):
        shape = StepShape(Part.ALL, MaskKind.CAUSAL, most_reqs(limits, spec), tokens)
        found += 2 * schedule_bytes(spec, shape, limits.device) + RING * WRAPPER_BYTES
    return found


def most_reqs(limits: Limits, spec: AttentionSpec) -> int:
    """The requests of a wrapper for the largest step, virtual ones of a layer with chunks."""
    return (limits if spec.chunk is None else chunk_limits(limits, spec.chunk)).max_reqs


def distinct_constants(layers: tuple[AttentionSpec, ...]) -> list[AttentionSpec]:
    """The constants that differ, without the layers' numbers, in order."""
    return list(dict.fromkeys(constants(spec) for spec in layers))


def constants(spec: AttentionSpec) -> AttentionSpec:
    """`spec` as a key: layers with equal constants share a plan."""
    return replace(spec, layer_id=0)


class WrapperRing:
    """The wrappers of one set of layer constants in steps of one shape.

    They take turns in planning, each with pinned memory of its own, and share every device buffer,
    so that whichever planned last, any of them runs by that plan.
    """

    def __init__(
        self,
        library: Any,
        limits: Limits,
        *,
        spec: AttentionSpec,
        shape: StepShape,
        window_left: int,
        workspace: Tensor,
        lists: KeyLists,
    ) -> None:
        self._limits = limits
        self._spec = spec
        self._window_left = window_left
        self._part = shape.part
        # int32 fields at byte offsets of an aligned tensor.
        self.schedule = torch.zeros(
            schedule_bytes(spec, shape, limits.device), dtype=torch.uint8, device=limits.device
        )
        self._no_pages = torch.empty(0, dtype=torch.int32, device=limits.device)
        csr, capacity = lists.csr, shape.reqs * lists.csr.widths[spec.group]
        self._wrappers = []
        for _ in range(RING):
            wrapper = library.BatchPrefillWithPagedKVCacheWrapper(
                workspace,
                "NHD",
                use_cuda_graph=True,
                qo_indptr_buf=lists.qo_indptr[: shape.reqs + 1],
                paged_kv_indptr_buf=csr.kv_indptr[: shape.reqs + 1],
                paged_kv_indices_buf=csr.kv_indices[spec.group][:capacity],
                paged_kv_last_page_len_buf=csr.last_page_len[: shape.reqs],
                backend="fa2",  # the schedule described above, and one set of kernels for all archs
            )
            wrapper.reset_workspace_buffer(workspace, self.schedule)
            self._wrappers.append(wrapper)

    def plan_first(self, lens: HostLens) -> None:
        """Plan every wrapper once, so that each can run; compiles what is missing, and waits."""
        for turn in range(RING):
            self.plan(turn, lens)
        if self.schedule.is_cuda:  # the next step takes a wrapper whose copy may be under way
            torch.cuda.current_stream(self.schedule.device).synchronize()

    def plan(self, turn: int, lens: HostLens) -> None:
        """Plan with the wrapper whose turn it is; queues copies, waits for nothing."""
        spec, limits = self._spec, self._limits
        self._wrappers[turn % RING].plan(
            lens.qo_indptr,
            lens.csr.kv_indptr,
            self._no_pages,
            lens.csr.last_page_len,
            spec.num_heads,
            spec.num_kv_heads,
            spec.head_dim,
            limits.page_size,
            head_dim_vo=spec.v_head_dim,
            causal=self._part is Part.ALL,
            pos_encoding_mode="NONE",
            sm_scale=spec.scale,
            window_left=self._window_left,
            logits_soft_cap=spec.soft_cap,
            q_data_type=limits.dtype,
            kv_data_type=limits.kv_dtype,
            non_blocking=True,
            max_token_per_sequence=lens.max_extend_len,
        )

    def run(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        *,
        out: Tensor,
        lse: Tensor | None = None,
    ) -> None:
        """Attend by the last plan.  Mutates out, as q, and lse [tokens, heads] float32 base 2."""
        self._wrappers[0].run(q, (k_cache, v_cache), out=out, lse=lse, return_lse=lse is not None)
