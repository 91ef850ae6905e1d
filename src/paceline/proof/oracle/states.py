"""What layers that keep states come to: a walk along chains and branches, and what a classic
mistake would make of it.

A reading says on which row each row of a step follows, from which state the first ones start, and
behind which rows the state stands that is left in the request's slot.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from zlib import crc32

import torch
from torch import Tensor

from paceline.core.model.config import RowPart
from paceline.proof.oracle.methods.gated_delta import GatedDelta
from paceline.proof.oracle.methods.mamba2 import Mamba2
from paceline.proof.oracle.methods.recurrence import Recurrence, State
from paceline.proof.oracle.methods.running_sum import RunningSum
from paceline.proof.oracle.tolerance import LEAST, MARGIN, MULTIPLE, ROUNDING, Judgement
from paceline.proof.suite.case import Batch, Case

RECURRENCES: dict[str, Recurrence] = {
    each.kind: each for each in (RunningSum(), GatedDelta(), Mamba2())
}
_BAIT = 64.0  # times what tokens bring: of padded and frozen rows
_POISON = "a slot that is not the request's own read: these hold NaN"
_NEAR = 0.1  # of the distance to the right answer: as near is alike


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateData:
    """The numbers of a batch; nothing mutates it."""

    rows: tuple[Tensor, ...]  # [num_reqs] [layers, extend, width]  float64, exact in the dtype
    carried: tuple[tuple[State, ...], ...]  # [num_reqs][layers]  float64, exact in a part's dtype;
    # zeros where nothing is before the step
    bait: Tensor  # [width]  float64  what padded and frozen rows bring


@dataclass(frozen=True, slots=True, kw_only=True)
class StateReading:
    """How a batch's rows follow on one another; every other than the first is a mistake."""

    name: str
    parents: tuple[tuple[int, ...], ...]  # [num_reqs][extend]; -1: the state before the step
    kept: tuple[tuple[int, ...], ...]  # [num_reqs] rows, in order, behind which the slot's state is
    starts: tuple[int | None, ...]  # [num_reqs] whose state before the step; None: zeros


@dataclass(frozen=True, slots=True, eq=False)
class _Answers:
    """Of one layer and reading, request after request."""

    outs: tuple[Tensor, ...]  # [num_reqs] [extend, numbers]
    states: tuple[Tensor, ...]  # [num_reqs] [numbers]  all parts, one behind the other


