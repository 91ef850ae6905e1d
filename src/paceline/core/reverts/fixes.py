"""Fix switches as data: past bugs, each with the edits of source text that bring it back.

One TOML file per bug, named after its id.  Reading is strict: a key that is not below is refused.

    source   where the bug is known from
    symptom  what it looked like
    case     the cell of the conformance matrix, or the test, that fails while the bug is back
    expect   words of that failure's reason
    edits    [{module, symbol, find, replace}]: `find` occurs once in the symbol, see anchors.py
"""

import tomllib
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path

from paceline.core.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """One replacement of syntax; see `anchors.replaced`."""

    module: str  # dotted
    symbol: str  # qualified name within it
    find: str  # an expression or statements
    replace: str  # likewise; empty: nothing in the place of statements


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One bug that can be brought back."""

    id: str
    source: str
    symptom: str
    case: str  # method/backend/mode/runner/variant, or tests/FILE.py::TEST
    expect: str  # words of that failure's reason
    edits: tuple[Edit, ...]  # at least one, applied in order

    @property
    def modules(self) -> tuple[str, ...]:
        """What is patched, each module once."""
        return tuple(dict.fromkeys(edit.module for edit in self.edits))


def fix_ids(folder: Path) -> list[str]:
    """The ids of every fix in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob("*.toml"))


def read_fix(folder: Path, fix_id: str) -> Fix:
    """The fix of an id.  Raises ConfigError for an unknown id and for a file that says too much or
    too little.
    """
    known = fix_ids(folder)
    if fix_id not in known:
        near = get_close_matches(fix_id, known, n=3)
        hint = f"did you mean {', '.join(near)}?" if near else "`paceline debug fixes` lists them"
        raise ConfigError.about(
            "fix", expected=f"one of {', '.join(known)}", got=repr(fix_id), remedy=hint
        )
    name = f"fix '{fix_id}'"
    try:
        table = tomllib.loads((folder / f"{fix_id}.toml").read_text(encoding="utf-8"))
    except ValueError as error:  # no TOML, or no UTF-8
        raise ConfigError.about(
            name, expected="a TOML file", got=str(error), remedy="correct the file"
        ) from error
    edits = table.pop("edits", None)
    if not isinstance(edits, list) or not edits:
        raise _refused(f"edits of {name}", "a list of at least one table", edits)
    known_fields = {item.name for item in fields(Fix)} - {"id", "edits"}
    texts = _texts(name, table, known_fields)
    return Fix(id=fix_id, edits=tuple(_edit(name, edit) for edit in edits), **texts)


def _edit(name: str, table: object) -> Edit:
    keys = {item.name for item in fields(Edit)}
    if not isinstance(table, dict):
        raise _refused(f"an edit of {name}", "a table", table)
    texts = _texts(f"an edit of {name}", table, keys)
    if not texts["find"].strip() or texts["find"] == texts["replace"]:
        raise _refused(f"an edit of {name}", "text to find, and another to replace it", texts)
    return Edit(**texts)


def _texts(name: str, table: dict[str, object], keys: set[str]) -> dict[str, str]:
    """The strings of a table that has these keys and no other."""
    if table.keys() != keys:
        raise _refused(f"keys of {name}", sorted(keys), sorted(table))
    texts = {key: value for key, value in table.items() if isinstance(value, str)}
    if len(texts) < len(table):
        raise _refused(f"values of {name}", "strings", table)
    return texts


def _refused(name: str, expected: object, got: object) -> ConfigError:
    return ConfigError.about(name, expected=expected, got=got, remedy="correct the fix's file")
