"""The rig: one runner for one case, and one launch after another on it."""

import hashlib
from typing import cast

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat, Scales
from paceline.core.blocks import Blocks
from paceline.core.errors import SanitizerError
from paceline.core.events import EventLog
from paceline.core.model_config import cache_group_specs
from paceline.core.padding import PAD_ROW
from paceline.core.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, FinishCode, JoinDelta, PageDelta, Step, StepLayout
from paceline.models.causal_lm import CausalLM
from paceline.proof.check.cell import RunnerKind
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.rig.invariants import broken_invariants
from paceline.proof.rig.placement import BatchPlacement
from paceline.proof.rig.pools import Pools
from paceline.proof.rig.prepared import PreparedCase
from paceline.proof.rig.probe import POISON_ID, ProbeModel, probe_config
from paceline.proof.rig.watched import watch
from paceline.proof.suite.case import Batch, Case
from paceline.runner.buffers import PaddedSize
from paceline.runner.build import RunnerConfig, build_runner
from paceline.runner.graph_sizes import GraphSizes
from paceline.runner.model_runner import ModelRunner
from paceline.runner.sanitizer.poison import bits_of
from paceline.runner.streams import make_stream

_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)
_SLACK = 4  # tokens of context behind the longest request


class OneSize(GraphSizes):
    """Every step of a case is padded alike, so that all its batches replay one graph."""

    def pad(self, num_reqs: int, extend_len: int) -> PaddedSize | None:
        return PaddedSize.uniform(self.sizes[0], extend_len) if self.sizes else None

    def pad_ragged(self, num_reqs: int, num_tokens: int) -> PaddedSize | None:
        return PaddedSize.ragged(self.sizes[0], self.tokens[0]) if self.tokens else None


