"""The sanitizer: runs a step twice, the second time over poison, and demands the same output.

Whatever a step may not read is dead: buffers behind its padded size, what derive and plan must
write anew, rows of other requests, slots outside its lengths and windows.  A step that reads dead
bytes is right while they happen to hold the right numbers.  Under the sanitizer it raises, and the
report names the buffer, the field, the backend and the lines that read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.core.errors import SanitizerError, message
from paceline.core.padding import PAD_ROW
from paceline.runner.extents import PaddedSize
from paceline.runner.program import Parts
from paceline.runner.sanitizer.journal import OperatorCall, listen, readers, writers
from paceline.runner.sanitizer.poison import Region
from paceline.runner.sanitizer.poisoned_run import (
    OVERWRITES,
    CheckedStep,
    PoisonedRuns,
    copies,
    restored,
)

_WRITE_REMEDY = "write nothing but the step's own slots, rows and buffers"
_CLOSE = 1e-2  # relative: what other padded rows may change where kernels share work among rows


class Sanitizer:
    """Checks steps within their stream, where nothing else runs; keeps nothing between them."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def run(self, checked: CheckedStep) -> None:
        """Run a step; then again, over poison.  Leaves everything as the first run left it.

        Raises SanitizerError when the step reads or writes what is dead.
        """
        with torch.no_grad():
            named = restored(self._parts)
            before, were = copies(named), _places(named)
            checked.run()
            self._require_in_place(were)
            if checked.step.is_round:
                self._require_roots(checked.size)
            runs = PoisonedRuns(self._parts, checked, named, before)
            try:
                if not _is_clean(runs):
                    raise SanitizerError(self._report(runs, checked))
            finally:
                runs.finish()

    def _require_roots(self, size: PaddedSize) -> None:
        """The first row of a request is its newest token, whatever a proposer says: what follows
        is sampled behind it.  Raises SanitizerError."""
        buffers, history = self._parts.buffers, self._parts.table.token_ids
        rows, places = buffers.row_ids[: size.reqs], buffers.prefix_lens[: size.reqs].long()
        known = history[rows, places].tolist()
        drafts = buffers.input_ids[: size.tokens].view(size.reqs, -1)
        for row, root, got in zip(rows.tolist(), known, drafts[:, 0].tolist(), strict=True):
            if row != PAD_ROW and root != got:
                raise SanitizerError.about(
                    f"root of row {row} in the drafts by {self._parts.proposer.name}",
                    expected=f"{root}, the newest token",
                    got=got,
                    remedy="leave column 0 of the tokens as state.view has it",
                )

    def _require_in_place(self, were: Mapping[str, int]) -> None:
        """A step writes in place: of a buffer that it replaces, a graph knows the old address."""
        now = _places(restored(self._parts))
        if now != were:
            names = were.keys() | now.keys()
            moved = sorted(name for name in names if were.get(name) != now.get(name))
            raise SanitizerError.about(
                f"buffers of a step with attention backend '{self._parts.backend.name}'",
                expected="where they were allocated",
                got=f"moved: {', '.join(moved)}",
                remedy="allocate all of them in make_buffers, and write into them in place",
            )

    def _report(self, runs: PoisonedRuns, checked: CheckedStep) -> str:
        step, size = checked.step, checked.size
        name = (
            f"{step.kind} of {step.layout.num_reqs} requests, padded to {size.reqs}, "
            f"with attention backend '{self._parts.backend.name}', "
            f"drafts by {self._parts.proposer.name}"
        )
        repeated = runs.findings(())
        if repeated:
            return message(
                name,
                expected="the same when it runs again",
                got=f"a run that {', '.join(repeated)}",
                remedy="let no kernel read what an earlier run left, write keys of the prefix, or "
                "sum in an order of chance",
            )
        culprits = _culprits(runs)
        runs.rewind()
        entries = listen(checked.explain, type(self._parts.backend))
        remedies = [
            _WRITE_REMEDY if culprit.is_written else region.remedy
            for culprit in culprits
            for region in culprit.regions
        ]
        return message(
            name,
            expected="independent of dead bytes",
            got="".join(f"\n  - {culprit.explained(entries)}" for culprit in culprits),
            remedy=", and ".join(dict.fromkeys(remedies)),
        )


def _places(named: Mapping[str, Tensor]) -> dict[str, int]:
    """Where each tensor is."""
    return {name: held.data_ptr() for name, held in named.items()}


@dataclass(frozen=True, slots=True)
class _Culprit:
    """Regions whose poison, all of them together, has an effect."""

    regions: tuple[Region, ...]  # one, nearly always
    findings: list[str]

    @property
    def is_written(self) -> bool:
        return any(finding.startswith(OVERWRITES) for finding in self.findings)

    def explained(self, entries: list[OperatorCall]) -> str:
        """What the poison did, and which lines touch it."""
        tensors = [piece.tensor for region in self.regions for piece in region.pieces]
        lines = (writers if self.is_written else readers)(entries, tensors)
        verb, where = "written" if self.is_written else "read", ", ".join(lines)
        names = " with ".join(region.name for region in self.regions)
        effect = f"with poison there the step {', '.join(self.findings)}"
        return f"{names}: {effect}; {verb} by {where or 'no operator that was seen'}"


def _culprits(runs: PoisonedRuns) -> list[_Culprit]:
    """The smallest sets of regions whose poison has an effect."""
    sharp = tuple(region for region in runs.regions if not region.is_padding)
    padding = tuple(region for region in runs.regions if region.is_padding)
    found = _halved(runs, sharp, 0.0) + _halved(runs, padding, _CLOSE)
    return found or [_Culprit(tuple(runs.regions), runs.findings(runs.regions))]


def _halved(runs: PoisonedRuns, regions: tuple[Region, ...], tolerance: float) -> list[_Culprit]:
    """By halves; regions that have an effect together and not apart stay together."""
    findings = runs.findings(regions, tolerance=tolerance) if regions else []
    if not findings:
        return []
    half = len(regions) // 2
    parts = [regions[:half], regions[half:]] if half else []
    found = [culprit for part in parts for culprit in _halved(runs, part, tolerance)]
    return found or [_Culprit(regions, findings)]


def _is_clean(runs: PoisonedRuns) -> bool:
    """Whether poison is without effect.

    Where kernels share work among rows, what padded rows hold may shift the last bits of others.
    """
    if not runs.findings(runs.regions):
        return True
    others = [region for region in runs.regions if not region.is_padding]
    if runs.findings(others):
        return False
    return not runs.findings(runs.regions, tolerance=_CLOSE)
