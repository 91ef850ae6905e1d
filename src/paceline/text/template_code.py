"""The compiled code of a chat template, with a budget in it.

jinja2 compiles a template to Python.  `compile_metered` rewrites that: every function and every
turn of a loop spends as many steps as its code has operations, and an operation that costs what its
operands are long goes through the budget.  Whatever jinja2 writes loops or recurses in one of these
two; code that could in another way is refused.
"""

import ast
from collections.abc import Sequence
from types import CodeType
from typing import NoReturn

_USED = ("spend", "text", "linked", "measured", "searched", "copied")  # methods of a Budget
_REPLACED = {"str": "text", "str_join": "linked"}
_SMALL_BRANCH = 16  # operations that are paid for whether they are done or not
_SUMS_AT_ONCE = 8
_OPERATIONS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Compare, ast.Subscript, ast.Yield)


def compile_metered(source: str, filename: str) -> CodeType:
    """The code of a template as jinja2 generated it.

    Its functions take the budget from the field `budget` of their context.  Raises
    NotImplementedError for code that is not understood, and what `compile` raises.
    """
    tree = _Metered().visit(ast.parse(source, filename))
    return compile(ast.fix_missing_locations(tree), filename, "exec")


class _Metered(ast.NodeTransformer):
    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        lead = [_spending(_cost(node.body))]
        if node.args.args and node.args.args[0].arg == "context":  # not within another
            lead = [*_LEAD, *lead]
        self.generic_visit(node)
        node.body[:0] = lead
        return node

    def visit_For(self, node: ast.For) -> ast.For:
        lead = _spending(_cost(node.body))
        self.generic_visit(node)
        node.body.insert(0, lead)
        return node

    def visit_If(self, node: ast.If) -> ast.If:
        costs = _cost(node.body), _cost(node.orelse)
        self.generic_visit(node)
        for branch, cost in zip((node.body, node.orelse), costs, strict=True):
            if cost > _SMALL_BRANCH:
                branch.insert(0, _spending(cost))
        return node

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if isinstance(node.ctx, ast.Load) and node.id in _REPLACED:
            node.id = _name(_REPLACED[node.id])
        return node

    def visit_Compare(self, node: ast.Compare) -> ast.Compare:
        """Both operands are read, up to the shorter one; a constant is short."""
        operands = [node.left, *node.comparators]
        self.generic_visit(node)
        compared = [node.left, *node.comparators]
        for index, operator in enumerate(node.ops):
            left, right = operands[index : index + 2]
            if isinstance(operator, ast.In | ast.NotIn):
                if not _is_constant(right):
                    compared[index + 1] = _through("searched", compared[index + 1])
                if not _is_constant(left):
                    compared[index] = _through("measured", compared[index])
            elif isinstance(operator, ast.Is | ast.IsNot):
                continue
            elif not _is_constant(left) and not _is_constant(right):
                compared[index] = _through("measured", compared[index])
        node.left, node.comparators = compared[0], compared[1:]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        self.generic_visit(node)
        node.keys = [
            key if key is None or isinstance(key, ast.Constant) else _through("measured", key)
            for key in node.keys
        ]
        return node

    def visit_Call(self, node: ast.Call) -> ast.Call:
        self.generic_visit(node)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "getitem":
            subject, key = node.args
            if not isinstance(key, ast.Constant):
                node.args = [subject, _through("measured", key)]
        elif isinstance(node.func, ast.Name) and node.func.id == _name("text"):
            node.args = [_without("copied", each) for each in node.args]  # text pays for it
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        """The last of a chain of sums is as long as each before it."""
        if not isinstance(node.op, ast.Add):
            self.generic_visit(node)
            return node
        terms = []
        total: ast.expr = node
        while isinstance(total, ast.BinOp) and isinstance(total.op, ast.Add):
            terms.append(total.right)
            total = total.left
        total = self.visit(total)
        for index, term in enumerate(map(self.visit, reversed(terms)), start=1):
            total = ast.copy_location(ast.BinOp(total, ast.Add(), term), node)
            if index % _SUMS_AT_ONCE == 0:
                total = _through("copied", total)
        return total if len(terms) % _SUMS_AT_ONCE == 0 else _through("copied", total)

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        self.generic_visit(node)
        return _through("copied", node) if isinstance(node.slice, ast.Slice) else node

    def _refuse(self, node: ast.AST) -> NoReturn:
        raise NotImplementedError(f"code with {type(node).__name__}, whose turns are not counted")

    visit_While = visit_ListComp = visit_SetComp = visit_DictComp = visit_GeneratorExp = _refuse
    visit_AsyncFor = visit_AsyncFunctionDef = visit_Lambda = _refuse


def _cost(code: ast.AST | Sequence[ast.AST]) -> int:
    """Operations done once when `code` is; what spends for itself left out."""
    if not isinstance(code, ast.AST):
        return sum(map(_cost, code))
    if isinstance(code, ast.FunctionDef):
        return 1
    if isinstance(code, ast.For):
        return 1 + _cost(code.iter)
    if isinstance(code, ast.If):
        branches = _cost(code.body), _cost(code.orelse)
        return 1 + _cost(code.test) + sum(cost for cost in branches if cost <= _SMALL_BRANCH)
    if isinstance(code, ast.Constant):
        return len(code.value) >> 8 if isinstance(code.value, str) else 0
    return isinstance(code, _OPERATIONS) + sum(map(_cost, ast.iter_child_nodes(code)))


def _is_constant(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(map(_is_constant, node.elts))
    return isinstance(node, ast.Constant)


def _name(method: str) -> str:
    return f"budget_{method}"  # a variable of a template is l_<level>_<name>


def _through(method: str, value: ast.expr) -> ast.Call:
    called = ast.copy_location(ast.Name(_name(method), ast.Load()), value)
    return ast.copy_location(ast.Call(called, [value], []), value)


def _without(method: str, value: ast.expr) -> ast.expr:
    is_through = isinstance(value, ast.Call) and isinstance(value.func, ast.Name)
    if is_through and value.func.id == _name(method):  # type: ignore[attr-defined]
        return value.args[0]  # type: ignore[attr-defined,no-any-return]
    return value


def _spending(steps: int) -> ast.stmt:
    called = ast.Name(_name("spend"), ast.Load())
    return ast.Expr(ast.Call(called, [ast.Constant(steps + 1)], []))


# At the head of each outer function; those within see the names.
_LEAD = ast.parse(
    "budget = context.budget\n" + "\n".join(f"{_name(each)} = budget.{each}" for each in _USED)
).body