class Rig:
    """Builds a ModelRunner around the probe and launches a case's batches on it."""

    def __init__(
        self,
        prepared: PreparedCase,
        backend: AttentionBackend,
        runner: RunnerKind,
        device: torch.device,
    ) -> None:
        self._case = case = prepared.case
        self._device = device
        self._places = prepared.places
        self._data = prepared.data
        self._is_graph = runner is not RunnerKind.EAGER
        self._epoch = 0
        self._events = EventLog()
        self._tokens = 0  # of the batch launched last, without padding
        self._digest = hashlib.sha256()
        sinks = self._data[0].sinks
        self._probe = ProbeModel(
            case,
            max_tokens=_max_tokens(case),
            sinks=None if sinks is None else sinks.float().to(device),
            device=device,
        )
        self._watched = watch(backend, prefix_alone=case.prefix_only)
        self._stream = make_stream(device)
        self._runner = self._build(self._data[0])
        self._pools = Pools(
            prepared,
            [layer for layer in self._runner.parts.layers if layer is not None],
            loads_dead=self._watched.capabilities.loads_dead_slots,
        )

    def answer(self, layer: int) -> Tensor:
        """[num_tokens, num_heads, v_head_dim] float64, of the batch launched last."""
        return self._probe.outs[layer, : self._tokens].double().cpu()

    def lse(self, layer: int) -> Tensor | None:
        """[num_tokens, num_heads] float64 likewise; None where forward returned none."""
        if layer not in self._watched.layers_with_lse:
            return None
        return self._watched.lses[layer][: self._tokens].double().cpu()

    def digest(self) -> str:
        """SHA-256 of what all launches answered (the tokens of live requests; lse where forward
        returned one) and wrote to the caches, as bits: the same for two programs that compute the
        same on one machine."""
        return self._digest.hexdigest()

    def unproven(self) -> str | None:
        """Why the batches did not show what the runner was to show; None when they did."""
        captured = self._runner.graphs_captured
        if not self._is_graph or captured == 1:
            return None
        events = [f"{event.reason}: {event.detail}" for event in self._events.counts()]
        return f"the batches must share one graph, got {captured}; events: {events or 'none'}"

    def launch(self, index: int) -> list[str]:
        """Run one batch; returns what is wrong with all but its answer."""
        batch, placement = self._case.batches[index], self._places[index]
        ids = self._fill_table(index)
        self._pools.fill(index)
        before = self._pools.snapshot()
        self._probe.outs.fill_(float("nan"))
        self._watched.clear()
        self._freeze([placement.rows[request] for request in batch.frozen])
        self._tokens = batch.num_tokens
        unused = min({*range(1, placement.num_rows)} - {*placement.rows})
        row_ids = self._runner.parts.buffers.row_ids.fill_(unused)  # until the step derives
        step = self._step(batch, placement, ids)
        try:
            poisoned = self._run(step)
        except Exception as error:
            broken = []
            is_derived = ((row_ids != unused) & (row_ids != PAD_ROW)).any()  # not by a capture
            if self._has_one_view() and is_derived:  # the view tells why
                broken = self._broken(index, ids)
            if not broken:
                raise
            return [*broken, f"raised {type(error).__name__}: {error}"]
        self._add_to_digest(index)
        faults = self._broken(index, ids) + self._watched.changed_arguments()
        return faults + self._pools.wrong_writes(index, before) + poisoned

    def _add_to_digest(self, index: int) -> None:
        batch = self._case.batches[index]
        live = ~torch.tensor(batch.is_dropped)
        tensors = list(self._pools.written(index))
        for layer in range(len(self._case.layers)):
            tensors.append(self._probe.outs[layer, : self._tokens].cpu()[live])
            if layer in self._watched.layers_with_lse:
                tensors.append(self._watched.lses[layer][: self._tokens].cpu()[live])
        for tensor in tensors:
            self._digest.update(bits_of(tensor.contiguous()).cpu().numpy().tobytes())

    def _broken(self, index: int, ids: list[list[int]]) -> list[str]:
        return broken_invariants(
            self._case,
            self._case.batches[index],
            self._places[index],
            ids=ids,
            watched=self._watched,
            positions=self._probe.positions,
        )

    def _has_one_view(self) -> bool:
        """Whether the last plan is of every step's view; eager steps have views of their own."""
        return self._is_graph and self._watched.planned is not None

    def _run(self, step: Step) -> list[str]:
        """Launch a step and wait for it; what the sanitizer says of it."""
        if self._device.type == "cuda":  # the step has a stream of its own
            torch.cuda.synchronize(self._device)
        try:
            self._runner.launch(step).wait()
        except SanitizerError as error:
            return [str(error)]
        return []

    def _freeze(self, rows: list[int]) -> None:
        """As a step that found an end left them: finished, whatever the host believes."""
        for row in rows:
            self._runner.parts.table.finish[row] = FinishCode.LENGTH

    def _build(self, data: BatchData) -> ModelRunner:
        case = self._case
        # What a padded ragged step leaves over is a row of its own, within the context.
        context = max(case.max_kv_len, case.captured_tokens) + _SLACK
        config = probe_config(case, data.scale, max_position=context)
        sizes = (case.captured_reqs,) if case.captured_reqs and self._is_graph else ()
        tokens = (case.captured_tokens,) if case.is_ragged and sizes else ()
        dtype: torch.dtype = getattr(torch, case.dtype)
        return build_runner(
            cast(CausalLM, self._probe),  # it has what a step asks of one
            config,
            cache_group_specs(config, case.page_size),
            self._watched,
            RunnerConfig(
                max_running=max(self._places[0].num_rows - 1, case.captured_reqs),
                max_batched_tokens=_max_tokens(case),
                context_len=context,
                max_join_tokens=max(sum(batch.kv_lens) for batch in case.batches),
                num_pages=self._places[0].pool_pages,
                graph_max_reqs=case.captured_reqs,
                graph_max_tokens=case.captured_tokens,
                capture=self._is_graph,
                has_blocks=any(each.blocks is not None for each in case.batches),
                poison_graphs=True,
                sanitize=self._is_graph,
                max_tree_rows=case.max_extend_len if any(b.parents for b in case.batches) else 0,
                sizes=OneSize(sizes, tokens),
            ),
            stream=self._stream,
            device=self._device,
            dtype=dtype,
            kv=_kv_format(case, data, dtype),
            notify=self._events,
        )

    def _fill_table(self, index: int) -> list[list[int]]:
        """Write the step's queries, keys and values; returns each request's token ids."""
        batch, data = self._case.batches[index], self._data[index]
        order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(index))
        new = (order + POISON_ID + 1).tolist()
        table = self._probe.table
        for number in range(len(self._case.layers)):
            table[number] = self._pools.dead_token(data, number)
        ids: list[list[int]] = []
        for request, (prefix, extend) in enumerate(
            zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            taken, new = new[:extend], new[extend:]
            keys, values = data.keys[request][:, prefix:], data.values[request][:, prefix:]
            parts = [data.queries[request], data.computed(keys), data.computed(values)]
            shown = parts[:2] if self._case.v_in_k else parts
            rows = torch.cat([part.flatten(2) for part in shown], dim=2)
            table[:, taken] = rows.to(table)
            ids.append([POISON_ID] * prefix + taken)
        return ids

    def _step(self, batch: Batch, placement: BatchPlacement, ids: list[list[int]]) -> Step:
        """The step that brings `batch`, with everything of its live requests joining."""
        self._epoch += 1
        deltas: list[Delta] = []
        for request, row in enumerate(placement.rows):
            if request not in batch.frozen:
                deltas.append(
                    JoinDelta(
                        row=row,
                        token_ids=tuple(ids[request]),
                        prompt_len=len(ids[request]),
                        prefix_len=batch.prefix_lens[request],
                        max_len=self._case.max_kv_len + _SLACK,
                        params=_PARAMS,
                        blocks=_blocks_of(batch, request),
                    )
                )
            deltas += [
                PageDelta(row=row, group=group, start=0, page_ids=pages[request])
                for group, pages in enumerate(placement.pages)
            ]
        return Step(
            epoch=self._epoch,
            layout=StepLayout(
                rows=placement.rows,
                extend_lens=batch.extend_lens,
                emits=(False,) * batch.num_reqs,
                parents=batch.parents,
            ),
            is_ragged=self._case.is_ragged,
            mask=self._case.mask(batch),
            prefix_lens_bound=batch.prefix_lens,
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=tuple(deltas),
            shares_prefix=self._case.has_crowd,
        )


def _blocks_of(batch: Batch, request: int) -> Blocks | None:
    spans = batch.blocks[request] if batch.blocks is not None else ()
    return Blocks(spans) if spans else None


def _max_tokens(case: Case) -> int:
    """Tokens of the largest step, padded."""
    live = max(batch.num_tokens for batch in case.batches)
    padded = case.captured_tokens if case.is_ragged else case.captured_reqs * case.max_extend_len
    return max(live, padded)


def _kv_format(case: Case, data: BatchData, dtype: torch.dtype) -> KVFormat:
    if case.kv_dtype is None or data.k_scales is None or data.v_scales is None:
        return KVFormat(dtype=dtype)
    pairs = zip(data.k_scales, data.v_scales, strict=True)
    scales = {layer: Scales(float(k), float(v)) for layer, (k, v) in enumerate(pairs)}
    return KVFormat(dtype=getattr(torch, case.kv_dtype), scales=scales)