class _Walks:
    """The steps of one layer over one batch, each computed once: readings have most in common."""

    def __init__(
        self, case: Case, data: StateData, layer: int, dtype: torch.dtype = torch.float64
    ) -> None:
        self._method = RECURRENCES[case.method]
        self._rows = [rows[layer].to(dtype) for rows in data.rows]  # [num_reqs] [extend, width]
        self._carried = [
            {name: each.to(dtype) for name, each in states[layer].items()}
            for states in data.carried
        ]
        self._found: dict[tuple[int, int | None, tuple[int, ...]], tuple[State, Tensor]] = {}

    def answers(self, reading: StateReading) -> _Answers:
        outs, states = [], []
        for request, parents in enumerate(reading.parents):
            owner = reading.starts[request]
            paths: list[tuple[int, ...]] = []
            for row, parent in enumerate(parents):
                paths.append((*(paths[parent] if parent >= 0 else ()), row))
            found = [self._step(request, owner, path)[1].flatten() for path in paths]
            outs.append(torch.stack(found))
            states.append(flat(self._behind(request, owner, reading.kept[request])))
        return _Answers(tuple(outs), tuple(states))

    def _behind(self, request: int, owner: int | None, path: tuple[int, ...]) -> State:
        """The state behind the rows of `path`, from the state before the step of `owner`."""
        if path:
            return self._step(request, owner, path)[0]
        if owner is None:
            return {name: torch.zeros_like(each) for name, each in self._carried[request].items()}
        return self._carried[owner]

    def _step(self, request: int, owner: int | None, path: tuple[int, ...]) -> tuple[State, Tensor]:
        """That state, and what the last row of `path` hands on."""
        key = (request, owner, path)
        if key not in self._found:
            before = self._behind(request, owner, path[:-1])
            self._found[key] = self._method.step(before, self._rows[request][path[-1]])
        return self._found[key]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StateExpectation:
    """The right answers of one batch, whatever backend and runner."""

    case: Case
    index: int  # of the batch
    data: StateData
    walks: tuple[_Walks, ...]  # [layers]  what every reading's answers come from
    exact: tuple[_Answers, ...]  # [layers]  float64
    allowed: tuple[float, ...]  # [layers]  relative to a request's size
    sizes: tuple[tuple[float, ...], ...]  # [layers][num_reqs]  root mean square of its answers

    def judge_out(self, layer: int, out: Tensor) -> tuple[Judgement, list[str]]:
        """Compares out [num_tokens, *out_shape], tokens without padding; and what it looks like."""
        batch = self.case.batches[self.index]
        got = torch.split(out.double().cpu().flatten(1), list(batch.extend_lens))
        return self._worst(layer, "output", got, lambda answers: answers.outs)

    def judge_states(self, layer: int, got: Sequence[Tensor]) -> tuple[Judgement, list[str]]:
        """Likewise [num_reqs] [numbers], what the slots of the requests hold."""
        found = [each.double().cpu() for each in got]
        return self._worst(layer, "state", found, lambda answers: answers.states)

    def blind(self, layer: int) -> list[str]:
        """Names of the mistakes that the comparison could accept."""
        found = []
        for reading in self._others():
            wrong = self.walks[layer].answers(reading)
            off = 0.0
            for request in self._live():
                size = self.sizes[layer][request]
                exact = self.exact[layer]
                pairs = ((wrong.outs, exact.outs), (wrong.states, exact.states))
                off = max(off, *(_rms(a[request] - b[request]) / size for a, b in pairs))
            if off <= MARGIN * self.allowed[layer]:
                found.append(reading.name)
        return found

    def _worst(
        self,
        layer: int,
        what: str,
        got: Sequence[Tensor],
        of: Callable[[_Answers], Sequence[Tensor]],
    ) -> tuple[Judgement, list[str]]:
        exact, worst = of(self.exact[layer]), Judgement(0.0, self.allowed[layer], "")
        for request in self._live():
            off = got[request] - exact[request]
            size = self.sizes[layer][request]
            per_row = off.view(-1, off.shape[-1]).square().mean(1).sqrt() / size
            per_row = per_row.nan_to_num(nan=math.inf, posinf=math.inf)
            row = int(per_row.argmax())
            if float(per_row[row]) > worst.error:
                at = f", row {row}" if what == "output" else ""
                where = f"batch {self.index}, request {request}{at}"
                worst = Judgement(float(per_row[row]), self.allowed[layer], where)
        likely = [] if worst.is_right else self._likely(layer, got, exact, of)
        return worst, likely

    def _likely(
        self,
        layer: int,
        got: Sequence[Tensor],
        exact: Sequence[Tensor],
        of: Callable[[_Answers], Sequence[Tensor]],
    ) -> list[str]:
        """The mistakes that give nearly `got`."""
        live = self._live()
        if not all(bool(got[request].isfinite().all()) for request in live):
            return [_POISON]
        off = sum(_rms(got[request] - exact[request]) for request in live)
        near = []
        for reading in self._others():
            wrong = of(self.walks[layer].answers(reading))
            apart = sum(_rms(got[request] - wrong[request]) for request in live)
            if apart <= _NEAR * off:
                near.append(reading.name)
        return near

    def _live(self) -> list[int]:
        batch = self.case.batches[self.index]
        return [request for request in range(batch.num_reqs) if request not in batch.frozen]

    def _others(self) -> list[StateReading]:
        return readings(self.case.batches[self.index])[1:]


