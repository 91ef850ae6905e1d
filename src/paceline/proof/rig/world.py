"""The world: one runner for one case, which its batches are launched on in turn."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import nn

from paceline.attention.contract import AttentionBackend
from paceline.attention.states import StateBackend
from paceline.cache.pool import KVFormat
from paceline.core.dtypes import FP8
from paceline.core.errors import SanitizerError
from paceline.core.events import EventLog
from paceline.core.model.cache_groups import cache_group_specs, in_format
from paceline.core.model.config import ModelConfig
from paceline.core.request.blocks import Blocks
from paceline.core.request.input_rows import EncoderInput
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, FinishCode, JoinDelta, PageDelta, Step, StepLayout
from paceline.models.causal_lm import CausalLM
from paceline.proof.check.cell import RunnerKind
from paceline.proof.rig.contenders import ragged_for
from paceline.proof.rig.placement import BatchPlacement
from paceline.proof.suite.case import Batch, Case
from paceline.runner.build import NO_MIXERS, build_runner
from paceline.runner.extents import PaddedSize
from paceline.runner.proposer import NOBODY, Proposer
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.runner_config import RunnerConfig
from paceline.runner.streams import make_stream

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)
_SLACK = 4  # tokens of context behind the longest request


class OneSize(GraphSizes):
    """Every step of a case is padded alike, so that all its batches replay one graph."""

    def pad(self, num_reqs: int, extend_len: int) -> PaddedSize | None:
        return PaddedSize.uniform(self.sizes[0], extend_len) if self.sizes else None

    def pad_ragged(self, num_reqs: int, num_tokens: int) -> PaddedSize | None:
        return PaddedSize.ragged(self.sizes[0], self.tokens[0]) if self.tokens else None


class World:
    """Builds a ModelRunner around a model of the proof's own; owner of it, its stream, its events.

    runner: for whoever looks at its parts.
    """

    def __init__(
        self,
        case: Case,
        places: Sequence[BatchPlacement],
        model: nn.Module,
        config: ModelConfig,
        backend: AttentionBackend,
        *,
        kv: KVFormat,
        runner: RunnerKind,
        device: torch.device,
        proposer: Proposer = NOBODY,
        mixers: Mapping[str, StateBackend] = NO_MIXERS,
    ) -> None:
        """model: has what a step asks of a CausalLM."""
        self._case = case
        self._places = places
        self._device = device
        self._is_graph = is_graph = runner is not RunnerKind.EAGER
        self._is_round = proposer is not NOBODY
        self._events = EventLog()
        self._epoch = 0
        sizes = (case.captured_reqs,) if case.captured_reqs and is_graph else ()
        tokens = (case.captured_tokens,) if case.is_ragged and sizes else ()
        has_trees = any(batch.parents for batch in case.batches)
        specs = cache_group_specs(config, case.page_size, state_every=case.state_every)
        if case.has_scaled_latents:
            specs = tuple(in_format(spec, case.dtype, FP8) for spec in specs)
        self.runner = build_runner(
            cast(CausalLM, model),
            config,
            specs,
            backend,
            RunnerConfig(
                max_running=max(places[0].num_rows - 1, case.captured_reqs),
                max_batched_tokens=max_tokens(case),
                context_len=config.max_position,
                max_join_tokens=max(sum(batch.kv_lens) for batch in case.batches),
                num_pages=places[0].pool_pages,
                graph_max_reqs=case.captured_reqs,
                graph_max_tokens=case.captured_tokens,
                capture=is_graph,
                has_blocks=any(each.blocks is not None for each in case.batches),
                poison_graphs=True,
                sanitize=is_graph,
                max_tree_rows=case.max_extend_len if has_trees else 0,
                draft=proposer.shape,
                latent_expand_from=case.latent_expand_from,
                sizes=OneSize(sizes, tokens),
            ),
            stream=make_stream(device),
            device=device,
            dtype=getattr(torch, case.dtype),
            kv=kv,
            notify=self._events,
            proposer=proposer,
            mixers=mixers,
            ragged=ragged_for(case, device.type),
        )

    def run(self, step: Step) -> list[str]:
        """Launch a step and wait for it; what the sanitizer says of it."""
        if self._device.type == "cuda":  # the step has a stream of its own
            torch.cuda.synchronize(self._device)
        try:
            self.runner.launch(step).wait()
        except SanitizerError as error:
            return [str(error)]
        return []

    def freeze(self, index: int) -> None:
        """As a step that found an end left requests of a batch: finished, whatever the host
        believes."""
        for request in self._case.batches[index].frozen:
            row = self._places[index].rows[request]
            self.runner.parts.table.finish[row] = FinishCode.LENGTH

    def unproven(self) -> str | None:
        """Why the batches did not show what the runner was to show; None when they did."""
        captured = self.runner.graphs_captured
        if not self._is_graph or captured == 1:
            return None
        events = [f"{event.reason}: {event.detail}" for event in self._events.counts()]
        return f"the batches must share one graph, got {captured}; events: {events or 'none'}"

    def step(
        self,
        index: int,
        ids: Sequence[Sequence[int]],
        encoders: Sequence[EncoderInput | None] = (),
    ) -> Step:
        """The step that brings a batch, with everything of its live requests joining.

        ids: [num_reqs] token ids of each request, of which a round drafts all but the root.
        """
        batch, placement = self._case.batches[index], self._places[index]
        self._epoch += 1
        deltas: list[Delta] = []
        for request, row in enumerate(placement.rows):
            if request not in batch.frozen:
                given = encoders[request] if encoders else None
                deltas.append(self._join(batch, request, row, ids[request], given))
            deltas += [
                PageDelta(row=row, group=group, start=0, page_ids=pages[request])
                for group, pages in enumerate(placement.pages)
                if pages[request]
            ]
        return Step(
            epoch=self._epoch,
            layout=StepLayout(
                rows=placement.rows,
                extend_lens=batch.extend_lens,
                emits=(self._is_round,) * batch.num_reqs,
                parents=None if self._is_round else batch.parents,
            ),
            is_ragged=self._case.is_ragged,
            mask=self._case.mask(batch),
            is_round=self._is_round,
            prefix_lens_bound=batch.prefix_lens,
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=tuple(deltas),
            shares_prefix=self._case.has_crowd,
        )

    def _join(
        self, batch: Batch, request: int, row: int, ids: Sequence[int], given: EncoderInput | None
    ) -> JoinDelta:
        prefix = batch.prefix_lens[request]
        known = tuple(ids[: prefix + 1]) if self._is_round else tuple(ids)
        positions = None if batch.rope is None else batch.rope[request]
        return JoinDelta(
            row=row,
            token_ids=known,
            prompt_len=len(known) if positions is None else len(positions.axes[0]),
            prefix_len=prefix,
            max_len=self._case.max_kv_len + _SLACK,
            params=_PARAMS,
            positions=positions,
            encoder=given,
            blocks=_blocks_of(batch, request),
        )


def max_tokens(case: Case) -> int:
    """Tokens of the largest step, padded."""
    live = max(batch.num_tokens for batch in case.batches)
    padded = case.captured_tokens if case.is_ragged else case.captured_reqs * case.max_extend_len
    return max(live, padded)


def context_len(case: Case) -> int:
    """What a padded ragged step leaves over is a row of its own, within the context."""
    return max(case.max_kv_len, case.captured_tokens) + _SLACK


def new_ids(batch: Batch, index: int, first: int) -> list[int]:
    """[num_tokens] an id for each token of a batch, from `first` on, in no order."""
    order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(index))
    return (order + first).tolist()


def _blocks_of(batch: Batch, request: int) -> Blocks | None:
    spans = batch.blocks[request] if batch.blocks is not None else ()
    return Blocks(spans) if spans else None
