"""Mutation operators: small edits of source text, found on its syntax tree.

Every edit keeps the number of lines, so that a traceback in a mutated module points where the
source says.  Offsets are bytes of the UTF-8 text, as `ast` counts columns.
"""

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

# A length for another: prefix for total and total for prefix, the step's own tokens for either.
LENGTHS = {
    "prefix_lens": ("kv_lens", "extend_lens"),
    "kv_lens": ("prefix_lens",),
    "extend_lens": ("kv_lens",),
    "prefix_lens_bound": ("kv_lens_bound",),
    "kv_lens_bound": ("prefix_lens_bound",),
    "prefix": ("extend", "start"),
    "extend": ("prefix",),
    "prefix_used": ("kv_lens",),
}
# Requests for tokens and back.
COUNTS = {
    one: other
    for pair in (
        ("reqs", "tokens"),
        ("num_reqs", "num_tokens"),
        ("padded_reqs", "padded_tokens"),
        ("max_reqs", "max_tokens"),
    )
    for one, other in (pair, pair[::-1])
}
BOUNDS = {"max_extend_len", "extend_len", "window"}
INDICES = {"group", "index", "part", "i"}
COMPARISONS: dict[type[ast.cmpop], tuple[bytes, bytes]] = {
    ast.Lt: (b"<", b"<="),
    ast.LtE: (b"<=", b"<"),
    ast.Gt: (b">", b">="),
    ast.GtE: (b">=", b">"),
    ast.Eq: (b"==", b"!="),
    ast.NotEq: (b"!=", b"=="),
    ast.Is: (b"is", b"is not"),
    ast.IsNot: (b"is not", b"is"),
}
ARITHMETIC: dict[type[ast.operator], tuple[bytes, bytes]] = {
    ast.Add: (b"+", b"-"),
    ast.Sub: (b"-", b"+"),
    ast.FloorDiv: (b"//", b"%"),
    ast.Mod: (b"%", b"//"),
    ast.BitAnd: (b"&", b"|"),
    ast.BitOr: (b"|", b"&"),
}
EXTREMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum"}
# Calls that say nothing about a step: messages, and hints of when a kernel may start.
SILENT_CALLS = {
    "about",
    "message",
    "reject",
    "wait_for_inputs",
    "let_next_start",
    "overlap_options",
}
SILENT_KEYWORDS = {"num_warps", "device", "non_blocking", "strict"}
# Methods whose plain integers are dimensions.
DIMENSIONED = {
    *("index_select", "index_copy_", "gather", "cumsum", "sum", "any", "unsqueeze", "flatten"),
    *("unflatten", "transpose", "softmax", "stride"),
}


@dataclass(frozen=True, slots=True)
class Edit:
    """One mutation: bytes [start, end) of a source become `text`."""

    operator: str
    start: int
    end: int
    text: bytes


