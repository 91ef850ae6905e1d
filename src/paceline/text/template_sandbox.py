"""What chat templates run in: a sandbox with the helpers they expect, and a budget.

A template comes with a model, so it is somebody else's program.  It sees what it is given, cannot
reach the interpreter, and ends: whatever it does is paid for from the budget of its rendering.

Needs jinja2, so it is imported only for a model that brings a template.
"""

from collections.abc import Mapping
from datetime import datetime
from types import BuiltinMethodType, CodeType, FunctionType
from typing import Any, NoReturn

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, safe_range

from paceline.text.template_budget import Budget
from paceline.text.template_calls import (
    format_text,
    spend_on_builtin,
    spend_on_call,
    spend_on_operator,
)
from paceline.text.template_code import compile_metered
from paceline.text.template_filters import metered_filters, metered_tests

MAX_BOUND = 2**53  # of a range
_BUDGET = " budget"  # a variable's name that no template can write
_OF_A_MAPPING = frozenset(dir(dict))
_FORMATS = ("format", "format_map")  # which jinja2 wraps


class MeteredContext(Context):
    """The variables of one rendering, and its budget."""

    def __init__(
        self, environment: Environment, parent: dict[str, Any], *args: Any, **named: Any
    ) -> None:
        super().__init__(environment, parent, *args, **named)
        self.budget: Budget = parent[_BUDGET]  # a derived context has the same


class _Generator(CodeGenerator):
    def visit_EvalContextModifier(self, node: nodes.EvalContextModifier, frame: Frame) -> None:
        for option in node.options:
            if not (isinstance(option.value, nodes.Const) and option.value.value is False):
                self.fail(f"{option.key} is for HTML; a prompt is plain text", node.lineno)
        super().visit_EvalContextModifier(node, frame)


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates see data, not the interpreter, and cannot change what they are given.

    What they do raises OverBudget once the budget of their context is spent.
    """

    intercepted_binops = frozenset({"-", "*", "/", "//", "%", "**"})
    code_generator_class = _Generator
    context_class = MeteredContext

    def getattr(self, obj: Any, attribute: str) -> Any:
        """An attribute before a key, as jinja2 has it, without failing first for every key."""
        if type(obj) is dict and attribute in obj and attribute not in _OF_A_MAPPING:
            return obj[attribute]
        return super().getattr(obj, attribute)

    def call(self, context: Context, called: Any, /, *args: Any, **named: Any) -> Any:
        """Raises SecurityError for what is not safe, TemplateError for what is not served."""
        budget: Budget = context.budget  # type: ignore[attr-defined]
        if type(called) is BuiltinMethodType:  # of a text, a list, a mapping: takes no context
            named.pop("_loop_vars", None)
            named.pop("_block_vars", None)
            args = spend_on_builtin(budget, called, args, named)
            found = called(*args, **named)
        elif type(called) is FunctionType and called.__name__ in _FORMATS:
            found = format_text(self, budget, called.__wrapped__, args, named)  # type: ignore[attr-defined]
        else:
            args = spend_on_call(budget, called, args, named)
            found = super().call(context, called, *args, **named)
        budget.made(found)
        return found

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Raises TemplateError for one that makes much of little."""
        budget: Budget = context.budget  # type: ignore[attr-defined]
        spend_on_operator(budget, operator, left, right)
        return budget.copied(self.binop_table[operator](left, right))

    def _compile(self, source: str, filename: str) -> CodeType:
        """jinja2's hook for other ways to compile."""
        return compile_metered(source, filename)


class GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks what the model writes."""

    tags = {"generation"}  # noqa: RUF012  jinja2's interface

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


def sandbox() -> Environment:
    """An environment with the helpers Hugging Face templates expect."""
    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationBlock]
    )
    environment.filters.update(metered_filters(environment.filters))
    environment.tests.update(metered_tests(environment.tests))
    del environment.globals["lipsum"]  # filler, as much of it as asked for
    environment.globals["range"] = _range
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def render(template: Template, variables: Mapping[str, Any]) -> str:
    """The text of a template of `sandbox`.

    Raises OverBudget for more work or more text than the variables are worth, TemplateError, and
    whatever its expressions raise.
    """
    budget = Budget(variables)
    text = template.render({**variables, _BUDGET: budget})
    budget.check_text(text)
    return text


def _range(*bounds: int) -> range:
    """jinja2's, of numbers whose hashes differ: a set of others takes the square of its size."""
    if any(abs(bound) > MAX_BOUND for bound in bounds):
        raise TemplateError(f"a range beyond {MAX_BOUND}")
    return safe_range(*bounds)


def _raise_exception(text: str) -> NoReturn:
    raise TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
