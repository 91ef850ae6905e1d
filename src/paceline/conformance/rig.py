"""The rig: one runner for one case, and the books of what it may read and write."""

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend, LayerCache
from paceline.conformance.batch_data import BatchData
from paceline.conformance.case import Batch, Case
from paceline.conformance.cell import Runner
from paceline.conformance.invariants import broken_invariants
from paceline.conformance.placement import Placement, slots
from paceline.conformance.prepared import Prepared
from paceline.conformance.probe import POISON_ID, ProbeModel, probe_config
from paceline.conformance.watched import Watched
from paceline.core.errors import SanitizerError
from paceline.core.events import EventLog
from paceline.core.model_config import cache_group_specs
from paceline.core.modes import ExtendShape
from paceline.core.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, JoinDelta, PageDelta, Step, StepLayout
from paceline.kvcache.pool import KVFormat, Scales
from paceline.runner.buffers import PaddedSize
from paceline.runner.build import RunnerConfig, build_runner
from paceline.runner.graph_sizes import GraphSizes
from paceline.runner.model_runner import ModelRunner
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
        prepared: Prepared,
        backend: type[AttentionBackend],
        runner: Runner,
        device: torch.device,
    ) -> None:
        self._case = case = prepared.case
        self._device = device
        self._places = prepared.places
        self._data = prepared.data
        self._is_graph = runner is not Runner.EAGER
        self._epoch = 0
        self._events = EventLog()
        self._last: tuple[Batch, int] | None = None
        first = self._data[0]
        max_tokens = max(case.captured_tokens, *(batch.num_tokens for batch in case.batches))
        if case.mode.facts.extend is not ExtendShape.RAGGED:
            longest = max(max(batch.extend_lens) for batch in case.batches)
            max_tokens = max(max_tokens, case.captured_reqs * longest)
        sinks = None if first.sinks is None else first.sinks.float().to(device)
        self._probe = ProbeModel(case, max_tokens=max_tokens, sinks=sinks, device=device)
        self._watched = Watched(backend())
        self._runner = self._build(first, max_tokens)
        self._layers: tuple[LayerCache, ...] = self._runner.parts.layers

    def answer(self, layer: int) -> Tensor:
        """[num_tokens, num_heads, v_head_dim] float64, of the batch launched last."""
        assert self._last is not None, "launch a batch first"
        return self._probe.outs[layer, : self._last[0].num_tokens].double().cpu()

    def unproven(self) -> str | None:
        """Why the batches did not show what the runner was to show; None when they did."""
        if not self._is_graph:
            return None
        events = [f"{event.reason}: {event.detail}" for event in self._events.counts()]
        if self._runner.graphs_captured != 1:
            count = self._runner.graphs_captured
            return f"the batches must share one graph, got {count}; events: {events or 'none'}"
        return None

    def launch(self, index: int) -> list[str]:
        """Run one batch; returns what is wrong with all but its answer."""
        batch, placement = self._case.batches[index], self._places[index]
        ids = self._fill_table(index)
        self._fill_pools(index)
        before = [(layer.k_cache.clone(), layer.v_cache.clone()) for layer in self._layers]
        self._probe.outs.fill_(float("nan"))
        self._last = (batch, index)
        poisoned = self._run(self._step(batch, placement, ids))
        faults = broken_invariants(
            self._case, batch, placement, ids=ids, watched=self._watched
        )
        faults += self._wrong_positions(batch)
        return faults + self._wrong_writes(index, before) + poisoned

    def _run(self, step: Step) -> list[str]:
        """Launch a step and wait for it; what the sanitizer says of it."""
        try:
            self._runner.launch(step).wait()
        except SanitizerError as error:
            return [str(error)]
        return []

    # --- what a launch needs ----------------------------------------------------------------------

    def _build(self, data: BatchData, max_tokens: int) -> ModelRunner:
        case = self._case
        # What a padded ragged step leaves over is a row of its own, within the context.
        context = max(case.max_kv_len, case.captured_tokens) + _SLACK
        config = probe_config(case, data.scale, max_position=context)
        max_reqs = max(self._places[0].num_rows - 1, case.captured_reqs)
        is_ragged = case.mode.facts.extend is ExtendShape.RAGGED
        sizes = (case.captured_reqs,) if case.captured_reqs and self._is_graph else ()
        tokens = (case.captured_tokens,) if is_ragged and sizes else ()
        widest = max(max(batch.extend_lens) for batch in case.batches)
        dtype: torch.dtype = getattr(torch, case.dtype)
        return build_runner(
            self._probe,
            config,
            cache_group_specs(config, case.page_size),
            self._watched,
            RunnerConfig(
                max_running=max_reqs,
                max_batched_tokens=max_tokens,
                context_len=context,
                max_join_tokens=max(sum(batch.kv_lens) for batch in case.batches),
                num_pages=self._places[0].pool_pages,
                graph_max_reqs=case.captured_reqs,
                graph_max_tokens=case.captured_tokens,
                capture=self._is_graph,
                poison_graphs=True,
                sanitize=self._is_graph,
                max_tree_rows=widest if any(b.parents for b in case.batches) else 0,
                sizes=OneSize(sizes, tokens),
            ),
            stream=make_stream(self._device),
            device=self._device,
            dtype=dtype,
            kv=_kv_format(case, data, dtype),
            notify=self._events,
        )

    def _fill_table(self, index: int) -> list[list[int]]:
        """Write the step's queries, keys and values; returns each request's token ids."""
        case, batch, data = self._case, self._case.batches[index], self._data[index]
        order = torch.randperm(batch.num_tokens, generator=torch.Generator().manual_seed(index))
        new = (order + POISON_ID + 1).tolist()
        table = self._probe.table
        for number in range(len(case.layers)):
            table[number] = self._dead_row(data, number)
        ids: list[list[int]] = []
        for request, (prefix, extend) in enumerate(
            zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            taken, new = new[:extend], new[extend:]
            keys, values = data.keys[request][:, prefix:], data.values[request][:, prefix:]
            parts = (data.queries[request], keys, values)
            rows = torch.cat([part.flatten(2) for part in parts], dim=2)
            table[:, taken] = rows.to(table)
            ids.append([POISON_ID] * prefix + taken)
        return ids

    def _dead_row(self, data: BatchData, layer: int) -> Tensor:
        """[q + k + v of all heads] what padded tokens have, and tokens the cache holds already."""
        k, v = self._bait(data, layer)
        queries = torch.zeros(self._case.num_heads * self._case.head_dim, dtype=torch.float64)
        return torch.cat((queries + k.sum() * 0, k.flatten(), v.flatten()))

    def _bait(self, data: BatchData, layer: int) -> tuple[Tensor, Tensor]:
        """What no live row may read: NaN, or a key that every query prefers and its value where
        the kernels multiply what they mask by 0."""
        k, v = data.bait_keys[layer], data.bait_values[layer]
        if self._watched.capabilities.loads_dead_slots:
            return k, v
        return torch.full_like(k, float("nan")), torch.full_like(v, float("nan"))

    def _fill_pools(self, index: int) -> None:
        """Poison every slot, then write the keys and values of each prefix."""
        for layer in self._layers:
            k, v = self._bait(self._data[index], layer.spec.layer_id)
            layer.k_cache.copy_(_quantised(k, layer.k_cache, layer.k_scale))
            layer.v_cache.copy_(_quantised(v, layer.v_cache, layer.v_scale))
            for loc, keys, values in self._stored(index, layer, is_prefix=True):
                layer.k_cache.flatten(0, 1)[loc] = keys
                layer.v_cache.flatten(0, 1)[loc] = values

    def _stored(
        self, index: int, layer: LayerCache, *, is_prefix: bool
    ) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(slots, keys, values as the cache holds them) of each request's prefix or new tokens."""
        batch, placement, data = self._case.batches[index], self._places[index], self._data[index]
        found = []
        for request, prefix in enumerate(batch.prefix_lens):
            loc = torch.tensor(slots(placement, layer.spec.group, request))
            positions = torch.arange(len(loc))
            chosen = (positions < prefix) == is_prefix
            chosen &= (positions < batch.kv_lens[request]) & (loc >= 0)
            keys = data.keys[request][layer.spec.layer_id]
            values = data.values[request][layer.spec.layer_id]
            taken = positions[chosen]
            found.append(
                (
                    loc[chosen].to(self._device),
                    _quantised(keys[taken], layer.k_cache, layer.k_scale),
                    _quantised(values[taken], layer.v_cache, layer.v_scale),
                )
            )
        return found

    def _step(self, batch: Batch, placement: Placement, ids: list[list[int]]) -> Step:
        """The step that brings `batch`, with everything of its requests joining."""
        self._epoch += 1
        deltas: list[Delta] = []
        for request, row in enumerate(placement.rows):
            deltas.append(
                JoinDelta(
                    row=row,
                    token_ids=tuple(ids[request]),
                    prompt_len=len(ids[request]),
                    prefix_len=batch.prefix_lens[request],
                    max_len=self._case.max_kv_len + _SLACK,
                    params=_PARAMS,
                )
            )
            deltas += [
                PageDelta(row=row, group=group, start=0, page_ids=pages[request])
                for group, pages in enumerate(placement.pages)
            ]
        return Step(
            epoch=self._epoch,
            mode=self._case.mode,
            layout=StepLayout(
                rows=placement.rows,
                extend_lens=batch.extend_lens,
                emits=(False,) * batch.num_reqs,
                parents=batch.parents,
            ),
            prefix_lens_bound=batch.prefix_lens,
            sampler=SamplerTier.GREEDY,
            logprobs=False,
            deltas=tuple(deltas),
        )

    # --- what a launch may not have done ----------------------------------------------------------

    def _wrong_positions(self, batch: Batch) -> list[str]:
        wanted = [
            prefix + step
            for request, prefix in enumerate(batch.prefix_lens)
            for step in _depths(batch, request)
        ]
        got = self._probe.positions[: len(wanted)].tolist()
        return [] if got == wanted else [f"positions must be {wanted}, got {got}"]

    def _wrong_writes(self, index: int, before: list[tuple[Tensor, Tensor]]) -> list[str]:
        """What differs from the pools as they were, with the step's own tokens written."""
        faults = []
        for layer, (k, v) in zip(self._layers, before, strict=True):
            if not self._case.prefix_only:
                for loc, keys, values in self._stored(index, layer, is_prefix=False):
                    k.flatten(0, 1)[loc] = keys
                    v.flatten(0, 1)[loc] = values
            for name, wanted, cache in (("K", k, layer.k_cache), ("V", v, layer.v_cache)):
                changed = _differing_slots(wanted, cache)
                if changed:
                    faults.append(
                        f"{name} of layer {layer.spec.layer_id}: slots {changed[:4]} do not hold "
                        "what the step was to leave there"
                    )
        return faults


def _depths(batch: Batch, request: int) -> list[int]:
    """Of each row of a request: its depth in the tree, or its place in the chain."""
    if batch.parents is None:
        return list(range(batch.extend_lens[request]))
    depths: list[int] = []
    for parent in batch.parents[request]:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _kv_format(case: Case, data: BatchData, dtype: torch.dtype) -> KVFormat:
    if case.kv_dtype is None or data.k_scales is None or data.v_scales is None:
        return KVFormat(dtype=dtype)
    pairs = zip(data.k_scales, data.v_scales, strict=True)
    scales = {layer: Scales(float(k), float(v)) for layer, (k, v) in enumerate(pairs)}
    return KVFormat(dtype=getattr(torch, case.kv_dtype), scales=scales)


def _quantised(values: Tensor, cache: Tensor, scale: Tensor | None) -> Tensor:
    """`values` as the cache holds them."""
    divided = values if scale is None else values / scale.double().cpu()
    return divided.to(cache.device).to(cache.dtype)


def _differing_slots(wanted: Tensor, cache: Tensor) -> list[int]:
    """Slots whose bytes differ, but for slot 0, which padded rows write."""
    pairs = (tensor.flatten(0, 1).flatten(1).contiguous() for tensor in (wanted, cache))
    one, other = (tensor.view(torch.uint8) for tensor in pairs)
    changed = (one != other).any(dim=1)
    changed[0] = False
    return changed.nonzero().flatten().tolist()
