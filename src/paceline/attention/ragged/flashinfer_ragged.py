"""The `flashinfer` ragged backend: its ragged prefill wrapper, planned on the host for each part.

Facts of flashinfer-python 0.6.12 this relies on (prefill.py, attention/scheduler.cuh):

* Without CUDA graphs `plan` keeps offsets of its own and copies a schedule, built in one pinned
  tensor of the wrapper, without waiting: a wrapper may be planned again once that copy has run.
  So those of a part take turns; parts of one step need one each, until its last layer.
* A schedule of the `fa2` kernels that splits no keys uses no partial results, and no list of rows
  to merge.
* A wrapper allocates a workspace for schedules when it is made, and takes another for it after.
* The log-sum-exp is in base 2; its infinity is a finite number, also of a request without a key.
"""

import importlib
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from paceline.attention.backends.flashinfer_tree import LN2
from paceline.attention.backends.flashinfer_wrappers import (
    ALIGNMENT,
    MODULE,
    RING,
    SMALLEST_TILE,
    absence,
)
from paceline.attention.held import OPAQUE
from paceline.attention.keyless import blank_keyless_
from paceline.attention.ragged.contract import (
    RaggedBackend,
    RaggedCapabilities,
    RaggedConfig,
    RaggedLimits,
    RaggedPart,
    keyless_tokens,
)
from paceline.kernels.ragged_attention import SharedColumns

_UNUSED_BYTES = 1 << 20  # of partial results, which no schedule of ours has
_FIRST_BYTES = 8 << 20  # of the workspace that a wrapper makes, and lets go of


class PartWrappers:
    """Wrappers of the parts of expanded steps, RING of each part, made as parts come: so at most
    RING * (1 + max_pieces)."""

    def __init__(self, library: Any, limits: RaggedLimits, unused: Tensor) -> None:
        self._library = library
        self._limits = limits
        self._unused = unused  # [_UNUSED_BYTES]  uint8
        self._turn = 0
        self._wrappers: dict[tuple[int, int], Any] = {}

    def planned(self, part: RaggedPart) -> Any:
        """The wrapper of a part, with the plan of its lengths."""
        self._turn += part.index == 0
        key, limits = (self._turn % RING, part.index), self._limits
        if key not in self._wrappers:
            self._wrappers[key] = self._made()
        offsets = [
            torch.tensor([0, *accumulate(lens)], dtype=torch.int32)
            for lens in (part.q_lens, part.k_lens)
        ]
        self._wrappers[key].plan(
            *offsets,
            limits.num_heads,
            limits.num_heads,
            limits.head_dim,
            head_dim_vo=limits.v_head_dim,
            causal=part.causal,
            sm_scale=limits.scale,
            q_data_type=limits.dtype,
            non_blocking=True,
            disable_split_kv=True,
        )
        return self._wrappers[key]

    def _made(self) -> Any:
        wrapper = self._library.BatchPrefillWithRaggedKVCacheWrapper(
            self._unused, "NHD", backend="fa2"
        )
        schedule = torch.zeros(
            schedule_bytes(self._limits), dtype=torch.uint8, device=self._limits.device
        )
        wrapper.reset_workspace_buffer(self._unused, schedule)
        return wrapper


def schedule_bytes(limits: RaggedLimits) -> int:
    """Of one part, at most: three numbers for each tile of queries, offsets, and two numbers."""
    tiles = -(-limits.max_tokens // SMALLEST_TILE) + limits.max_reqs
    lists = 6  # each begins at a multiple of ALIGNMENT
    return 4 * (3 * tiles + limits.max_reqs + 1 + 2) + lists * ALIGNMENT


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferRaggedBuffers:
    """What stays: the wrappers, and what they ask for and do not use."""

    unused: Tensor  # [_UNUSED_BYTES]  uint8
    wrappers: PartWrappers = field(metadata=OPAQUE)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferRaggedPlan:
    """A planned wrapper."""

    wrapper: Any
    keyless: Tensor | None  # [tokens]  bool


@dataclass(frozen=True)
class FlashInferRagged(RaggedBackend[FlashInferRaggedBuffers, FlashInferRaggedPlan]):
    """FlashInfer's kernels over keys behind one another.

    library: the module flashinfer, or one with its class; None imports it when it is needed.
    """

    library: Any = None

    name = "flashinfer"
    capabilities = RaggedCapabilities(
        device_types=frozenset({"cuda"}),
        min_cuda_arch=(8, 0),
        max_cuda_arch=None,
        dtypes=frozenset({torch.bfloat16, torch.float16}),
        head_dims=frozenset({(192, 128)}),
        shared_columns=False,
        host_plan=True,
    )

    def unsupported_reasons(self, config: RaggedConfig) -> list[str]:
        """Capabilities, and whether the library is there when planning for this machine."""
        return super().unsupported_reasons(config) + absence(config.device_type)

    def make_buffers(self, limits: RaggedLimits) -> FlashInferRaggedBuffers:
        """Wrappers come with the parts of steps."""
        library = self.library or importlib.import_module(MODULE)
        unused = torch.empty(_UNUSED_BYTES, dtype=torch.uint8, device=limits.device)
        return FlashInferRaggedBuffers(
            unused=unused, wrappers=PartWrappers(library, limits, unused)
        )

    def buffer_bytes(self, limits: RaggedLimits) -> int:
        """Of the wrappers of all parts that a step may have, and what making one takes."""
        offsets = 2 * 4 * (limits.max_reqs + 1)
        parts = 1 + limits.max_pieces
        of_wrappers = RING * parts * (schedule_bytes(limits) + offsets)
        return _UNUSED_BYTES + _FIRST_BYTES + of_wrappers

    def plan(self, part: RaggedPart, buffers: FlashInferRaggedBuffers) -> FlashInferRaggedPlan:
        """From the host's lengths; queues copies, waits for nothing."""
        return FlashInferRaggedPlan(
            wrapper=buffers.wrappers.planned(part), keyless=keyless_tokens(part)
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        shared: SharedColumns | None,
        plan: FlashInferRaggedPlan,
        *,
        out_dtype: torch.dtype,
    ) -> tuple[Tensor, Tensor]:
        """See RaggedBackend.attend; out is in q's dtype."""
        assert shared is None, "keys have their shared columns beside their own"
        out, lse = plan.wrapper.run(q, k, v, return_lse=True)
        lse.mul_(LN2)
        return blank_keyless_(out, lse, plan.keyless)
