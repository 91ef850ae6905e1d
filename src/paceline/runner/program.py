"""StepProgram: the functions of a step of one padded size: derive, forward, sample and commit.

Eager steps call them, graphs record them.  There is no second copy.
"""

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache, StepView
from paceline.core.sampling_params import MAX_LOGPROBS, SamplerTier
from paceline.core.step import PromptSpan
from paceline.layers.attention import AttentionContext
from paceline.layers.sampling import TokenLogprobs, sample
from paceline.models.causal_lm import CausalLM
from paceline.runner.buffers import StepBuffers
from paceline.runner.commit import commit
from paceline.runner.derive import derive
from paceline.runner.prompt_logprobs import prompt_logprobs
from paceline.runner.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The device-side parts every step of an engine works on."""

    model: CausalLM
    backend: AttentionBackend
    backend_buffers: Any
    layers: tuple[LayerCache, ...]  # [num_layers]
    page_sizes: tuple[int, ...]  # [num_groups] tokens
    table: RequestTable
    buffers: StepBuffers
    taps: tuple[str, ...]


class StepProgram:
    """One padded size with one sampler tier; its results stay on fixed addresses once captured."""

    def __init__(
        self,
        parts: Parts,
        view: StepView,
        *,
        sampler: SamplerTier,
        logprobs: bool,
        prompt_spans: tuple[PromptSpan, ...] = (),
    ) -> None:
        self._parts = parts
        self._view = view
        self._sampler = sampler
        self._top_logprobs = MAX_LOGPROBS if logprobs else 0
        self._prompt_spans = prompt_spans
        self.prompt_logprobs: TokenLogprobs | None = None  # [num_scored]  after forward
        self._plan: Any = None
        self.logits: Tensor | None = None  # [padded_reqs, vocab]  after forward; the head's dtype

    def run(self) -> None:
        """The step's segments in order; none needs the host before the next."""
        self._derive()
        self._forward()
        self._sample()

    def _derive(self) -> None:
        parts = self._parts
        derive(parts.buffers, parts.table, self._view, parts.page_sizes)
        self._plan = parts.backend.plan(self._view, parts.backend_buffers)

    def _forward(self) -> None:
        parts, view = self._parts, self._view
        ctx = AttentionContext(
            backend=parts.backend,
            plan=self._plan,
            layers=parts.layers,
            out_cache_locs=tuple(group.out_cache_loc for group in view.groups),
        )
        output = parts.model(view.input_ids, view.positions, ctx, parts.taps)
        hidden = output.hidden
        if self._prompt_spans:
            self.prompt_logprobs = prompt_logprobs(
                hidden,
                self._prompt_spans,
                view=view,
                token_ids=parts.table.token_ids,
                vocab_size=parts.model.head.vocab_size,
                logits_of=parts.model.logits,
            )
        if view.max_extend_len > 1:  # otherwise each token is its request's last
            hidden = hidden.index_select(0, view.logits_loc)
        self.logits = parts.model.logits(hidden)

    def _sample(self) -> None:
        parts, view = self._parts, self._view
        assert self.logits is not None, "forward runs before sample"
        sampled = sample(
            self.logits,
            rows=view.row_ids,
            positions=view.kv_lens,
            table=parts.table.sampling,
            token_ids=parts.table.token_ids,
            tier=self._sampler,
            top_logprobs=self._top_logprobs,
        )
        commit(parts.buffers, parts.table, view, sampled)
