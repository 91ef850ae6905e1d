"""The rig: one runner for one case, and one launch after another on it."""

import hashlib

import torch
from torch import Tensor

from paceline.attention.contract import AttentionBackend
from paceline.cache.pool import KVFormat, Scales
from paceline.core.padding import PAD_ROW
from paceline.core.request.input_rows import EncoderInput
from paceline.proof.check.cell import RunnerKind
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.likeness import likely_lse_mistakes, likely_mistakes
from paceline.proof.rig.invariants import broken_invariants, broken_step
from paceline.proof.rig.pools import Pools
from paceline.proof.rig.prepared import PreparedCase
from paceline.proof.rig.probe import POISON_ID, ProbeModel, probe_config
from paceline.proof.rig.wanted import wanted_step
from paceline.proof.rig.watched import watch
from paceline.proof.rig.world import World, context_len, max_tokens, new_ids
from paceline.proof.suite.case import Case
from paceline.runner.sanitizer.poison import bits_of


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
        self._places = prepared.places
        self._data = prepared.data
        self._expectations = prepared.expectations
        self._is_graph = runner is not RunnerKind.EAGER
        self._tokens = 0  # of the batch launched last, without padding
        self._digest = hashlib.sha256()
        sinks = self._data[0].sinks
        self._probe = ProbeModel(
            case,
            max_tokens=max_tokens(case),
            sinks=None if sinks is None else sinks.float().to(device),
            scale=self._data[0].scale,
            by_triton="cuda" in backend.capabilities.device_types,
            device=device,
        )
        self._watched = watch(backend, prefix_alone=case.prefix_only or case.reads_encoder)
        self._world = World(
            case,
            self._places,
            self._probe,
            probe_config(case, self._data[0].scale, max_position=context_len(case)),
            self._watched,
            kv=_kv_format(case, self._data[0]),
            runner=runner,
            device=device,
        )
        self._runner = self._world.runner
        parts = self._runner.parts
        self._pools = Pools(
            prepared,
            parts.pools if parts.encoder is None else parts.encoder.pools,
            loads_dead=self._watched.capabilities.loads_dead_slots,
        )

    def answer(self, layer: int) -> Tensor:
        """[num_tokens, num_heads, v_head_dim] float64, of the batch launched last."""
        return self._probe.outs[layer, : self._tokens].double().cpu()

    def lse(self, layer: int) -> Tensor | None:
        """[num_tokens, num_heads] float64 likewise; None where forward returned none, or is not
        asked for all tokens, since some are expanded."""
        if layer not in self._watched.layers_with_lse or self._case.latent_expand_from:
            return None
        return self._watched.lses[layer][: self._tokens].double().cpu()

    def judge(self, index: int) -> tuple[float, float, str | None]:
        """(error, tolerance, fault) of the worst layer of the batch launched last, or of the first
        wrong one."""
        expectation, worst = self._expectations[index], (0.0, 1.0)
        for layer in range(len(self._case.layers)):
            out, lse, faults = self.answer(layer), self.lse(layer), []
            judged = expectation.judge(layer, out)
            judged_lse = None if lse is None else expectation.judge_lse(layer, lse)
            if not judged.is_right:
                faults.append(judged.said("error", likely_mistakes(expectation, layer, out)))
            if lse is not None and judged_lse is not None and not judged_lse.is_right:
                # Wrong scores make a wrong lse, which says nothing of its own.
                likely = likely_lse_mistakes(expectation, layer, lse) if judged.is_right else []
                faults.append(judged_lse.said("lse", likely))
            found = judged.error, judged.tolerance
            if faults:
                return *found, f"layer {layer}: {' and '.join(faults)}"
            worst = max(worst, found, key=lambda pair: pair[0] / pair[1])
        return *worst, None

    def digest(self) -> str:
        """SHA-256 of what all launches answered (the tokens of live requests; lse where forward
        returned one) and wrote to the caches, as bits: the same for two programs that compute the
        same on one machine."""
        return self._digest.hexdigest()

    def unproven(self) -> str | None:
        """Why the batches did not show what the runner was to show; None when they did."""
        return self._world.unproven()

    def launch(self, index: int) -> list[str]:
        """Run one batch; returns what is wrong with all but its answer."""
        batch, placement = self._case.batches[index], self._places[index]
        ids = self._fill_table(index)
        self._pools.fill(index)
        before = self._pools.snapshot()
        self._probe.outs.fill_(float("nan"))
        self._watched.clear()
        self._world.freeze(index)
        self._tokens = batch.num_tokens
        unused = min({*range(1, placement.num_rows)} - {*placement.rows})
        row_ids = self._runner.parts.buffers.row_ids.fill_(unused)  # until the step derives
        step = self._world.step(index, ids, self._encoders(index))
        try:
            poisoned = self._world.run(step)
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
        if self._case.both_ways or self._case.latent_expand_from:  # nobody plans all rows
            view = self._probe.view
            assert view is not None, "the probe ran"
            wanted = wanted_step(self._case.batches[index], self._places[index], ids, view)
            return broken_step(wanted, view, self._probe.positions)
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

    def _encoders(self, index: int) -> list[EncoderInput | None]:
        """[num_reqs] what a batch's requests bring for the layers that read an encoder's rows."""
        data, dtype = self._data[index], getattr(torch, self._case.dtype)
        found: list[EncoderInput | None] = []
        for request, rows in enumerate(self._case.batches[index].encoder_lens or ()):
            both = torch.cat((data.keys[request], data.values[request]), 3).to(dtype)
            given = EncoderInput(num_rows=rows, media_hash=f"{index} {request}", data=both)
            found.append(given if rows else None)
        return found

    def _fill_table(self, index: int) -> list[list[int]]:
        """Write the step's queries, keys and values; returns each request's token ids."""
        batch, data = self._case.batches[index], self._data[index]
        new = new_ids(batch, index, POISON_ID + 1)
        table = self._probe.table
        for number in range(len(self._case.layers)):
            table[number] = self._pools.dead_token(data, number)
        ids: list[list[int]] = []
        for request, (prefix, extend) in enumerate(
            zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            taken, new = new[:extend], new[extend:]
            brought = self._case.brought
            own = [data.computed(data.rows(part, request)[:, prefix:]) for part in brought]
            rows = torch.cat([each.flatten(2) for each in (data.queries[request], *own)], dim=2)
            table[:, taken] = rows.to(table)
            ids.append([POISON_ID] * prefix + taken)
        return ids


def _kv_format(case: Case, data: BatchData) -> KVFormat:
    dtype: torch.dtype = getattr(torch, case.dtype)
    if case.has_scaled_latents:
        return KVFormat(dtype=torch.float8_e4m3fn)
    if case.kv_dtype is None or data.k_scales is None or data.v_scales is None:
        return KVFormat(dtype=dtype)
    pairs = zip(data.k_scales, data.v_scales, strict=True)
    scales = {layer: Scales(float(k), float(v)) for layer, (k, v) in enumerate(pairs)}
    return KVFormat(dtype=getattr(torch, case.kv_dtype), scales=scales)
