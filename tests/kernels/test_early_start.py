"""Kernels that start while the one before drains: what each must do, read from its source.

A kernel waits for the kernel before it alone, so the order of all rests on every program of every
such kernel waiting: then none ends before all kernels before it have.  No interpreter shows a race.
"""

import ast
import inspect
import textwrap
from collections.abc import Set
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest

import paceline.kernels
from paceline.layers.weights.dense import DenseTable
from paceline.speculate.draft_passes import DraftPasses

FOLDER = Path(paceline.kernels.__path__[0]) / "_triton"
WAIT = "wait_for_inputs"
PREFETCH = "prefetch"  # a load whose result nobody has
WRITES = {"store", "atomic_add", "atomic_max", "atomic_cas", "atomic_xchg"}
# Language and arithmetic: neither reads nor writes memory.
HARMLESS = {
    "arange",
    "cdiv",
    "ceil",
    "full",
    "minimum",
    "maximum",
    "num_programs",
    "program_id",
    "to",
}
HARMLESS |= {
    "cast",
    "cumsum",
    "exp",
    "len",
    "max",
    "reduce",
    "static_assert",
    "sum",
    "zeros",
    "zeros_like",
    "let_next_start",
    "slots_of",
    "static_range",
    "where",
}
WEIGHTS = {"weight_ptr", "weight_scale_ptr", "bias_ptr", "log_ptr", "rate_bias_ptr"}
WEIGHTS |= {"norm_weight_ptr"}
# Of kernels that load states, or facts of their step, early, see launch.py: what was written before
# the step's embedding, or before SETTLING.
SETTLING = "state_inputs._state_inputs_kernel"
SETTLED = {
    "state_step._state_step_kernel": {"state_ptr", "slots_ptr", "window_ptr"},
    "state_rows._state_rows_kernel": {"state_ptr", "slots_ptr"},
    "commit_states._commit_states_kernel": {"state_ptr", "slots_ptr"},
    "paged_decode._decode_kernel": {
        "kv_lens_ptr",
        "shared_lens_ptr",
        "page_table_ptr",
        "page_row_ptr",
    },
    "rope_write_kv._rope_write_kv_kernel": {"positions_ptr"},
}

# Waits in the first round of its loop.
WITHIN = "skinny_linear._ring_linear_kernel"
# Of two launches of one call, where the second runs beside the first, see launch.py.
BESIDE = "paged_extend_kernel.paged_extend_kernel"
LEADERS = [BESIDE, "ragged_groups._ragged_groups_kernel"]  # the first of the two is either's


class Specialised(ast.NodeTransformer):
    """A kernel for given constants: branches that these decide are taken, or gone."""

    def __init__(self, **constants: bool) -> None:
        self.constants = constants

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        self.generic_visit(node)
        test, wanted = node.test, True
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            test, wanted = test.operand, False
        if not (isinstance(test, ast.Name) and test.id in self.constants):
            return node
        return node.body if self.constants[test.id] is wanted else node.orelse


def beside(
    name: str = BESIDE, *, leads: bool, follows: bool, splits: bool = False
) -> ast.FunctionDef:
    """One of LEADERS as one of its launches, of which the second may have splits."""
    kernel = Specialised(LEADS=leads, FOLLOWS=follows, IS_SPLIT=splits).visit(
        deepcopy(kernels()[name])
    )
    assert isinstance(kernel, ast.FunctionDef)
    return kernel


def is_end(node: ast.AST) -> bool:
    return isinstance(node, ast.Return)


def called(node: ast.Call) -> str:
    function = node.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "inline_asm_elementwise" and ast.unparse(node.args[0])[1:].startswith("prefetch."):
        name = PREFETCH
    return name


@cache
def kernels() -> dict[str, ast.FunctionDef]:
    """Every kernel that may be launched early: entry points with the OVERLAPPED constant."""
    found = {}
    for path in sorted(FOLDER.glob("*.py")):
        if path.stem == "launch":
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.FunctionDef) and "OVERLAPPED" in {
                a.arg for a in node.args.args
            }:
                found[f"{path.stem}.{node.name}"] = node
    return found


@cache
def launchers() -> dict[str, str]:
    """Kernel -> the module that launches it: its own, or the one that imports it."""
    found = {name.split(".")[1]: name.split(".")[0] for name in kernels()}
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                found |= {each.name: path.stem for each in node.names if each.name in found}
    return found


def is_wait(statement: ast.stmt) -> bool:
    return (
        isinstance(statement, ast.Expr)
        and isinstance(statement.value, ast.Call)
        and called(statement.value) == WAIT
    )


def names_in(*nodes: ast.AST) -> set[str]:
    return {each.id for node in nodes for each in ast.walk(node) if isinstance(each, ast.Name)}


def pointers_read(call: ast.Call, body: list[ast.stmt]) -> set[str]:
    """Arguments that a load's address, or all that a helper is given, is made of, through the
    assignments before it."""
    names = names_in(call.args[0]) if called(call) == "load" else names_in(*call.args)
    for statement in reversed(body):
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and names_in(*node.targets) & names:
                names |= names_in(node.value)
    return {name for name in names if name.endswith("_ptr")}


