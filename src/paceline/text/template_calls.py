"""What calls and operators of a chat template cost, told before they are done.

A method of a text or a list runs in C, where nobody can stop it: what it will read and write is
computed from its operands.
"""

import re
from collections.abc import Mapping, Sized
from types import BuiltinMethodType
from typing import Any

from jinja2 import Environment, TemplateError
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from paceline.text.template_budget import MAX_BITS, Budget

MAX_REPEATED = 1_000_000  # characters or items of a product
MAX_POWER = 1_000  # base and exponent

_DIGITS = re.compile(r"[0-9]+")
_WIDTH_OF_AN_ARGUMENT = re.compile(r"%[-#0 +0-9]*\.?\*")
_OF_THE_LOOP = frozenset({"_loop_vars", "_block_vars"})  # jinja2 passes them to every call
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_EASY = frozenset({"endswith", "lstrip", "rstrip", "split", "startswith", "strip"})
_CHEAP = frozenset({"get", "items", "keys", "values"})
_BACKWARDS = frozenset({"rfind", "rindex", "rpartition", "rsplit"})
# Nobody needs bytes, slow codecs, or many keys at once, whose hashes may all be one.
_UNSERVED = frozenset({"encode", "fromkeys", "to_bytes", "from_bytes"})
_TEMPLATES_OWN = (Macro, LoopContext, BlockReference)  # their functions spend for themselves


def format_text(
    environment: Environment,
    budget: Budget,
    method: Any,
    args: tuple[Any, ...],
    named: Mapping[str, Any],
) -> str:
    """What `format` or `format_map` of a text returns.  Raises TypeError for other arguments."""
    text: str = method.__self__
    named = {name: each for name, each in named.items() if name not in _OF_THE_LOOP}
    if method.__name__ == "format_map":
        if named or len(args) != 1:
            raise TypeError(f"format_map() takes exactly one argument ({len(args)} given)")
        [named] = args
        args = ()
    budget.spend(len(text) >> 2)
    formatter: SandboxedFormatter
    if isinstance(text, Markup):
        formatter = _EscapingFormatter(environment, budget, escape=text.escape)
    else:
        formatter = _Formatter(environment, budget)
    return type(text)(formatter.vformat(text, args, named))


class _Formatter(SandboxedFormatter):
    def __init__(self, environment: Environment, budget: Budget, **more: Any) -> None:
        super().__init__(environment, **more)
        self._budget = budget

    def convert_field(self, value: Any, conversion: Any) -> Any:
        self._budget.measured(value)
        return super().convert_field(value, conversion)

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._budget.spend(4)
        self._budget.measured(value)
        self._budget.copy(_numbers(format_spec))
        return super().format_field(value, format_spec)


class _EscapingFormatter(_Formatter, SandboxedEscapeFormatter):
    """Of markup, whose fields are escaped."""


