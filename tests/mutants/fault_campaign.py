"""The second campaign: faults written by hand, each against the tests that it names.

    python tests/mutants/fault_campaign.py [--room ROOM] [--id ID] [--list] [--json FILE]

Prints a table and, last, one line of JSON.  Exit code 1: a fault survived that should not, or one
that is called equivalent was noticed.
"""

import argparse
import gc
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from fault_list import ROOMS, Fault, Outcome, read_faults, report
from mutant_child import ROOT, SURVIVED, Killers
from mutant_run import run, warm_up

PACKAGE = ROOT / "src" / "paceline"
FAULTS = Path(__file__).parent / "faults.toml"


@dataclass(frozen=True, slots=True)
class Job:
    """A fault, or none, and what is to notice it."""

    name: str
    sources: Mapping[str, str]  # by module
    killers: Killers


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    options = _options(argv)
    torch.set_num_threads(1)
    sys.path.insert(0, str(PACKAGE.parent))  # the tree whose text is edited
    faults = [fault for fault in read_faults(FAULTS) if _is_wanted(fault, options)]
    if options.list:
        for fault in faults:
            print(f"{fault.room:<12} {fault.module:<36} {fault.id}")
        return 0
    if not faults:
        print("no such room or id; --list names them", file=sys.stderr)
        return 2
    warm_up()
    began = time.monotonic()
    tests = dict.fromkeys(test for fault in faults for test in fault.tests)
    clean = [Job(test, {}, Killers((), (test,))) for test in tests]
    broken = [job.name for job, verdict in run(clean) if verdict != SURVIVED]
    if broken:
        print("tests fail without a fault:", *broken, sep="\n  ", file=sys.stderr)
        return 2
    jobs = [
        Job(fault.id, {fault.module: fault.applied(PACKAGE)}, Killers((), fault.tests))
        for fault in faults
    ]
    verdicts = {}
    for job, verdict in run(jobs):
        print(f"{job.name}: {verdict.killer or 'survived'}", file=sys.stderr)
        verdicts[job.name] = verdict
    gc.unfreeze()  # libraries report what is left at the end
    outcome = Outcome(verdicts, faults)
    document = report(outcome, seconds=time.monotonic() - began)
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    print(json.dumps(document))
    return 0 if outcome.is_clean else 1


def _is_wanted(fault: Fault, options: argparse.Namespace) -> bool:
    return fault.room in (options.room or [fault.room]) and fault.id in (options.id or [fault.id])


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Plant faults; named tests must notice.")
    parser.add_argument("--room", action="append", choices=ROOMS, help="may be repeated")
    parser.add_argument("--id", action="append", help="one fault, as --list names it; repeatable")
    parser.add_argument("--list", action="store_true", help="name the faults and run none")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary there")
    options = parser.parse_args(argv)
    if options.json and not options.json.parent.is_dir():
        parser.error(f"--json needs an existing folder, got {options.json.parent}")
    return options


if __name__ == "__main__":
    sys.exit(main())