@cache
def helpers() -> dict[str, str]:
    """Functions that kernels may call before they wait -> what such a call is: "load", of weights
    and of what may be settled, or "to", of nothing."""
    found: dict[str, str] = {}
    functions = [
        node
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
    ]
    early = WEIGHTS.union(*SETTLED.values())
    known = -1
    while known < len(found):  # helpers may call helpers
        known = len(found)
        for function in functions:
            calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
            kinds = {"load", PREFETCH}
            loads = [each for each in calls if found.get(called(each), called(each)) in kinds]
            reads = [pointers_read(each, function.body) for each in loads]
            others = {called(each) for each in calls} - HARMLESS - kinds - {"jit"} - found.keys()
            if not others and all(pointers and pointers <= early for pointers in reads):
                found[function.name] = "load" if reads else "to"
    names = [function.name for function in functions]
    return {name: kind for name, kind in found.items() if names.count(name) == 1}


def broken_rules(kernel: ast.FunctionDef, settled: Set[str] = frozenset()) -> list[str]:
    """What of the rule in launch.py a kernel does not keep; settled: pointers it may read early."""
    at = [index for index, statement in enumerate(kernel.body) if is_wait(statement)]
    if len(at) != 1:
        return ["does not wait exactly once, outside every branch and loop"]
    before, broken = kernel.body[: at[0]], []
    for node in (node for statement in before for node in ast.walk(statement)):
        if isinstance(node, ast.Return):
            broken.append("returns before it waits")
        if not isinstance(node, ast.Call):
            continue
        name = helpers().get(called(node), called(node))
        if name == "load":
            foreign = pointers_read(node, before) - WEIGHTS - settled
            broken += [f"reads {name} before it waits" for name in sorted(foreign)]
        elif name in WRITES:
            broken.append(f"calls {name} before it waits")
        elif name not in HARMLESS:
            broken.append(f"calls {name}, which may touch memory, before it waits")
    return broken


@pytest.mark.parametrize("name", sorted(kernels().keys() - {BESIDE, WITHIN}))
def test_a_kernel_that_starts_early_waits_before_it_touches_what_others_write(name: str) -> None:
    assert broken_rules(kernels()[name], SETTLED.get(name, frozenset())) == []


@pytest.mark.parametrize("leads", [False, True])
@pytest.mark.parametrize("name", LEADERS)
def test_a_launch_with_another_beside_it_waits_before_it_lets_that_start(
    name: str, leads: bool
) -> None:
    kernel = beside(name, leads=leads, follows=False)
    assert broken_rules(kernel) == []
    (waits,) = (at for at, statement in enumerate(kernel.body) if is_wait(statement))
    lets = ["let_next_start" in ast.dump(statement) for statement in kernel.body]
    assert lets[: waits + 2] == [*[False] * (waits + 1), leads]


@pytest.mark.parametrize("splits", [False, True])
def test_a_launch_beside_another_waits_wherever_it_ends(splits: bool) -> None:
    """Of splits the one that merges, which every tile has; the others, and those that have no
    keys, leave."""
    kernel = beside(leads=False, follows=True, splits=splits)
    assert not any(is_wait(statement) for statement in kernel.body)
    blocks = [node for node in ast.walk(kernel) if isinstance(node, ast.If)]
    ends = {ast.unparse(node.test): node.body for node in blocks if is_end(node.body[-1])}
    assert len(ends) == sum(is_end(node) for node in ast.walk(kernel))
    for leaves in ("split >= live_splits", "not finishes_last(count_ptr, live_splits)"):
        assert (ends.pop(leaves, None) is not None) is splits
    [end] = ends.values()
    for last in (end[-2], kernel.body[-1]):
        assert ast.unparse(last) == "_end_behind_leader(OVERLAPPED)"

    module = ast.parse((FOLDER / f"{BESIDE.split('.')[0]}.py").read_text())
    functions = [node for node in module.body if isinstance(node, ast.FunctionDef)]
    [waiter] = (node for node in functions if node.name == "_end_behind_leader")
    [_, one] = waiter.body
    assert isinstance(one, ast.If)
    assert ast.unparse(one.test) == "tl.program_id(0) + tl.program_id(1) == 0"  # in every grid
    assert is_wait(one.body[0])


