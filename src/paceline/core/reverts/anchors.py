"""Places in source text, named by the symbol they lie in and by what stands there.

Compared is syntax: line numbers, line breaks, comments, quotes and brackets around an expression do
not count, so that a place is found wherever its symbol moves to.

Worked example: in `def add(a, b): return (a + b) * 2` the symbol `add` and the expression `a + b`
name one place; `a - b` put there makes `return ((a - b)) * 2`.
"""

import ast
import textwrap
from collections.abc import Iterator, Sequence
from difflib import get_close_matches

_OWNERS = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_AROUND = ast.stmt | ast.ExceptHandler | ast.match_case
# Text of these means the same wherever an expression may stand.
_ATOMS = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict)


class AnchorError(ValueError):
    """A place that is not there exactly once; its text says what is."""


def replaced(source: str, symbol: str, find: str, replace: str) -> str:
    """`source` with `replace` where `symbol` has `find`.

    symbol: a function, class or assigned name, within others joined by dots.  find: an expression,
    or statements in a row; it occurs once in the symbol.  replace: likewise, without a string of
    several lines; nothing takes statements out.  Raises AnchorError; SyntaxError for text that does
    not parse.
    """
    lines = source.encode().splitlines(keepends=True)
    starts = [0]
    for line in lines:
        starts.append(starts[-1] + len(line))
    owners = _owners(ast.parse(source), symbol)
    old, new = _expression(find), _expression(replace)
    if old is not None and new is not None:
        places: list[tuple[ast.expr, ast.expr] | tuple[ast.stmt, ast.stmt]] = [
            (node, node) for each in owners for node in _expressions(each) if _same(node, old)
        ]
        text = replace.strip()
        if not isinstance(new, _ATOMS) or isinstance(old, ast.GeneratorExp):
            text = f"({text})"
    else:
        wanted = ast.parse(_dedented(find)).body
        places = [run for owner in owners for run in _runs(owner, wanted)]
        text = _dedented(replace) or "pass"
    if len(places) != 1:
        raise AnchorError(_told(owners, places, lines, symbol, find))
    first, last = places[0]
    row, column = _start(first)
    start = starts[row - 1] + column
    assert last.end_lineno is not None
    assert last.end_col_offset is not None
    end = starts[last.end_lineno - 1] + last.end_col_offset
    if isinstance(first, ast.stmt):
        text = textwrap.indent(text, " " * column).lstrip(" ")
    data = source.encode()
    return (data[:start] + text.encode() + data[end:]).decode()


def symbols_of(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Every function, class and name assigned in a module or class, with its qualified name, outer
    ones first; of a function the functions and classes within it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _OWNERS):
            yield node.name, node
            inner = symbols_of(node)
            if not isinstance(node, ast.ClassDef):
                inner = ((name, each) for name, each in inner if isinstance(each, _OWNERS))
            yield from ((f"{node.name}.{name}", each) for name, each in inner)
        elif isinstance(node, _AROUND):
            yield from ((name, node) for name in _names(node))
            yield from symbols_of(node)  # an `if`, `try` or `with` around them


def _owners(tree: ast.Module, symbol: str) -> list[ast.AST]:
    found = dict[str, list[ast.AST]]()
    for name, node in symbols_of(tree):
        found.setdefault(name, []).append(node)
    if symbol not in found:
        near = ", ".join(get_close_matches(symbol, found, 3)) or "nothing like it"
        raise AnchorError(f"no symbol {symbol}; near it: {near}")
    return found[symbol]


def _names(node: ast.AST) -> list[str]:
    """What a statement assigns."""
    match node:
        case ast.Assign():
            targets: list[ast.expr] = node.targets
        case ast.AnnAssign():
            targets = [node.target]
        case _:
            return []
    parts = (part for target in targets for part in getattr(target, "elts", [target]))
    return [part.id for part in parts if isinstance(part, ast.Name)]


def _expression(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except SyntaxError:
        return None


def _expressions(node: ast.AST) -> Iterator[ast.expr]:
    """Every expression below a node but those inside a formatted string, whose places Python 3.11
    does not tell."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):
            yield child
        if not isinstance(child, ast.JoinedStr):
            yield from _expressions(child)


def _runs(owner: ast.AST, wanted: Sequence[ast.stmt]) -> Iterator[tuple[ast.stmt, ast.stmt]]:
    """(first, last) of every run of statements below a node that are the wanted ones."""
    for node in ast.walk(owner):
        for _, block in ast.iter_fields(node):
            if not isinstance(block, list) or not all(isinstance(s, ast.stmt) for s in block):
                continue
            for start in range(len(block) - len(wanted) + 1):
                run = block[start : start + len(wanted)]
                if all(map(_same, run, wanted)):
                    yield run[0], run[-1]


def _same(one: ast.AST, other: ast.AST) -> bool:
    return type(one) is type(other) and ast.dump(one) == ast.dump(other)


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    decorators = getattr(node, "decorator_list", [])
    return min((each.lineno for each in decorators), default=node.lineno), node.col_offset


def _dedented(text: str) -> str:
    """Lines of statements without their common indent."""
    return textwrap.dedent(text).strip("\n") if text.strip() else ""


def _told(
    owners: Sequence[ast.AST],
    places: Sequence[tuple[ast.expr, ast.expr] | tuple[ast.stmt, ast.stmt]],
    lines: Sequence[bytes],
    symbol: str,
    find: str,
) -> str:
    """How often it is there, and the lines that are it or resemble it."""
    wanted = find.strip().splitlines()[0].strip()
    numbers = [first.lineno for first, _ in places]
    if not numbers:
        inside = {
            line
            for owner in owners
            for line in range(owner.lineno, (owner.end_lineno or 0) + 1)  # type: ignore[attr-defined]
        }
        texts = {line: lines[line - 1].decode().strip() for line in sorted(inside)}
        near = get_close_matches(wanted, texts.values(), 3, 0.4)
        numbers = [
            line for line, text in texts.items() if text in near or (text and wanted in text)
        ]
    shown = [f"line {line}: {lines[line - 1].decode().strip()}" for line in numbers]
    near_it = "; ".join(shown) or "nothing like it"
    return f"found {len(places)} times in {symbol}: {find.strip()!r}; near it: {near_it}"
