"""Mutants of a source file: every edit of every operator in the functions of a target."""

import ast
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from mutant_operators import OPERATORS, Edit, Scope, dimensions, is_silent

FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True)
class Mutant:
    """One edit of one file.  before and after are its lines, so that a list of them does not rot
    when lines move."""

    file: str  # below the package
    line: int
    operator: str
    number: int  # among those of its line and operator
    function: str  # qualified name
    before: str
    after: str
    edit: Edit

    @property
    def id(self) -> str:
        return f"{self.file}:{self.line}:{self.operator}:{self.number}"

    @property
    def module(self) -> str:
        return "paceline." + self.file.removesuffix(".py").replace("/", ".")

    def applied(self, source: str) -> str:
        """The mutated text."""
        return _apply(source.encode(), self.edit).decode()


@dataclass(frozen=True, slots=True)
class Seeded:
    """A mutation that no operator makes, written by hand: a class of bug the field has had."""

    file: str
    function: str
    before: str  # occurs once in the file
    after: str


def mutants_of(
    file: str,
    source: str,
    *,
    functions: Sequence[str],
    required: frozenset[str],
    seeded: Sequence[Seeded] = (),
) -> list[Mutant]:
    """Every mutant of the named functions, in the order of the text.

    functions: names, qualified within classes; a class names all of its functions; empty: all.
    required: keywords that have no default in some function of the package.
    Raises ValueError for a function the file has not, and a seed that does not occur once.
    """
    data, tree = source.encode(), ast.parse(source)
    starts = tuple(accumulate((len(line) + 1 for line in data.split(b"\n")), initial=0))
    bodies = dict(_functions(tree, ""))
    chosen = _chosen(file, bodies, functions)
    found: list[tuple[str, Edit]] = []
    for name, function in chosen.items():
        names = frozenset(n.id for n in ast.walk(function) if isinstance(n, ast.Name)) | {
            argument.arg for argument in _arguments(function)
        }
        bare = Scope(data, starts, names, frozenset(), required)
        numbered = {bare.start(n) for node in ast.walk(function) for n in dimensions(node)}
        scope = replace(bare, dimensions=frozenset(numbered))
        edits = (edit for node in _nodes(function) for edit in _edits(node, scope))
        found += [(name, edit) for edit in edits if edit.text != data[edit.start : edit.end]]
    for seed in seeded:
        if source.count(seed.before) != 1:
            raise ValueError(f"{file}: {seed.before!r} occurs {source.count(seed.before)} times")
        start = data.index(seed.before.encode())
        end = start + len(seed.before.encode())
        found.append((seed.function, Edit("seeded", start, end, seed.after.encode())))
    return _numbered(file, data, found)


def required_keywords(package: Path) -> frozenset[str]:
    """Keyword-only arguments and fields without a default, of every function and class."""
    required: set[str] = set()
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, FUNCTIONS):
                pairs = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
                required |= {argument.arg for argument, default in pairs if default is None}
            elif isinstance(node, ast.ClassDef):
                fields = [item for item in node.body if isinstance(item, ast.AnnAssign)]
                required |= {
                    item.target.id
                    for item in fields
                    if item.value is None and isinstance(item.target, ast.Name)
                }
    return frozenset(required)


def read_seeded(path: Path) -> list[Seeded]:
    """The mutations written by hand."""
    return [Seeded(**entry) for entry in tomllib.loads(path.read_text())["seeded"]]


def _functions(tree: ast.AST, prefix: str) -> Iterator[tuple[str, FUNCTIONS]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, FUNCTIONS):
            yield prefix + node.name, node
        elif isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{prefix}{node.name}.")


def _chosen(
    file: str, bodies: dict[str, FUNCTIONS], functions: Sequence[str]
) -> dict[str, FUNCTIONS]:
    chosen = {}
    for wanted in functions or tuple(bodies):
        found = {n: f for n, f in bodies.items() if n == wanted or n.startswith(f"{wanted}.")}
        if not found:
            raise ValueError(f"{file} has no function {wanted}; it has {', '.join(bodies)}")
        chosen |= found
    return chosen


def _arguments(function: FUNCTIONS) -> list[ast.arg]:
    arguments = function.args
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]


def _nodes(function: FUNCTIONS) -> Iterator[ast.AST]:
    """The body, without what is silent."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if is_silent(node):
            continue
        yield node
        children = list(ast.iter_child_nodes(node))
        if isinstance(node, ast.AnnAssign):
            children.remove(node.annotation)
        waiting += reversed(children)


def _edits(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    for operator in OPERATORS:
        yield from operator(node, scope)


def _numbered(file: str, data: bytes, found: list[tuple[str, Edit]]) -> list[Mutant]:
    counts: Counter[tuple[int, str]] = Counter()
    made = []
    for function, edit in sorted(found, key=lambda pair: (pair[1].start, pair[1].operator)):
        line = data.count(b"\n", 0, edit.start) + 1
        before, after = _lines(data, edit)
        counts[line, edit.operator] += 1
        number = counts[line, edit.operator]
        made.append(Mutant(file, line, edit.operator, number, function, before, after, edit))
    return made


def _lines(data: bytes, edit: Edit) -> tuple[str, str]:
    """The lines an edit touches, before and after, with blanks folded."""
    first = data.rfind(b"\n", 0, edit.start) + 1
    last = data.find(b"\n", edit.end)
    last = len(data) if last < 0 else last
    after = data[first : edit.start] + edit.text + data[edit.end : last]
    return _folded(data[first:last]), _folded(after)


def _folded(text: bytes) -> str:
    return " ".join(text.decode().split())


def _apply(data: bytes, edit: Edit) -> bytes:
    return data[: edit.start] + edit.text + data[edit.end :]
