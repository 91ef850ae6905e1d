"""Steps as the flashinfer backend gets them, on the library's emulator."""

from typing import Any

import torch
from attention_cases import Built, Case, build
from attention_runs import assert_is_the_walk, limits, live
from torch import Tensor

from paceline.attention.backends.flashinfer_backend import FlashInferBackend, FlashInferBuffers
from paceline.attention.contract import Part
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.proof.emulators import flashinfer as emulator

DIM = 64
CHAIN = Case(
    prefix_lens=(0, 7, 18), head_dim=DIM, v_head_dim=DIM, dtype=torch.bfloat16, page_size=3
)
TOLERANCE = 0.8  # of sums of up to 23 values of size 50 in bfloat16
LSE_TOLERANCE = 1e-4


def step_of(built: Built, *, epoch: int = 1) -> Step:
    """What the runner would hand to host_plan: padded rows are spelled out."""
    case = built.case
    stride = max(case.extend_lens)
    extends = case.extend_lens + (stride,) * case.padded_reqs
    return Step(
        epoch=epoch,
        layout=StepLayout(
            rows=tuple(range(1, len(extends) + 1)),
            extend_lens=extends,
            emits=(True,) * len(extends),
            parents=tuple((-1,) * n for n in extends) if case.mask is MaskKind.TREE else None,
        ),
        is_ragged=True,
        mask=case.mask,
        prefix_lens_bound=case.prefix_lens + (1,) * case.padded_reqs,
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=(),
    )


def forward(
    built: Built, backend: FlashInferBackend, buffers: FlashInferBuffers
) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of all tokens; fresh k and v are used by trees alone."""
    k = v = torch.full((), float("nan"))
    if built.case.mask is MaskKind.TREE and built.case.part is Part.ALL:
        k, v = built.paged.fresh_rows()
    plan = backend.plan(built.view, buffers)
    return backend.forward(built.q, k, v, built.layer, plan, built.case.part)


def run(built: Built) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the live tokens in float64."""
    backend = FlashInferBackend(emulator)
    buffers = backend.make_buffers(limits(built))
    backend.host_plan(step_of(built), buffers)
    out, lse = forward(built, backend, buffers)
    return live(built, out), None if lse is None else live(built, lse)


def check(case: Case) -> None:
    """The backend against the walk."""
    built = build(case)
    assert_is_the_walk(built, *run(built), tolerance=TOLERANCE, lse_tolerance=LSE_TOLERANCE)


def moved(built: Built, other: Built) -> None:
    """Put what `other` is made of where `built` has it."""
    for name in ("prefix_lens", "extend_lens", "kv_lens", "cu_seqlens_q"):
        getattr(built.view, name).copy_(getattr(other.view, name))
    table = other.view.groups[0].page_table
    built.view.groups[0].page_table.zero_()
    built.view.groups[0].page_table[:, : table.shape[1]].copy_(table)
    pages = other.layer.k_cache.shape[0]
    built.layer.k_cache[:pages].copy_(other.layer.k_cache)
    built.layer.v_cache[:pages].copy_(other.layer.v_cache)
    built.q.copy_(other.q)
    built.view.groups[0].out_cache_loc.copy_(other.view.groups[0].out_cache_loc)
    if built.view.tree_mask is not None and other.view.tree_mask is not None:
        built.view.tree_mask.copy_(other.view.tree_mask)


class Counting:
    """The emulator, with every wrapper made and every plan of it."""

    def __init__(self) -> None:
        self.plans: dict[int, int] = {}  # wrapper, in order of making -> times planned
        self.BatchPrefillWithPagedKVCacheWrapper = self._counted(
            emulator.BatchPrefillWithPagedKVCacheWrapper
        )
        self.BatchPrefillWithRaggedKVCacheWrapper = self._counted(
            emulator.BatchPrefillWithRaggedKVCacheWrapper
        )

    def _counted(self, wrapper: type[Any]) -> type[Any]:
        library = self

        class Wrapper(wrapper):  # type: ignore[misc,valid-type]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                self.number = len(library.plans)
                library.plans[self.number] = 0
                super().__init__(*args, **kwargs)

            def plan(self, *args: Any, **kwargs: Any) -> None:
                library.plans[self.number] += 1
                super().plan(*args, **kwargs)

        return Wrapper