def spend_on_call(
    budget: Budget, called: Any, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Spend for a call of what is written in Python, and return the arguments to do it with."""
    if len(args) + len(named) > 15:
        budget.spend(len(args) + len(named))
    if isinstance(called, _TEMPLATES_OWN):
        return args
    for each in args:
        budget.measured(each)
    for name in named.keys() - _OF_THE_LOOP:
        budget.measured(named[name])
    owner = getattr(called, "__self__", None)
    if isinstance(owner, str):  # markup
        return _spend_on_text(budget, owner, called.__name__, args, named)
    return args


def spend_on_builtin(
    budget: Budget, method: BuiltinMethodType, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Spend for a method of a builtin type, and return the arguments to call it with.

    Raises TemplateError for one that is not served.
    """
    if len(args) + len(named) > 15:
        budget.spend(len(args) + len(named))
    for each in (*args, *named.values()) if named else args:
        budget.measured(each)
    owner, name = method.__self__, method.__name__
    if type(owner) is str:
        return _spend_on_text(budget, owner, name, args, named)
    if name in _UNSERVED or isinstance(owner, bytes | bytearray):
        raise TemplateError(f"{name} is not served")
    if name not in _CHEAP:
        if any(isinstance(each, Sized) and not isinstance(each, str) for each in args):
            budget.weigh(owner)  # to find one in it they are compared
        elif isinstance(owner, list | tuple):
            budget.copy(len(owner) << 5)
    return args


def _spend_on_text(
    budget: Budget, text: str, name: str, args: tuple[Any, ...], named: Mapping[str, Any]
) -> tuple[Any, ...]:
    if len(text) > 63:
        budget.spend(len(text) >> 6)
    if name in _EASY:
        if args:
            spend_on_pairs(budget, text, args[0])
        return args
    if name in _BACKWARDS and args:
        spend_on_pairs(budget, text, args[0])
    if name in _UNSERVED:
        raise TemplateError(f"{name} is not served")
    if name in _PADDING:
        budget.copy(_largest(args))
    elif name == "expandtabs":
        budget.copy(text.count("\t") * _largest((*args, named.get("tabsize", 0), 8)))
    elif name == "striptags":
        spend_on_pattern(budget, len(text))
    elif name == "replace" and len(args) > 1:
        spend_on_replace(budget, text, *args[:3])
    elif name == "translate" and args:
        table = args[0].values() if isinstance(args[0], Mapping) else args[0]
        longest = max((len(each) for each in table if isinstance(each, str)), default=1)
        budget.copy(len(text) * longest)
    elif name == "join" and args:
        pieces = list(budget.counted(args[0]))
        spend_on_join(budget, text, pieces)
        return (pieces, *args[1:])
    return args


def spend_on_pairs(budget: Budget, text: str, other: object) -> None:
    """For what looks, at worst, at each character of a text with each of another."""
    if isinstance(other, str):
        budget.spend((len(text) * len(other)) >> 10)


def spend_on_replace(
    budget: Budget, text: str, old: object, new: object, count: object = None
) -> None:
    old, new = budget.text(old), budget.text(new)
    budget.copy(len(text) << 2)
    found = text.count(old)
    if isinstance(count, int) and 0 <= count < found:
        found = count
    budget.copy(found * len(new))


def spend_on_join(budget: Budget, text: str, pieces: list[Any]) -> None:
    budget.copy(budget.weigh(pieces).characters + len(pieces) * len(text))


def spend_on_pattern(budget: Budget, size: int) -> None:
    """For what cuts a text up in Python, at worst copying the rest of it for each piece."""
    budget.spend((size >> 3) + (size >> 6) ** 2)


def spend_on_operator(budget: Budget, operator: str, left: Any, right: Any) -> None:
    """Spend for an operator with its operands, before it is applied.

    Raises TemplateError for what makes much of little.
    """
    if operator == "*":
        _spend_on_product(budget, left, right)
    elif operator == "%":
        spend_on_modulo(budget, left, right)
    elif operator == "-":  # of sets, too
        budget.measured(left)
        budget.measured(right)
    elif operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
        raise TemplateError(f"a power of numbers beyond {MAX_POWER}")


def _spend_on_product(budget: Budget, left: Any, right: Any) -> None:
    for repeated, times in ((left, right), (right, left)):
        if not isinstance(times, int):
            continue
        if isinstance(repeated, int) and repeated.bit_length() + times.bit_length() > MAX_BITS:
            raise TemplateError(f"a product of more than {MAX_BITS} bits")
        if isinstance(repeated, Sized):
            size = len(repeated) * times
            if size > MAX_REPEATED:
                raise TemplateError(f"a product of more than {MAX_REPEATED} characters or items")
            budget.copy(size if isinstance(repeated, str) else size << 4)


def spend_on_modulo(budget: Budget, left: Any, right: Any) -> None:
    """A division's remainder; of a text, a format.  Raises TemplateError."""
    if isinstance(left, bytes | bytearray):
        raise TemplateError("a format of bytes")
    if not isinstance(left, str):
        return
    if _WIDTH_OF_AN_ARGUMENT.search(left):
        raise TemplateError("a format whose width is an argument")
    budget.copy(len(left) << 2)
    times = left.count("%") if isinstance(right, Mapping) else 1
    budget.copy(_numbers(left) + budget.weigh(right).characters * times)


def _numbers(text: str) -> int:
    """The sum of the numbers in a format: no less than its widths and precisions."""
    return sum(int(found[:9]) if len(found) < 10 else 10**9 for found in _DIGITS.findall(text))


def _largest(values: tuple[Any, ...]) -> int:
    return max((abs(each) for each in values if isinstance(each, int)), default=0)
