"""StepProgram: the functions of a step of one padded size: derive, forward, sample and commit.

Eager steps call them, graphs record them.  There is no second copy.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache
from paceline.attention.held import tensors_in
from paceline.cache.pool import KVPool
from paceline.core.sampling_params import MAX_LOGPROBS, SamplerTier
from paceline.core.step import PromptSpan
from paceline.kernels.chain_rows import ChainRows, StepRows, chain_rows
from paceline.kernels.step_view import StepView
from paceline.layers.attention import AttentionContext
from paceline.layers.sampling import SampledLogprobs, sample
from paceline.models.causal_lm import CausalLM
from paceline.models.decoder import Hidden
from paceline.runner.buffers import StepBuffers
from paceline.runner.commit import commit
from paceline.runner.derive import derive
from paceline.runner.prompt_logprobs import prompt_logprobs
from paceline.runner.proposer import Observed, Proposer
from paceline.runner.request_table import RequestTable


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """The device-side parts every step of an engine works on."""

    model: CausalLM
    backend: AttentionBackend
    backend_buffers: Any
    layers: tuple[LayerCache, ...]  # [num_layers] of the target
    pools: tuple[KVPool, ...]  # [num_target_groups]; the drafter's groups stand behind them
    page_sizes: tuple[int, ...]  # [num_groups] tokens
    table: RequestTable
    buffers: StepBuffers
    taps: tuple[str, ...]
    proposer: Proposer | None = None  # None: no speculation
    force_accept_len: float | None = None  # tokens per round, whatever was sampled
    rejects: bool = False  # accept drafts by rejection sampling

    @property
    def all_pools(self) -> tuple[KVPool, ...]:
        """[num_groups] the drafter's behind the target's."""
        return self.pools if self.proposer is None else (*self.pools, *self.proposer.pools)

    def named_tensors(self) -> dict[str, Tensor]:
        """The tensors of table, step, backend and drafter by name: all but weights and pools."""
        return {
            **self.table.named_tensors(),
            **self.buffers.named_tensors(),
            **tensors_in("backend", self.backend_buffers),
            **({} if self.proposer is None else self.proposer.named_tensors()),
        }


def target_view(parts: Parts, view: StepView) -> StepView:
    """`view` with the target's cache groups alone: what its attention backend plans from."""
    return replace(view, groups=view.groups[: len(parts.pools)])


def target_forward(parts: Parts, view: StepView) -> Hidden:
    """Plan and run the target over the rows of `view`."""
    ctx = AttentionContext(
        backend=parts.backend,
        plan=parts.backend.plan(target_view(parts, view), parts.backend_buffers),
        layers=parts.layers,
        out_cache_locs=tuple(group.out_cache_loc for group in view.groups),
    )
    output: Hidden = parts.model(view.input_ids, view.positions, ctx, parts.taps)
    return output


def taps_of(parts: Parts, output: Hidden) -> tuple[Tensor, ...]:
    """The hidden states that were asked for, in that order."""
    return tuple(output.taps[name] for name in parts.taps)


def observe(parts: Parts, view: StepView, taps: tuple[Tensor, ...]) -> None:
    """Let the drafter, where there is one, follow a step that holds no drafts."""
    if parts.proposer is None:
        return
    next_ids = torch.empty_like(view.positions)
    chain_rows(
        parts.table.token_ids,
        parts.table.kv_committed,
        StepRows(view.row_ids, view.req_ids, view.positions),
        ChainRows(next_ids, None),
    )
    observed = Observed(view=view, next_ids=next_ids, last=view.logits_loc, taps=taps)
    parts.proposer.observe(observed)


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
        observed: bool = True,
    ) -> None:
        """observed: the drafter, where there is one, follows."""
        self._parts = parts
        self._view = view
        self._sampler = sampler
        self._top_logprobs = MAX_LOGPROBS if logprobs else 0
        self._prompt_spans = prompt_spans
        self._observed = observed
        self.prompt_logprobs: SampledLogprobs | None = None  # [num_scored]  after forward
        self.logits: Tensor | None = None  # [padded_reqs, vocab]  after forward; the head's dtype

    def run(self) -> None:
        """The step's segments in order; none needs the host before the next."""
        parts, view = self._parts, self._view
        derive(parts.buffers, parts.table, view, parts.page_sizes)
        output = target_forward(parts, view)
        self._score(output.hidden)
        self._sample()
        if self._observed:
            observe(parts, view, taps_of(parts, output))

    def _score(self, hidden: Tensor) -> None:
        """Logits of each request's last token; of the prompt's tokens, where asked for."""
        parts, view = self._parts, self._view
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
