"""Filters and tests of jinja2, each behind what it spends.

Most read what they are given once; those that do more, or make much of little, say so here.  One
that a later jinja2 adds is taken for one that reads.
"""

import json
from collections.abc import Callable, Mapping
from numbers import Number
from typing import Any

from jinja2 import TemplateError, Undefined, pass_context, pass_environment, pass_eval_context
from jinja2.runtime import Context

from paceline.text.template_budget import Budget
from paceline.text.template_calls import (
    MAX_POWER,
    spend_on_join,
    spend_on_modulo,
    spend_on_pairs,
    spend_on_pattern,
    spend_on_replace,
)

Function = Callable[..., Any]
# (budget, value, arguments of the filter) to the value the filter gets.
Spend = Callable[..., Any]

FREE_FILTERS = frozenset(
    {"abs", "attr", "count", "d", "default", "first", "items", "last", "length", "random"}
)
FREE_TESTS = frozenset(
    {"boolean", "callable", "defined", "escaped", "false", "float", "integer", "none"}
) | {"iterable", "mapping", "number", "sameas", "sequence", "string", "true", "undefined"}


def metered_filters(filters: Mapping[str, Any]) -> dict[str, Function]:
    """The same filters under the same names; each takes its budget from the context."""
    metered = {
        name: raw if name in FREE_FILTERS else _metered(raw, _SPENDS.get(name, _read))
        for name, raw in filters.items()
    }
    return metered | {"tojson": to_json}


def metered_tests(tests: Mapping[str, Any]) -> dict[str, Function]:
    """The same tests under the same names; each takes its budget from the context."""
    return {
        name: raw if name in FREE_TESTS else _metered(raw, _TEST_SPENDS.get(name, _compare))
        for name, raw in tests.items()
    }


def _metered(raw: Function, spend: Spend) -> Function:
    lead = _LEADS[getattr(raw, "jinja_pass_arg", None)]

    @pass_context
    def run(context: Context, value: Any, /, *args: Any, **named: Any) -> Any:
        budget: Budget = context.budget  # type: ignore[attr-defined]
        budget.spend(2)
        value = spend(budget, value, *args, **named)
        found = raw(*lead(context), value, *args, **named)
        budget.made(found)
        return found

    @pass_context
    def run_on_text(context: Context, value: Any, /, *args: Any, **named: Any) -> Any:
        if type(value) is not str or args or named:
            return run(context, value, *args, **named)
        context.budget.spend(2 + (len(value) >> 6))  # type: ignore[attr-defined]
        return raw(value)

    return run_on_text if spend is _read and lead is _no_lead else run


def _no_lead(context: Context) -> tuple[Any, ...]:
    return ()


def _mark(decorator: Callable[[Function], Function]) -> object:
    return decorator(lambda: None).jinja_pass_arg  # type: ignore[attr-defined]


# What jinja2 passes before the value, by what its decorators leave on a function.
_LEADS: dict[object, Callable[[Context], tuple[Any, ...]]] = {
    None: _no_lead,
    _mark(pass_context): lambda context: (context,),
    _mark(pass_eval_context): lambda context: (context.eval_ctx,),
    _mark(pass_environment): lambda context: (context.environment,),
}


@pass_context
def to_json(
    context: Context,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """A value as JSON, without escapes for HTML; the arguments are those of `json.dumps`."""
    budget: Budget = context.budget  # type: ignore[attr-defined]
    weight = budget.weigh(value)
    for each in separators or ():
        budget.copy(weight.values * len(each))
    if indent is not None:  # in each line, as often as it is deep
        width = indent if isinstance(indent, int) else len(indent)
        budget.copy(weight.values * weight.depth * width)
    text = json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )
    budget.made(text)
    return text


