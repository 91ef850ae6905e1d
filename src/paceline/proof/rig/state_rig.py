"""The rig of layers that keep states: one runner for one case, and one launch after another.

Every slot but those that live requests read holds poison, slot 0 too.  Behind a step each request's
slot is compared with the oracle; checkpoints with the slots they are copies of; all others, and the
length that each stands for, with what they held; what the host is told with what was committed.
"""

import hashlib
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor

from paceline.attention.no_attention import NoAttention
from paceline.attention.states import StateBackend
from paceline.cache.pool import KVFormat
from paceline.core.padding import PAD_PAGE
from paceline.proof.check.cell import RunnerKind
from paceline.proof.oracle.states import RECURRENCES
from paceline.proof.rig.invariants import broken_step
from paceline.proof.rig.prepared import PreparedStates
from paceline.proof.rig.rounds import Scripted, proposer_of
from paceline.proof.rig.state_probe import StateProbe, WatchedStates, num_ids, state_config
from paceline.proof.rig.wanted import wanted_step
from paceline.proof.rig.world import World, context_len, max_tokens, new_ids
from paceline.runner.sanitizer.poison import bits_of, poison_bits

POISON_ID = 0  # of padded and frozen rows


class StateRig:
    """Builds a ModelRunner around the probe and launches a case's batches on it."""

    def __init__(
        self,
        prepared: PreparedStates,
        backend: StateBackend,
        runner: RunnerKind,
        device: torch.device,
    ) -> None:
        self._prepared = prepared
        self._case = case = prepared.case
        self._tokens = 0  # of the batch launched last, without padding
        self._digest = hashlib.sha256()
        most = max_tokens(case)
        self._end = num_ids(most) - 1  # follows where a path ends
        self._probe = StateProbe(case, max_tokens=most, device=device)
        self._watched = WatchedStates(backend, RECURRENCES[case.method].out_shape)
        self._proposer = proposer_of(case, device)
        self._world = World(
            case,
            prepared.places,
            self._probe,
            state_config(case, max_tokens=most, max_position=context_len(case)),
            NoAttention(),
            kv=KVFormat(dtype=getattr(torch, case.dtype)),
            runner=runner,
            device=device,
            proposer=self._proposer,
            mixers={case.method: self._watched},
        )
        self._pool = self._world.runner.parts.mixers[0].pool

    def launch(self, index: int) -> list[str]:
        """Run one batch; returns what is wrong with all but its answers."""
        batch = self._case.batches[index]
        ids = self._fill_table(index)
        self._fill_slots(index)
        before = {name: each.clone() for name, each in self._pool.named_tensors().items()}
        self._probe.outs.fill_(float("nan"))
        self._world.freeze(index)
        self._tokens = batch.num_tokens
        if isinstance(self._proposer, Scripted):
            self._proposer.script(batch, ids)
        poisoned = self._world.run(self._world.step(index, ids))
        faults = [*self._broken(index, ids), *self._wrong_slots(index, before), *poisoned]
        self._add_to_digest(index)
        return faults

    def judge(self, index: int) -> tuple[float, float, str | None]:
        """(error, tolerance, fault) of the worst answer of the batch launched last, or of the
        first wrong one."""
        expectation, worst = self._prepared.expectations[index], (0.0, 1.0)
        for layer in range(len(self._case.layers)):
            out = self._probe.outs[layer, : self._tokens]
            states = [
                torch.cat([part[layer, slot].flatten().double() for part in self._parts])
                for slot in self._written(index)
            ]
            answers = {
                "output": expectation.judge_out(layer, out),
                "state": expectation.judge_states(layer, states),
            }
            for what, (judged, likely) in answers.items():
                found = judged.error, judged.tolerance
                if not judged.is_right:
                    return *found, f"layer {layer}: {judged.said(what, likely)}"
                worst = max(worst, found, key=lambda pair: pair[0] / pair[1])
        return *worst, None

    def digest(self) -> str:
        """SHA-256 of what all launches answered, and left in slots of live requests, as bits."""
        return self._digest.hexdigest()

    def unproven(self) -> str | None:
        """Why the batches did not show what the runner was to show; None when they did."""
        return self._world.unproven()

    @property
    def _parts(self) -> list[Tensor]:
        """[num_parts] of [layers, num_slots, *part.shape]"""
        return [*self._pool.parts.values()]

    def _written(self, index: int) -> list[int]:
        """[num_reqs]"""
        return [write for _, write, _ in self._prepared.places[index].pages[0]]

    def _live(self, index: int) -> Iterator[tuple[int, int, int, int]]:
        """(request, slots that it reads, writes and may keep a state in)"""
        for request, slots in enumerate(self._prepared.places[index].pages[0]):
            if request not in self._case.batches[index].frozen:
                read, write, checkpoint = slots
                yield request, read, write, checkpoint

    def _fill_table(self, index: int) -> list[list[int]]:
        """Write what the step's tokens bring and what follows each; returns each request's ids."""
        batch, data = self._case.batches[index], self._prepared.data[index]
        new = new_ids(batch, index, POISON_ID + 1)
        probe = self._probe
        probe.table[:] = data.bait.to(probe.table)
        probe.next_ids.fill_(self._end)
        ids: list[list[int]] = []
        for request, (prefix, extend) in enumerate(
            zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ):
            taken, new = new[:extend], new[extend:]
            probe.table[:, taken] = data.rows[request].to(probe.table)
            path = () if batch.accepted is None else batch.accepted[request]
            for row, following in pairwise(path):
                probe.next_ids[taken[row]] = taken[following]
            ids.append([POISON_ID] * prefix + taken)
        return ids

    def _fill_slots(self, index: int) -> None:
        """Poison every slot, then write the state that each live request goes on from."""
        batch, data = self._case.batches[index], self._prepared.data[index]
        for part in self._parts:
            bits_of(part).copy_(poison_bits(part))
        self._pool.lens.zero_()
        for request, read, _, _ in self._live(index):
            if read == PAD_PAGE:
                continue
            self._pool.lens[read] = batch.prefix_lens[request]
            for layer, state in enumerate(data.carried[request]):
                for name, held in state.items():
                    part = self._pool.parts[name]
                    part[layer, read] = held.to(part)

    def _broken(self, index: int, ids: list[list[int]]) -> list[str]:
        batch, placement = self._case.batches[index], self._prepared.places[index]
        view = self._watched.planned
        assert view is not None, "no step was planned"
        wanted = wanted_step(batch, placement, ids, view)
        return broken_step(wanted, view, self._probe.positions)

    def _wrong_slots(self, index: int, before: dict[str, Tensor]) -> Iterator[str]:
        """Slots that hold what no request was to leave there; those written aside."""
        batch, every = self._case.batches[index], self._case.state_every
        lens = self._pool.lens.tolist()
        told = self._world.runner.parts.buffers.state_lens.tolist()
        assert every is not None, "a case of states says where they are kept"
        asked, wanted = {PAD_PAGE}, before[f"kv.{self._pool.spec.name}.lens"].tolist()
        for request, _, write, checkpoint in self._live(index):
            length = batch.committed[request]
            who = f"request {request}, which stands at {length} tokens"
            asked.add(write)
            wanted[write] = length
            if lens[write] != length:
                yield f"slot {write} of {who}, must be noted so, got {lens[write]}"
            kept = 0 if length % every else length
            if told[request] != kept:
                yield f"the host must be told {kept} of {who}, got {told[request]}"
            if not kept:
                continue
            asked.add(checkpoint)
            wanted[checkpoint] = length
            if lens[checkpoint] != length:
                yield f"checkpoint slot {checkpoint} of {who}, must be noted so, got " + str(
                    lens[checkpoint]
                )
            if not all(
                torch.equal(bits_of(part[:, checkpoint]), bits_of(part[:, write]))
                for part in self._parts
            ):
                yield f"checkpoint slot {checkpoint} of {who}, must be a copy of slot {write}"
        for request in batch.frozen:
            if told[request]:
                yield (
                    f"the host must be told 0 of request {request}, which is finished, got "
                    + str(told[request])
                )
        for slot, (noted, length) in enumerate(zip(lens, wanted, strict=True)):
            if slot not in asked and noted != length:
                yield (
                    f"slot {slot}, {self._owner(index, slot)}, must be noted as before, as "
                    f"{length} tokens, got {noted}"
                )
        for name, part in self._pool.parts.items():
            was = before[f"kv.{self._pool.spec.name}.{name}"]
            changed = (bits_of(part) != bits_of(was)).flatten(2).any(2).any(0)
            for slot in sorted({*changed.nonzero().flatten().tolist()} - asked):
                yield f"{name}: slot {slot}, {self._owner(index, slot)}, must be as it was"

    def _owner(self, index: int, slot: int) -> str:
        batch, every = self._case.batches[index], self._case.state_every
        for request, slots in enumerate(self._prepared.places[index].pages[0]):
            if slot not in slots:
                continue
            if request in batch.frozen:
                return f"of request {request}, which is finished"
            if slot == slots[2]:
                return (
                    f"where request {request} keeps states of multiples of {every} tokens and now "
                    f"has {batch.committed[request]}"
                )
            return f"which request {request} reads alone"
        return "of nobody in the step"

    def _add_to_digest(self, index: int) -> None:
        live = ~torch.tensor(self._case.batches[index].is_dropped)
        tensors = [outs[: self._tokens].cpu()[live] for outs in self._probe.outs]
        tensors += [part[:, write] for _, _, write, _ in self._live(index) for part in self._parts]
        for tensor in tensors:
            self._digest.update(bits_of(tensor.contiguous()).cpu().numpy().tobytes())
