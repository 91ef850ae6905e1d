"""The faults written by hand: each still applies, every room has some, and a child notices one."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from fault_list import ROOMS, Fault, Outcome, read_faults, report
from mutant_child import ROOT, SURVIVED, Verdict

HERE = Path(__file__).parent
PACKAGE = ROOT / "src" / "paceline"
FAULTS = read_faults(HERE / "faults.toml")
KILLED = Verdict("engine/test_x.py::test_y", "AssertionError")


def fault(name: str, **changes: object) -> Fault:
    fields = {"room": "cache", "module": "paceline.cache.pages", "symbol": "PagePool"}
    fields |= {"find": "a", "replace": "b"}
    return Fault(**{"id": name, "tests": ("cache/test_pages.py",), **fields, **changes})


@pytest.mark.parametrize("each", FAULTS, ids=lambda each: each.id.replace(" ", "-"))
def test_a_fault_applies_to_the_source_as_it_is_and_names_tests_there_are(each: Fault) -> None:
    compile(each.applied(PACKAGE), each.module, "exec")
    for test in each.tests:
        file, _, function = test.partition("::")
        source = (ROOT / "tests" / file).read_text(encoding="utf-8")
        assert f"def {function}" in source, test


def test_every_room_has_faults_and_there_are_enough() -> None:
    rooms = Counter(each.room for each in FAULTS)
    assert rooms.keys() == set(ROOMS)
    assert min(rooms.values()) >= 10
    assert sum(each.equivalent is None for each in FAULTS) >= 66


def test_text_that_is_gone_is_named_with_its_fault() -> None:
    gone = fault("lost page", find="no_such + name")
    text = r"fault 'lost page' edits must be once in paceline\.cache\.pages, got found 0 times"
    with pytest.raises(ValueError, match=text):
        gone.applied(PACKAGE)


@pytest.mark.parametrize(
    ("entry", "text"),
    [
        ({"id": "first"}, "the id 'first' is given 2 times"),
        ({"room": "attic"}, "'second' is of room attic, not of"),
        ({"tests": []}, "'second' names no tests"),
        ({"equivalent": " "}, "'second' is equivalent for no reason"),
    ],
)
def test_an_entry_that_says_too_little_is_refused(tmp_path: Path, entry, text: str) -> None:
    first = {"id": "first", "room": "cache", "module": "m", "symbol": "s", "tests": ["t"]}
    first |= {"find": "a", "replace": ""}
    path = tmp_path / "faults.toml"
    lines = []
    for each in (first, {**first, "id": "second", **entry}):
        lines += ["[[fault]]", *(f"{name} = {json.dumps(value)}" for name, value in each.items())]
    path.write_text("\n".join(lines))
    with pytest.raises(ValueError, match=text):
        read_faults(path)


def test_an_outcome_is_clean_when_what_is_silent_is_explained_and_nothing_else(capsys) -> None:
    faults = [fault("killed"), fault("equal", equivalent="nobody looks")]
    verdicts = {"killed": KILLED, "equal": SURVIVED}
    document = report(Outcome(verdicts, faults), seconds=1.0)
    assert Outcome(verdicts, faults).is_clean
    assert document["rooms"] == {"cache": {"killed": 1, "equivalent": 1, "survived": 0}}
    assert document["killed_by"] == {"killed": KILLED.killer}
    alive = Outcome({"killed": SURVIVED, "equal": KILLED}, faults)
    document = report(alive, seconds=1.0)
    assert not alive.is_clean
    assert document["survivors"] == ["killed"]
    printed = capsys.readouterr().out
    assert "survived: killed (paceline.cache.pages); looked: cache/test_pages.py" in printed
    assert f"called equivalent, noticed by {KILLED.killer}: equal" in printed


CHILD = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
from mutant_child import Killers, collect, start

def verdict(source):
    sources = {"paceline.cache.pages": source} if source else {}
    child, pipe = start(sources, Killers((), ("cache/test_pages.py",)), limit_s=30)
    return collect(pipe, os.waitpid(child, 0)[1]).killer

print(json.dumps([verdict(None), verdict(sys.stdin.read())]))
"""


def test_a_planted_fault_is_noticed_by_the_tests_it_names_and_by_nothing_without_it() -> None:
    (planted,) = [each for each in FAULTS if each.id == "pages of a retired epoch wait"]
    assert planted.tests == ("cache/test_pages.py",)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(HERE)],
        input=planted.applied(PACKAGE),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    clean, killer = json.loads(done.stdout)
    assert clean is None
    assert killer.startswith("cache/test_pages.py::")
