"""The `triton` backend: our own paged kernels; split-KV decode, and extend over paged keys."""

from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.attention.capability import triton_reasons
from paceline.attention.contract import (
    AttentionBackend,
    AttentionConfig,
    Capabilities,
    ChunkSupport,
    GraphSupport,
    LayerCache,
    Limits,
    Part,
)
from paceline.attention.layouts.page_table import PageTablePlan, page_table_plan
from paceline.attention.paged import paged_call
from paceline.attention.step_rows import attend_step
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    SharedPrefixes,
    SharingRule,
    SplitWorkspace,
    find_shared,
    paged_decode,
    paged_extend,
    shared_prefixes,
    sharing_rule,
    split_workspace,
)
from paceline.kernels.step_view import StepView

HEAD_DIMS = frozenset({64, 80, 96, 128, 256})
LATENT_DIMS = frozenset({(512, 64), (256, 64), (256, 32), (128, 64), (64, 16)})
FP8_ARCH = (8, 9)  # compute capability with conversions from float8_e4m3fn


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonBuffers:
    """Everything whose address a graph may hold, at its largest."""

    workspace: SplitWorkspace
    shared: tuple[SharedPrefixes | None, ...]  # [num_groups] of max_reqs rows; None without a rule
    rules: tuple[SharingRule | None, ...]  # [num_groups] None: nothing is to be shared
    page_size: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TritonPlan:
    """The page-table layout, the decode workspace, and what requests of a decode share."""

    table: PageTablePlan
    workspace: SplitWorkspace
    shared: tuple[SharedPrefixes | None, ...]  # [num_groups] of padded_reqs rows


@dataclass(frozen=True)
class TritonBackend(AttentionBackend[TritonBuffers, TritonPlan]):
    """Runs on CUDA, and on a CPU through Triton's interpreter (TRITON_INTERPRET=1), slowly."""

    name = "triton"
    capabilities = Capabilities(
        device_types=frozenset({"cuda", "cpu"}),
        min_cuda_arch=(8, 0),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn}),
        page_sizes=None,
        head_dims=HEAD_DIMS,
        v_head_dim_differs=True,
        masks=frozenset({MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL, MaskKind.BLOCK}),
        window=True,
        chunks=ChunkSupport.ALWAYS,
        soft_cap=True,
        sinks=True,
        returns_lse=True,
        graph=GraphSupport.ALWAYS,
        host_plan=False,
        loads_dead_slots=False,
        shares_prefixes=True,
        step_alone=True,
        scaled_latents=True,
        latent_dims=LATENT_DIMS,
    )
    kept_fields = frozenset({"finished"})

    def unsupported_reasons(self, config: AttentionConfig) -> list[str]:
        """Capabilities, and whether Triton can run on this device."""
        reasons = super().unsupported_reasons(config) + triton_reasons(config.device_type)
        arch = config.cuda_arch or FP8_ARCH
        if config.kv_dtype == torch.float8_e4m3fn and arch < FP8_ARCH:
            reasons.append(f"CUDA arch must be at least {FP8_ARCH} for an fp8 cache, got {arch}")
        has_latents = any(heads.v_in_k for heads in config.heads)
        if has_latents and config.dtype == torch.float32:
            reasons.append("dtype must be of 16 bits with latents, got torch.float32")
        if has_latents and config.step_alone:
            reasons.append("each layer must be of heads where steps stand alone, got latents")
        return reasons

    def make_buffers(self, limits: Limits) -> TritonBuffers:
        """Workspace for the largest decode step."""
        rules = tuple(_sharing_rule(limits, group) for group in range(len(limits.windows)))
        return TritonBuffers(
            workspace=split_workspace(
                limits.max_reqs,
                {(spec.num_heads, spec.num_kv_heads) for spec in limits.layers},
                v_head_dim=max(spec.v_head_dim for spec in limits.layers),
                device=limits.device,
                shares_prefixes=any(rules),
            ),
            rules=rules,
            shared=tuple(
                rule and shared_prefixes(limits.max_reqs, limits.device) for rule in rules
            ),
            page_size=limits.page_size,
        )

    def plan(self, view: StepView, buffers: TritonBuffers) -> TritonPlan:
        """The page-table layout as derived, and what requests of a decode share; kernels split from
        device lengths."""
        reqs = view.padded_reqs
        found: list[SharedPrefixes | None] = [None] * len(view.groups)
        if view.shares_prefix:
            groups = zip(view.groups, buffers.rules, buffers.shared, strict=True)
            for index, (group, rule, shared) in enumerate(groups):
                if rule and shared and reqs >= rule.min_reqs:
                    found[index] = into = shared.of(reqs)
                    find_shared(
                        group.page_table, view.kv_lens, into, rule, page_size=buffers.page_size
                    )
        return TritonPlan(
            table=page_table_plan(view), workspace=buffers.workspace, shared=tuple(found)
        )

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layer: LayerCache, plan: TritonPlan, part: Part
    ) -> tuple[Tensor, Tensor | None]:
        """See AttentionBackend.forward."""
        if part is Part.STEP:
            return attend_step(q, k, v, layer, plan.table, by_triton=True)
        call = paged_call(q, layer, plan.table, part)
        is_decode = plan.table.max_extend_len == 1 and part is Part.ALL
        if is_decode and not layer.spec.v_in_k:
            paged_decode(call, plan.workspace, plan.shared[layer.spec.group])
        else:
            paged_extend(call, plan.workspace)
        return call.out, call.lse


def _sharing_rule(limits: Limits, group: int) -> SharingRule | None:
    """Of one cache group; None where sharing is off, a window hides what is shared, its layers have
    several numbers of heads to a KV head, or requests are too few or short."""
    ratios = {spec.num_heads // spec.num_kv_heads for spec in limits.layers if spec.group == group}
    if not limits.share_prefixes or limits.windows[group] is not None or len(ratios) != 1:
        return None
    rule = sharing_rule(ratios.pop(), limits.page_size)
    is_worth_it = limits.max_reqs >= rule.min_reqs and limits.max_pages[group] >= rule.min_pages
    return rule if is_worth_it else None
