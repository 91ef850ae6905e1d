"""The list of fix switches: what each was, and the cell or test that catches it."""

from collections.abc import Sequence
from pathlib import Path

from paceline.core.reverts.fixes import Fix, fix_ids, read_fix

FOLDER = Path(__file__).parent


def all_fixes() -> tuple[Fix, ...]:
    """Every fix switch, by id.  Raises ConfigError for a file that cannot be read."""
    return tuple(read_fix(FOLDER, fix_id) for fix_id in fix_ids(FOLDER))


def to_json(fix: Fix) -> dict[str, object]:
    """One entry of `paceline debug fixes --json`."""
    return {
        "id": fix.id,
        "source": fix.source,
        "symptom": fix.symptom,
        "targets": list(fix.modules),
        "case": fix.case,
    }


def show(fixes: Sequence[Fix]) -> str:
    """The list for people, one paragraph each."""
    return "\n\n".join(
        f"{fix.id}\n"
        f"  source   {fix.source}\n"
        f"  symptom  {fix.symptom}\n"
        f"  patches  {', '.join(fix.modules)}\n"
        f"  case     {fix.case}"
        for fix in fixes
    )