def test_a_loop_may_load_weights_before_it_waits_in_its_first_round() -> None:
    """Until then it writes nothing, and what it reads behind has the wait in its address."""
    body = kernels()[WITHIN].body
    loop = body[-1]
    assert isinstance(loop, ast.For)
    assert ast.unparse(loop.target) == "begin"
    assert isinstance(loop.iter, ast.Call)
    assert ast.unparse(loop.iter.args[0]) == "first"
    (at,) = (index for index, each in enumerate(loop.body) if isinstance(each, ast.If))
    waits = loop.body[at]
    assert isinstance(waits, ast.If)
    assert ast.unparse(waits.test) == "begin == first"
    assert ast.unparse(waits.body[0]) == "behind = wait_within(begin, OVERLAPPED)"
    calls = [each for node in waits.body for each in ast.walk(node) if isinstance(each, ast.Call)]
    loads = [each for each in calls if called(each) == "load"]
    assert loads
    assert all("behind" in names_in(load.args[0]) for load in loads)
    # Where the wait is a statement of its own the rules hold: all but those loads are of weights.
    wait = ast.parse(f"{WAIT}(OVERLAPPED)").body
    kernel = deepcopy(kernels()[WITHIN])
    kernel.body = [*body[:-1], *loop.body[:at], *wait, *loop.body[at + 1 :]]
    assert broken_rules(kernel) == []
    rest = [each for node in loop.body[at + 1 :] for each in ast.walk(node)]
    reads = [each for each in rest if isinstance(each, ast.Call) and called(each) == "load"]
    assert all(pointers_read(each, loop.body) <= WEIGHTS for each in reads)


@pytest.mark.parametrize("name", [SETTLING, "rope_write_kv._rope_write_kv_kernel"])
def test_what_stands_before_an_early_reader_waits_before_it_lets_that_start(name: str) -> None:
    """No branch, no loop: a program of it that has let the next start has waited."""
    body = kernels()[name].body
    (waits,) = (at for at, statement in enumerate(body) if is_wait(statement))
    lets = [at for at, each in enumerate(body) if "let_next_start" in ast.dump(each)]
    assert lets == [waits + 1]


def test_no_column_of_a_window_is_overwritten_that_a_thread_has_still_to_read() -> None:
    """Warps may have the same columns: each is read before all of them meet, and then written."""
    body = kernels()["state_step._state_step_kernel"].body
    (meets,) = (at for at, each in enumerate(body) if "debug_barrier" in ast.dump(each))
    moves = [at for at, each in enumerate(body) if "_move_window" in ast.dump(each)]
    reads = [at for at, each in enumerate(body) if "_behind" in ast.dump(each)]
    counts = [at for at, each in enumerate(body) if "atomic_add" in ast.dump(each)]
    assert len(moves) == 2  # of values, and in a branch of queries and keys
    assert max(reads) < meets < min(moves) < counts[0] < max(moves)


def test_torch_looks_embeddings_up_and_overtakes_nothing() -> None:
    """What every `state_step` rests on, see launch.py."""
    source = ast.parse(textwrap.dedent(inspect.getsource(DenseTable.apply)))
    calls = {called(node) for node in ast.walk(source) if isinstance(node, ast.Call)}
    assert calls == {"index_select"}


def test_torch_copies_a_drafters_tokens_behind_what_its_layers_read_early() -> None:
    source = ast.parse(textwrap.dedent(inspect.getsource(DraftPasses.begin)))
    lines = {called(node): node.lineno for node in ast.walk(source) if isinstance(node, ast.Call)}
    assert max(lines["derive_rows"], lines["derive_rope"]) < lines["copy_"] < lines["context"]


@pytest.mark.parametrize(
    "path", sorted(set(FOLDER.glob("*.py")) - {FOLDER / "launch.py"}), ids=lambda path: path.stem
)
def test_early_start_is_asked_for_the_launched_kernel_alone(path: Path) -> None:
    """`overlap_options` names the kernel it is given to, and that kernel has the constant."""
    module = ast.parse(path.read_text())
    early = {name for name, launcher in launchers().items() if launcher == path.stem}
    launched = set()
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            assert not isinstance(node.func, ast.Subscript), (
                "a kernel starts through `launch` alone"
            )
        if not (isinstance(node, ast.Call) and called(node) == "launch"):
            continue
        assert isinstance(node.args[0], ast.Name)
        options = [k.value for k in node.keywords if k.arg is None]
        for option in options:
            if isinstance(option, ast.Call) and called(option) == "overlap_options":
                assert ast.unparse(option.args[1]) == node.args[0].id
                launched.add(node.args[0].id)
        assert "launch_pdl" not in {k.arg for k in node.keywords}
    assert launched == early


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("tl.store(p, 1); wait_for_inputs(O)", "calls store before"),
        ("if x:\n  return\nwait_for_inputs(O)", "returns before"),
        ("a = x_ptr + 1; b = tl.load(a); wait_for_inputs(O)", "reads x_ptr before"),
        ("helper(x_ptr); wait_for_inputs(O)", "calls helper, which may touch memory"),
        ("if x:\n  wait_for_inputs(O)", "does not wait exactly once"),
        ("a = weight_ptr + 1; b = tl.load(a); wait_for_inputs(O); tl.store(p, b)", None),
    ],
)
def test_the_rules_see_a_kernel_that_breaks_them(source: str, text: str | None) -> None:
    body = ast.parse(source).body
    kernel = ast.parse("def kernel(O): pass").body[0]
    assert isinstance(kernel, ast.FunctionDef)
    kernel.body = body
    found = broken_rules(kernel)
    assert found == [] if text is None else any(text in broken for broken in found)
