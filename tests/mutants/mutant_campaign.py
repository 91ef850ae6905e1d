"""The campaign: every mutant of every target meets its killers.

    python tests/mutants/mutant_campaign.py [--target FILE] [--id ID] [--list] [--json FILE]

Prints a table and, last, one line of JSON.  Exit code 1: a mutant survived that nobody explains,
or an explanation that fits no survivor.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from mutant_child import ROOT, SURVIVED, Killers
from mutant_operators import Edit
from mutant_report import Result, explained, read_equivalents, report
from mutant_run import run, warm_up
from mutant_source import Mutant, mutants_of, read_seeded, required_keywords
from mutant_targets import TARGETS, Target

PACKAGE = ROOT / "src" / "paceline"
HERE = Path(__file__).parent
AS_IT_IS = Mutant("source", 0, "none", 0, "", "", "", Edit("none", 0, 0, b""))
CHUNKS = 4  # of the cells that are tried without a mutant


@dataclass(frozen=True, slots=True)
class Job:
    """A mutant and what is to notice it."""

    mutant: Mutant
    sources: dict[str, str]  # by module
    killers: Killers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _options(argv)
    torch.set_num_threads(1)
    sys.path.insert(0, str(PACKAGE.parent))  # the tree whose text is mutated
    targets = [target for target in TARGETS if target.file in (options.target or [target.file])]
    required = required_keywords(PACKAGE)
    jobs = [job for target in targets for job in jobs_of(target, required)]
    jobs = [job for job in jobs if options.id in (None, job.mutant.id)]
    if options.list:
        for job in jobs:
            print(f"{job.mutant.id}\n    {job.mutant.before}\n    {job.mutant.after}")
        return 0
    if not jobs:
        print("no such target or id; --list names them", file=sys.stderr)
        return 2
    warm_up()
    broken = [] if options.id else _broken_killers(targets)
    if broken:
        print("killers fail without a mutant:", *broken, sep="\n  ", file=sys.stderr)
        return 2
    began = time.monotonic()
    results = []
    for job, verdict in run(jobs):
        print(f"{job.mutant.id}: {verdict.killer or 'survived'}", file=sys.stderr)
        results.append(Result(job.mutant, verdict))
    gc.unfreeze()  # libraries report what is left at the end
    is_whole = options.id is None
    entries = [e for e in read_equivalents(HERE / "equivalents.toml") if e.file in _files(targets)]
    outcome = explained(results, entries, is_whole=is_whole)
    document = report(outcome, seconds=time.monotonic() - began)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if outcome.is_clean else 1


def jobs_of(target: Target, required: frozenset[str]) -> list[Job]:
    """The target's mutants, in the order of its text."""
    source = (PACKAGE / target.file).read_text(encoding="utf-8")
    mutants = mutants_of(
        target.file,
        source,
        functions=target.functions,
        required=required,
        seeded=[seed for seed in read_seeded(HERE / "seeded.toml") if seed.file == target.file],
    )
    return [
        Job(mutant, {mutant.module: mutant.applied(source)}, target.killers) for mutant in mutants
    ]


def _broken_killers(targets: Sequence[Target]) -> list[str]:
    """Killers that fail on the source as it is: they would kill anything."""
    cells = dict.fromkeys(cell for target in targets for cell in target.killers.cells)
    tests = dict.fromkeys(test for target in targets for test in target.killers.tests)
    chunks = [tuple(cells)[first::CHUNKS] for first in range(CHUNKS)]
    jobs = [Job(AS_IT_IS, {}, Killers(chunk, ())) for chunk in chunks]
    jobs += [Job(AS_IT_IS, {}, Killers((), (test,))) for test in tests]
    verdicts = [verdict for _, verdict in run(jobs)]
    return [f"{verdict.killer}: {verdict.reason}" for verdict in verdicts if verdict != SURVIVED]


def _files(targets: Sequence[Target]) -> set[str]:
    return {target.file for target in targets}


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Mutate every metadata derivation.")
    parser.add_argument(
        "--target", action="append", metavar="FILE", help="of src/paceline; may be repeated"
    )
    parser.add_argument("--id", help="one mutant, as --list names it")
    parser.add_argument("--list", action="store_true", help="name the mutants and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json needs an existing folder, got {options.json.parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
