"""The import hook of the fix switches, on packages made for each test."""

import inspect
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from paceline.core.errors import ConfigError
from paceline.core.reverts.fixes import fix_ids, read_fix
from paceline.core.reverts.hook import revert

SOURCE = Path(__file__).parents[2] / "src"

FIX = """
source = "a test"
symptom = "wrong by one"
case = "a/b/c/d/e"
expect = "error"

[[edits]]
module = "victim.sums"
symbol = "add"
find = "a + b"
replace = "a + b + 1"
"""


@pytest.fixture
def world(tmp_path, monkeypatch):
    """A package `victim` to import, and a folder of fixes."""
    before = list(sys.meta_path)
    package, fixes = tmp_path / "victim", tmp_path / "fixes"
    package.mkdir()
    fixes.mkdir()
    (package / "__init__.py").write_text("")
    (package / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (fixes / "off-by-one.toml").write_text(FIX)
    monkeypatch.syspath_prepend(tmp_path)
    yield World(package, fixes)
    sys.meta_path[:] = before
    for name in [name for name in sys.modules if name.split(".")[0] == "victim"]:
        del sys.modules[name]


class World:
    def __init__(self, package, fixes):
        self.package, self.fixes = package, fixes

    def revert(self, *ids):
        revert(ids, fixes=self.fixes, package=self.package)

    def write_fix(self, name, old, new):
        (self.fixes / f"{name}.toml").write_text(FIX.replace(old, new))


def test_a_reverted_module_runs_the_edited_text(world):
    world.revert("off-by-one")
    from victim.sums import add

    assert add(1, 2) == 4


def test_without_a_revert_the_module_is_as_it_is(world):
    from victim.sums import add

    assert add(1, 2) == 3


def test_inspect_and_tracebacks_show_the_edited_text_of_the_real_file(world):
    world.revert("off-by-one")
    from victim import sums

    assert "a + b + 1" in inspect.getsource(sums.add)
    assert sums.__file__ == str(world.package / "sums.py")
    assert sums.add.__code__.co_filename == sums.__file__


def test_two_fixes_of_one_module_are_applied_in_order(world):
    world.write_fix(
        "doubled", 'find = "a + b"\nreplace = "a + b + 1"', 'find = "a + b + 1"\nreplace = "2 * a"'
    )
    world.revert("off-by-one", "doubled")
    from victim.sums import add

    assert add(5, 2) == 10


def test_a_fix_named_twice_is_reverted_once(world):
    world.revert("off-by-one", "off-by-one")


def test_bytecode_of_the_real_text_is_not_taken(world):
    py_compile.compile(str(world.package / "sums.py"))
    assert list(world.package.glob("__pycache__/sums*"))
    world.revert("off-by-one")
    from victim.sums import add

    assert add(1, 2) == 4


def test_an_unknown_id_is_refused_with_the_ids_and_the_nearest(world):
    with pytest.raises(ConfigError, match=r"fix must be one of off-by-one, got 'of-by-one'; did"):
        world.revert("of-by-one")
    with pytest.raises(ConfigError, match="`paceline debug fixes` lists them"):
        world.revert("zzz")


def test_a_place_that_is_gone_is_refused_with_what_resembles_it(world):
    world.write_fix("stale", "a + b", "a + c")
    expected = (
        r"what fix 'stale' edits in victim.sums must be once in add, got found 0 times in add"
        r".*near it: line 2: return a \+ b; write the edit"
    )
    with pytest.raises(ConfigError, match=expected):
        world.revert("stale")


def test_text_that_is_no_python_is_refused(world):
    world.write_fix("torn", 'find = "a + b"', 'find = "a + ("')
    with pytest.raises(ConfigError, match=r"edits in victim.sums must be once in add, got .*never"):
        world.revert("torn")


def test_a_module_that_is_imported_already_is_refused(world):
    import victim.sums

    assert victim.sums.add(1, 2) == 3
    with pytest.raises(ConfigError, match=r"not imported yet, got victim\.sums; set PACELINE_REV"):
        world.revert("off-by-one")


@pytest.mark.parametrize("module", ["victim.gone", "elsewhere.sums"])
def test_a_module_that_does_not_exist_is_refused(world, module):
    world.write_fix("lost", "victim.sums", module)
    with pytest.raises(ConfigError, match="must be a source file of victim, got " + module):
        world.revert("lost")


def test_nothing_is_patched_when_one_of_several_is_refused(world):
    with pytest.raises(ConfigError):
        world.revert("off-by-one", "zzz")
    from victim.sums import add

    assert add(1, 2) == 3


@pytest.mark.parametrize(
    ("old", "new", "text"),
    [
        ('source = "a test"', "", "keys of fix 'off-by-one' must be"),
        ('source = "a test"', 'sorce = "a test"', "keys of fix 'off-by-one' must be"),
        ('symptom = "wrong by one"', "symptom = 3", "values of fix 'off-by-one' must be strings"),
        ("[[edits]]", "[[edit]]", "edits of fix 'off-by-one' must be a list of at least one"),
        ('module = "victim.sums"', "", "keys of an edit of fix 'off-by-one' must be"),
        ('find = "a + b"', 'find = " "', "must be text to find, and another to replace it"),
        ('replace = "a + b + 1"', 'replace = "a + b"', "must be text to find, and another"),
        ('source = "a test"', "source = ", "fix 'off-by-one' must be a TOML file"),
        ("case =", 'id = "x"\ncase =', "keys of fix 'off-by-one' must be"),
    ],
)
def test_a_file_that_says_too_much_or_too_little_is_refused(world, old, new, text):
    assert old in FIX
    world.write_fix("off-by-one", old, new)
    with pytest.raises(ConfigError, match=text):
        read_fix(world.fixes, "off-by-one")


def test_an_edit_that_is_no_table_is_refused(world):
    head = FIX.partition("[[edits]]")[0]
    (world.fixes / "flat.toml").write_text(head + 'edits = ["a + b"]\n')
    with pytest.raises(ConfigError, match=r"an edit of fix 'flat' must be a table, got a \+ b"):
        read_fix(world.fixes, "flat")


def test_a_file_that_is_no_text_is_refused(world):
    (world.fixes / "blob.toml").write_bytes(b'source = "\xff"')
    with pytest.raises(ConfigError, match="fix 'blob' must be a TOML file, got 'utf-8' codec"):
        read_fix(world.fixes, "blob")


def test_ids_are_file_names(world):
    assert fix_ids(world.fixes) == ["off-by-one"]


def python(code, **variables):
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(SOURCE), "PATH": "/usr/bin:/bin", **variables},
        check=False,
    )


def test_without_the_variable_the_hook_is_not_even_imported():
    done = python("import paceline, sys; assert not [m for m in sys.modules if 'revert' in m]")
    assert done.returncode == 0, done.stderr


def test_the_variable_refuses_an_unknown_id_at_import():
    done = python("import paceline", PACELINE_REVERT_FIX="no-such-fix")
    assert done.returncode == 2
    assert done.stderr.startswith("ConfigError: PACELINE_REVERT_FIX: fix must be one of")
    assert "Traceback" not in done.stderr


def test_the_hook_imports_no_torch():
    code = """
        import sys, paceline
        assert "torch" not in sys.modules
        assert "paceline.core.reverts.hook" in sys.modules
    """
    done = python(code, PACELINE_REVERT_FIX=fix_ids(SOURCE / "paceline" / "proof" / "fixes")[0])
    assert done.returncode == 0, done.stderr