def _read(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    """Once, in C.  A number may be a width."""
    budget.copy(budget.weigh(value).characters << 2)
    for each in (*args, *named.values()):
        budget.measured(each)
        if isinstance(each, int):
            budget.copy(abs(each))
    return value


def _trim(budget: Budget, value: Any, chars: Any = None) -> Any:
    spend_on_pairs(budget, budget.text(value), chars)
    return _read(budget, value, chars)


def _convert(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    return budget.measured(value)


def _walk(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    """Value by value, in Python: by a path, which is a text, or another filter."""
    steps = 1
    for each in (*args, *named.values()):
        budget.measured(each)
        steps += len(each) >> 2 if isinstance(each, str) else 0
    return budget.counted(value, steps)


def _divide(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    for each in (*args, *named.values()):
        budget.spend(abs(each) if isinstance(each, int) else 0)
    return _walk(budget, value, *args, **named)


def _sort(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    """Compared, some log2 times each."""
    if not value:
        return value
    value = _walk(budget, value, *args, **named)
    value = value if isinstance(value, Mapping) else list(value)
    budget.spend(len(value).bit_length() * (budget.weigh(value).characters >> 3))
    return value


def _sort_items(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    """By their keys, unless asked."""
    if args or named or not isinstance(value, Mapping):
        return _sort(budget, value, *args, **named)
    budget.spend(len(value).bit_length() * (budget.weigh(list(value)).characters >> 3))
    return value


def _sum(budget: Budget, value: Any, attribute: Any = None, start: Any = 0) -> Any:
    """Of lists each sum is a copy."""
    value = list(_walk(budget, value, attribute))
    if not isinstance(start, Number):
        budget.copy((budget.weigh([start, *value]).characters) * (len(value) + 1))
    return value


def _join(budget: Budget, value: Any, d: Any = "", attribute: Any = None) -> Any:
    pieces = list(_walk(budget, value, attribute))
    spend_on_join(budget, budget.text(d), pieces)
    return pieces


def _replace(budget: Budget, value: Any, old: Any, new: Any, count: Any = None) -> Any:
    spend_on_replace(budget, budget.text(value), old, new, count)
    return value


def _format(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    spend_on_modulo(budget, budget.text(value), named or args)
    return value


def _indent(budget: Budget, value: Any, width: Any = 4, *args: Any, **named: Any) -> Any:
    lines = len(budget.text(value).splitlines()) + 1
    budget.copy((len(value) << 2) + lines * (width if isinstance(width, int) else len(width)))
    return value


def _round(budget: Budget, value: Any, precision: Any = 0, method: Any = "common") -> Any:
    if not isinstance(value, Number | Undefined):
        raise TypeError(f"round of {type(value).__name__}")
    if isinstance(precision, int) and abs(precision) > MAX_POWER:
        raise TemplateError(f"a precision beyond {MAX_POWER}")
    return value


def _cut(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    """Piece by piece, in Python; texts among the arguments may be put between all of them."""
    size = budget.weigh(value).characters
    spend_on_pattern(budget, size)
    budget.copy(size * budget.weigh((*args, *named.values())).characters)
    return value


def _compare(budget: Budget, value: Any, *args: Any, **named: Any) -> Any:
    for each in (*args, *named.values()):
        budget.measured(each)
    return budget.measured(value)


def _contain(budget: Budget, value: Any, seq: Any) -> Any:
    budget.searched(seq)
    return budget.measured(value)


def _remain(budget: Budget, value: Any, num: Any = 2) -> Any:
    spend_on_modulo(budget, value, num)
    return value


_SPENDS: Mapping[str, Spend] = {
    **dict.fromkeys(("float", "int"), _convert),
    **dict.fromkeys(("list", "map", "reject", "rejectattr", "reverse"), _walk),
    **dict.fromkeys(("select", "selectattr"), _walk),
    **dict.fromkeys(("groupby", "max", "min", "sort", "unique"), _sort),
    **dict.fromkeys(("batch", "slice"), _divide),
    **dict.fromkeys(("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr"), _cut),
    "dictsort": _sort_items,
    "format": _format,
    "indent": _indent,
    "join": _join,
    "replace": _replace,
    "round": _round,
    "sum": _sum,
    "trim": _trim,
}
_TEST_SPENDS: Mapping[str, Spend] = {
    **dict.fromkeys(("divisibleby", "even", "odd"), _remain),
    "in": _contain,
}
