"""DraftCache: the drafter's own KV pools, and attention over them.

Its cache groups stand behind the target's in every step; positions and slots are those of the
request, so that both caches hold as many tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend
from paceline.attention.held import tensors_in
from paceline.cache.pool import KVFormat, KVPool
from paceline.core.errors import ModelError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import SOFTMAX, CacheKind, ModelConfig
from paceline.core.step import Step
from paceline.kernels.step_view import StepView
from paceline.layers.attention import StepContext, attention_limits, layer_caches


class DraftCache:
    """Sole owner of the drafter's pools and of what its attention holds.

    Passes of one round follow one another, so they share the backend's buffers, unless it plans on
    the host, before the round: then each pass has its own.
    """

    def __init__(
        self,
        config: ModelConfig,
        groups: Sequence[CacheGroupSpec],
        num_pages: Sequence[int],
        backend: AttentionBackend,
        *,
        max_reqs: int,
        max_tokens: int,
        length: int,
        num_passes: int,
        kv: KVFormat,
        dtype: torch.dtype,
        device: torch.device,
        sinks: Sequence[Tensor | None],
    ) -> None:
        """config: of the drafter's layers; num_pages: [num_groups]; length: tokens of one request,
        those in flight included; num_passes: of a round, `observe` included."""
        self.rope_axes = config.rope_axes
        self.backend = backend
        self.dtype = dtype
        self.device = device
        self.pools = tuple(
            KVPool(group, pages, kv=kv, device=device)
            for group, pages in zip(groups, num_pages, strict=True)
        )
        _require_attention(config)
        self._layers = layer_caches(config, groups, self.pools, sinks=sinks)
        limits = attention_limits(
            config,
            tuple(groups),
            device=device,
            dtype=dtype,
            kv_dtype=kv.dtype,
            max_reqs=max_reqs,
            max_tokens=max_tokens,
            length=length,
        )
        makes = num_passes if backend.capabilities.host_plan else 1
        self._buffers: list[Any] = [backend.make_buffers(limits) for _ in range(makes)]

    def own_view(self, view: StepView) -> StepView:
        """`view` with the drafter's cache groups alone."""
        return replace(view, groups=view.groups[len(view.groups) - len(self.pools) :])

    def context(self, view: StepView, pass_id: int) -> StepContext:
        """Plan the attention of one pass.  view: with the drafter's groups alone."""
        return StepContext(
            view=view,
            backend=self.backend,
            plan=self.backend.plan(view, self._buffers_of(pass_id)),
            layers=self._layers,
        )

    def host_plan(self, step: Step, pass_id: int) -> None:
        """Let the backend plan one pass on the host; `step` says the pass's rows and lengths."""
        self.backend.host_plan(step, self._buffers_of(pass_id))

    def named_tensors(self) -> dict[str, Tensor]:
        """What the backend holds, by name."""
        named: dict[str, Tensor] = {}
        for index, held in enumerate(self._buffers):
            named |= tensors_in(f"draft.backend.{index}", held)
        return named

    def _buffers_of(self, pass_id: int) -> Any:
        return self._buffers[pass_id if len(self._buffers) > 1 else 0]


def _require_attention(config: ModelConfig) -> None:
    """Raise ModelError for a layer that mixes otherwise: a pass would have no plan of it."""
    for index, layer in enumerate(config.layers):
        others = [cached for cached in layer.caches if cached.kind is not CacheKind.TOKENS]
        if others:
            raise ModelError.about(
                f"mixer of layer {index} of the drafter",
                expected=f"{SOFTMAX} over its own tokens",
                got=f"{others[0].mixer}, whose cache group is of kind {others[0].kind.value}",
                remedy="draft with a model whose layers all attend",
            )