@dataclass(frozen=True, slots=True)
class Scope:
    """What an operator may ask about the place of a node."""

    source: bytes
    line_starts: tuple[int, ...]
    names: frozenset[str]  # that the function around the node knows
    dimensions: frozenset[int]  # where constants begin that number a dimension
    required: frozenset[str]  # keywords some function of the package cannot do without

    def start(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        return self.line_starts[node.lineno - 1] + node.col_offset

    def end(self, node: ast.expr | ast.stmt | ast.keyword) -> int:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        return self.line_starts[node.end_lineno - 1] + node.end_col_offset

    def replace(self, operator: str, node: ast.expr | ast.stmt | ast.keyword, text: str) -> Edit:
        """An edit of the whole node."""
        start, end = self.start(node), self.end(node)
        lost = self.source[start:end].count(b"\n")
        return Edit(operator, start, end, text.encode() + b"\n" * lost)

    def between(
        self, operator: str, left: ast.expr, right: ast.expr, tokens: tuple[bytes, bytes]
    ) -> Edit:
        """An edit of the token that joins two operands."""
        start, end = self.end(left), self.start(right)
        before, after = tokens
        text = self.source[start:end].replace(before, after, 1)
        return Edit(operator, start, end, text)


Operator = Callable[[ast.AST, Scope], Iterator[Edit]]


def constant(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """An integer one higher and, but for 0, one lower; of dimensions, another one."""
    if not isinstance(node, ast.Constant) or type(node.value) is not int:
        return
    if scope.start(node) in scope.dimensions:
        yield scope.replace("constant", node, "1" if node.value == 0 else "0")
        return
    for step in (1, -1) if node.value else (1,):
        yield scope.replace("constant", node, f"({node.value + step})")


def arithmetic(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """+ and -, page and place in it, either and both."""
    if isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield scope.between("arithmetic", node.left, node.right, ARITHMETIC[type(node.op)])


def boolean(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """`and` and `or`; `not` left out."""
    if isinstance(node, ast.BoolOp):
        words = (b"and", b"or") if isinstance(node.op, ast.And) else (b"or", b"and")
        for left, right in pairwise(node.values):
            yield scope.between("boolean", left, right, words)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.Invert):
        start, end = scope.start(node), scope.start(node.operand)
        yield Edit("boolean", start, end, b"")


def comparison(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """A bound that is in or out; equality for its opposite."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in COMPARISONS:
        tokens = COMPARISONS[type(node.ops[0])]
        yield scope.between("comparison", node.left, node.comparators[0], tokens)


def length(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """Prefix for total, total for prefix, the step's tokens for either."""
    for other in LENGTHS.get(_read_name(node), ()):
        yield from _renamed("length", node, other, scope)


def count(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """Requests for tokens and back."""
    other = COUNTS.get(_read_name(node))
    if other is not None:
        yield from _renamed("count", node, other, scope)


def stride(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """A bound one too long and one too short; a page size or a tensor's stride one too long."""
    name = _read_name(node)
    signs = "+-" if name in BOUNDS else "+"
    if name in BOUNDS or name == "page_size" or name.startswith("stride_"):
        assert isinstance(node, ast.expr)
        for sign in signs:
            yield scope.replace("stride", node, f"({ast.unparse(node)} {sign} 1)")


def first_of_all(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """The first group, size or part for the one that is meant."""
    if isinstance(node, ast.Subscript) and _read_name(node.slice) in INDICES:
        yield scope.replace("first-of-all", node.slice, "0")


def extreme(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """The smaller for the larger."""
    if not isinstance(node, ast.Call) or _callee(node) not in EXTREMES:
        return
    name = EXTREMES[_callee(node)]
    if isinstance(node.func, ast.Name):
        yield scope.replace("extreme", node.func, name)
    elif isinstance(node.func, ast.Attribute):
        text = f"{ast.unparse(node.func.value)}.{name}"
        yield scope.replace("extreme", node.func, text)


def flag(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """True for False."""
    if isinstance(node, ast.Constant) and type(node.value) is bool:
        yield scope.replace("flag", node, str(not node.value))


def dropped_write(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """A statement that writes: a call, or an assignment to a part of something."""
    is_call = isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    is_part = isinstance(node, ast.Assign) and isinstance(
        node.targets[0], ast.Subscript | ast.Attribute
    )
    if is_call or is_part:
        assert isinstance(node, ast.stmt)
        yield scope.replace("dropped-write", node, "pass")


def dropped_keyword(node: ast.AST, scope: Scope) -> Iterator[Edit]:
    """An argument left to its default.  What has no default would only be a TypeError."""
    if not isinstance(node, ast.Call):
        return
    for keyword in node.keywords:
        if keyword.arg in SILENT_KEYWORDS or keyword.arg is None:
            continue
        if keyword.arg not in scope.required:
            yield scope.replace("dropped-keyword", keyword, "**{}")
        elif not isinstance(keyword.value, ast.Constant) and keyword.arg in OPTIONAL_VALUES:
            yield scope.replace("dropped-keyword", keyword, f"{keyword.arg}=None")


OPTIONAL_VALUES = {
    *("window", "tree_mask", "sinks", "soft_cap", "parents", "k_scale", "v_scale", "tree"),
    *("v_head_dim", "lse", "window_left", "logits_soft_cap"),
}
OPERATORS: tuple[Operator, ...] = (
    *(constant, arithmetic, boolean, comparison, length, count, stride),
    *(first_of_all, extreme, flag, dropped_write, dropped_keyword),
)


def is_silent(node: ast.AST) -> bool:
    """Whether nothing under `node` is mutated: messages, assertions, types, docstrings."""
    if isinstance(node, ast.Raise | ast.Assert | ast.JoinedStr | ast.arg):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    if isinstance(node, ast.keyword):
        return node.arg in SILENT_KEYWORDS
    if isinstance(node, ast.Expr):
        node = node.value
    return isinstance(node, ast.Call) and _callee(node) in SILENT_CALLS


def dimensions(node: ast.AST) -> Iterator[ast.expr]:
    """The constants in `node` that number a dimension: of a single one, 0 and -1 are the same."""
    if isinstance(node, ast.Subscript) and _read_name(node.value) == "shape":
        yield node.slice
    if isinstance(node, ast.Call) and _callee(node) in DIMENSIONED:
        yield from node.args


def _renamed(operator: str, node: ast.AST, name: str, scope: Scope) -> Iterator[Edit]:
    if isinstance(node, ast.Attribute):
        start, end = scope.end(node.value), scope.end(node)
        text = re.sub(rb"\w+$", name.encode(), scope.source[start:end])
        yield Edit(operator, start, end, text)
    elif isinstance(node, ast.Name) and name in scope.names:
        yield scope.replace(operator, node, name)


def _read_name(node: ast.AST) -> str:
    """The last part of a name that is read; empty for anything else."""
    if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.id if isinstance(node, ast.Name) else node.attr
    return ""


def _callee(node: ast.Call) -> str:
    return _read_name(node.func)
