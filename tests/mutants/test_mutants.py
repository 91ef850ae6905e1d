"""The driver of the mutants on a toy: what is mutated, what a child reports, what is explained."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from mutant_child import SURVIVED, Verdict
from mutant_report import Equivalent, Result, explained, read_equivalents, report
from mutant_source import Mutant, Seeded, mutants_of, read_seeded, required_keywords
from mutant_targets import TARGETS

PACKAGE = Path(__file__).parents[2] / "src" / "paceline"
TOY = '''\
def derive(step, out, *, width: int = 4):
    """1 + 1 is no derivation."""
    assert width < 9, f"{width + 1} is too wide"
    lens = step.prefix_lens + 1  # é
    out.copy_(
        lens,
        width=width,
        total=True,
    )
    if lens.shape[0] <= width and step.num_reqs:
        out[0] = step.groups[step.group]
    return max(lens, width)


class Other:
    def untouched(self):
        return 2
'''


def toy_mutants(**changes) -> list[Mutant]:
    arguments = {"functions": ("derive",), "required": frozenset({"width"})} | changes
    return mutants_of("toy.py", TOY, **arguments)


def test_every_operator_finds_its_place():
    found = {(m.line, m.operator, m.after) for m in toy_mutants()}
    assert found == {
        (4, "arithmetic", "lens = step.prefix_lens - 1 # é"),
        (4, "length", "lens = step.kv_lens + 1 # é"),
        (4, "length", "lens = step.extend_lens + 1 # é"),
        (4, "constant", "lens = step.prefix_lens + (2) # é"),
        (4, "constant", "lens = step.prefix_lens + (0) # é"),
        (5, "dropped-write", "pass"),
        (8, "flag", "total=False,"),
        (8, "dropped-keyword", "**{},"),
        (10, "boolean", "if lens.shape[0] <= width or step.num_reqs:"),
        (10, "comparison", "if lens.shape[0] < width and step.num_reqs:"),
        (10, "constant", "if lens.shape[1] <= width and step.num_reqs:"),
        (10, "count", "if lens.shape[0] <= width and step.num_tokens:"),
        (11, "constant", "out[(1)] = step.groups[step.group]"),
        (11, "dropped-write", "pass"),
        (11, "first-of-all", "out[0] = step.groups[0]"),
        (12, "extreme", "return min(lens, width)"),
    }


def test_ids_are_distinct_and_lines_stay_where_they_are():
    found = toy_mutants()
    assert len({mutant.id for mutant in found}) == len(found)
    for mutant in found:
        mutated = mutant.applied(TOY)
        compile(mutated, "toy.py", "exec")
        assert mutated != TOY
        assert mutated.count("\n") == TOY.count("\n"), mutant.id


def test_a_seed_is_one_more_mutant_and_must_occur_once():
    seed = Seeded("toy.py", "derive", "return max(lens, width)", "return width")
    assert [m.after for m in toy_mutants(seeded=[seed]) if m.operator == "seeded"] == [
        "return width"
    ]
    with pytest.raises(ValueError, match="'lens' occurs 5 times"):
        toy_mutants(seeded=[Seeded("toy.py", "derive", "lens", "x")])


def test_a_function_the_file_has_not_is_refused():
    with pytest.raises(ValueError, match=r"has no function gone; it has derive, Other\.untouched"):
        toy_mutants(functions=("gone",))


def test_a_class_names_its_functions():
    assert [m.function for m in toy_mutants(functions=("Other",))] == ["Other.untouched"] * 2


def result(killer: str | None, mutant: Mutant) -> Result:
    return Result(mutant, Verdict(killer, "why"))


def entry(mutant: Mutant) -> Equivalent:
    return Equivalent("toy.py", "derive", mutant.before, mutant.after, "nobody looks")


def test_results_are_killed_explained_or_survivors(capsys):
    killed, equal, alive, *_ = toy_mutants()
    results = [result("a/b/c/d/e", killed), result(None, equal), result(None, alive)]
    outcome = explained(results, [entry(equal)], is_whole=True)
    document = report(outcome, seconds=1.0)
    assert not outcome.is_clean
    assert (document["killed"], document["equivalent"], document["survived"]) == (1, 1, 1)
    assert document["killed_by"] == {"cell": 1}
    assert document["survivors"] == [alive.id]
    assert f"survived: {alive.id} in derive" in capsys.readouterr().out


def test_an_explanation_of_a_killed_mutant_is_stale_once_all_have_run(capsys):
    killed = toy_mutants()[0]
    results = [result("test_x.py::test", killed)]
    assert explained(results, [entry(killed)], is_whole=False).is_clean
    outcome = explained(results, [entry(killed)], is_whole=True)
    report(outcome, seconds=1.0)
    assert outcome.stale == [entry(killed)]
    assert not outcome.is_clean
    assert "explains nothing: toy.py derive" in capsys.readouterr().out


def test_a_reason_may_not_be_empty(tmp_path):
    path = tmp_path / "equivalents.toml"
    path.write_text(
        '[[equivalent]]\nfile = "f"\nfunction = "g"\nreason = " "\nedits = [["a", "b"]]\n'
    )
    with pytest.raises(ValueError, match="a reason of f is empty"):
        read_equivalents(path)


def test_every_target_has_its_functions_and_there_are_enough_mutants():
    required, here = required_keywords(PACKAGE), Path(__file__).parent
    seeds = read_seeded(here / "seeded.toml")
    total = 0
    for target in TARGETS:
        source = (PACKAGE / target.file).read_text(encoding="utf-8")
        found = mutants_of(
            target.file,
            source,
            functions=target.functions,
            required=required,
            seeded=[seed for seed in seeds if seed.file == target.file],
        )
        total += len(found)
    assert {seed.file for seed in seeds} <= {target.file for target in TARGETS}
    assert total >= 150


CHILDREN = """
import json, os, sys
import torch
sys.path.insert(0, sys.argv[1])
from mutant_child import Killers, collect, start

def verdict(edit, limit_s=60, **killers):
    source = open(sys.argv[2] + "/kernels/derive_tree.py").read()
    assert edit in ("", "depths = reach.sum(2) - 1") or edit.startswith("while")
    mutated = source.replace("depths = reach.sum(2) - 1", edit or "depths = reach.sum(2)")
    wanted = Killers(killers.get("cells", ()), killers.get("tests", ()))
    child, pipe = start({"paceline.kernels.derive_tree": mutated}, wanted, limit_s=limit_s)
    return collect(pipe, os.waitpid(child, 0)[1])

cells = ("dense/torch/decode/eager/one", "dense/torch/target_verify/eager/topk2")
results = {
    "cell": verdict("", cells=cells),
    "test": verdict("", tests=("kernels/test_derive_tree.py",)),
    "none": verdict("depths = reach.sum(2) - 1", cells=cells),
    "hang": verdict("while True: pass", 1, cells=cells),
    "names": verdict("", cells=("dense/torch/decode/eager/no-such-case",)),
}
print(json.dumps({name: found.killer for name, found in results.items()}))
"""


def test_a_child_names_what_failed_first():
    done = subprocess.run(
        [sys.executable, "-c", CHILDREN, str(Path(__file__).parent), str(PACKAGE)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    killers = json.loads(done.stdout)
    assert killers["cell"] == "dense/torch/target_verify/eager/topk2"
    assert killers["test"].startswith("kernels/test_derive_tree.py::")
    assert killers["none"] is SURVIVED.killer
    assert killers["hang"] == "timeout"
    assert killers["names"] == "import"