def make_states(case: Case, index: int) -> StateData:
    """The numbers of batch `index`; the same at every call, others for every batch and layer."""
    method, batch = RECURRENCES[case.method], case.batches[index]
    name = f"{case.method} {case.mode.value} {case.name} {case.seed} {index}"
    generator = torch.Generator().manual_seed(crc32(name.encode()))
    layers, dtype = range(len(case.layers)), getattr(torch, case.dtype)

    def held(part: RowPart, prefix: int) -> Tensor:
        kind = getattr(torch, part.dtype or case.dtype)
        made = method.carried(part, generator).to(kind).double()
        return made if prefix else torch.zeros_like(made)

    return StateData(
        rows=tuple(
            torch.stack([method.rows(extend, generator).to(dtype).double() for _ in layers])
            for extend in batch.extend_lens
        ),
        carried=tuple(
            tuple({part.name: held(part, prefix) for part in method.parts} for _ in layers)
            for prefix in batch.prefix_lens
        ),
        bait=(_BAIT * method.rows(1, generator)[0]).to(dtype).double(),
    )


def expect_states(case: Case, index: int, data: StateData) -> StateExpectation:
    """The oracle's answers for batch `index`, and what a backend may differ by."""
    truth = readings(case.batches[index])[0]
    walks = tuple(_Walks(case, data, layer) for layer in range(len(case.layers)))
    exact, allowed, sizes = [], [], []
    for layer, steps in enumerate(walks):
        right = steps.answers(truth)
        rough = _Walks(case, data, layer, torch.float32).answers(truth)
        size = [
            _rms(torch.cat((out.flatten(), state)))
            for out, state in zip(right.outs, right.states, strict=True)
        ]
        error = max(
            _rms(a.double() - b) / size[request]
            for request in range(len(size))
            for a, b in (
                (rough.outs[request], right.outs[request]),
                (rough.states[request], right.states[request]),
            )
        )
        exact.append(right)
        allowed.append(MULTIPLE * max(error, LEAST["float32"]) + ROUNDING[case.dtype])
        sizes.append(tuple(size))
    return StateExpectation(
        case=case,
        index=index,
        data=data,
        walks=walks,
        exact=tuple(exact),
        allowed=tuple(allowed),
        sizes=tuple(sizes),
    )


def readings(batch: Batch) -> list[StateReading]:
    """The right one, then every mistake that is one in such a batch."""
    requests = range(batch.num_reqs)
    chain = tuple(tuple(range(-1, extend - 1)) for extend in batch.extend_lens)
    whole = tuple(tuple(range(extend)) for extend in batch.extend_lens)
    kept = batch.accepted or whole
    own = tuple(request if batch.prefix_lens[request] else None for request in requests)
    truth = StateReading(name="", parents=batch.parents or chain, kept=kept, starts=own)
    others = {
        "the state before the step not read": replace(truth, starts=(None,) * len(own)),
        "another request's state read": replace(truth, starts=(*own[1:], own[0])),
        "a chain, not the tree": replace(truth, parents=chain),
        "earlier rows of the step not seen": replace(
            truth, parents=tuple((-1,) * len(rows) for rows in whole)
        ),
        "state left as it was read": replace(truth, kept=((),) * len(own)),
        "state of every row, accepted or not": replace(truth, kept=whole),
        "state of as many rows, not of the path": replace(
            truth, kept=tuple(tuple(range(len(rows))) for rows in kept)
        ),
        "state one row short": replace(truth, kept=tuple(rows[:-1] for rows in kept)),
    }
    live = [request for request in requests if request not in batch.frozen]
    return [
        truth,
        *(
            replace(other, name=name)
            for name, other in others.items()
            if any(
                getattr(other, field)[request] != getattr(truth, field)[request]
                for request in live
                for field in ("parents", "kept", "starts")
            )
        ),
    ]


def flat(state: State) -> Tensor:
    """[numbers] of all parts, one behind the other."""
    return torch.cat([each.flatten() for each in state.values()])


def _rms(values: Tensor) -> float:
    return float(values.double().square().mean().sqrt())
