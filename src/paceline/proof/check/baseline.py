"""An earlier run to compare with, digest by digest.  Imports torch nowhere."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from paceline.core.errors import ConfigError
from paceline.proof.check.cell import CellResult, Status

MACHINE = ("device", "versions")  # parts of a document on which every digest depends


@dataclass(frozen=True, slots=True)
class Changes:
    """What became of the cells of an earlier run."""

    equal: int
    differing: tuple[str, ...]  # ids, sorted
    gone: tuple[str, ...]  # ids of cells that had a digest and have none now, sorted
    unasked: int  # cells of the earlier run with a digest that this one did not select

    @property
    def is_equal(self) -> bool:
        """Whether digests were compared, and every one that was asked for is here again."""
        return self.equal > 0 and not self.differing and not self.gone


@dataclass(frozen=True, slots=True)
class Baseline:
    """The digests of a document of `check --json`."""

    path: Path
    digests: Mapping[str, str]  # by cell id
    machine: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ConfigError for a file that is no such document or holds no digest."""
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            cells = [
                CellResult(**cell | {"status": Status(cell["status"])})
                for cell in document["cells"]
            ]
            machine = {name: document[name] for name in MACHINE}
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _unusable(path, f"{type(error).__name__}: {error}") from error
        digests = {cell.id: cell.digest for cell in cells if cell.digest is not None}
        if not digests:
            raise _unusable(path, f"{len(cells)} cells without a digest")
        return cls(path, digests, machine)

    def compare(self, results: Iterable[CellResult]) -> Changes:
        """The digests of `results` with the earlier ones; where it had none nothing is said."""
        known = [result for result in results if result.id in self.digests]
        gone = sorted(result.id for result in known if result.digest is None)
        differing = sorted(
            result.id
            for result in known
            if result.digest is not None and result.digest != self.digests[result.id]
        )
        equal = len(known) - len(gone) - len(differing)
        unasked = len(self.digests) - len(known)
        return Changes(equal, tuple(differing), tuple(gone), unasked)

    def said(self, found: Changes, document: Mapping[str, Any]) -> str:
        """`found` for people; what is different about the machine of `document` before it."""
        lines = [
            f"{name} of {self.path}: {self.machine[name]}, here: {document[name]}"
            for name in MACHINE
            if self.machine[name] != document[name]
        ]
        lines += [f"DIFFERS {cell_id}" for cell_id in found.differing]
        lines += [f"HAS NO DIGEST {cell_id}" for cell_id in found.gone]
        lines.append(
            f"against {self.path}: {found.equal} digests equal, {len(found.differing)} differ, "
            f"{len(found.gone)} gone, {found.unasked} not asked for"
        )
        return "\n".join(lines)


def read_cells(path: Path) -> frozenset[str]:
    """The ids in a file of `--cells`; empty lines and those that begin with # say nothing.

    Raises ConfigError for a file that cannot be read or names nothing.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise _no_list(f"{type(error).__name__}: {error}") from error
    names = frozenset(
        line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")
    )
    if not names:
        raise _no_list(f"{str(path)!r}, which names none")
    return names


def _no_list(got: str) -> ConfigError:
    return ConfigError.about(
        "--cells",
        expected="a file with names of cells, one a line",
        got=got,
        remedy="`paceline check --full --json FILE` has all names",
    )


def _unusable(path: Path, got: str) -> ConfigError:
    return ConfigError.about(
        "--against",
        expected="a document of `paceline check --json` with digests",
        got=f"{str(path)!r} ({got})",
        remedy="run the older version with --json FILE first",
    )
