"""Budget: what one rendering of a chat template may spend.

A step is what a template does in a microsecond or two: a call, an operator, a turn of a
loop, 64 characters read or 256 copied.  Whoever works for a template spends before it works, in
proportion to the work, so a rendering ends after as many steps, whatever the template says.
"""

from collections.abc import ItemsView, Iterable, Iterator, KeysView, Mapping, Sized, ValuesView
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from jinja2.runtime import LoopContext
from jinja2.utils import Namespace

STEPS = 200_000  # of a rendering, and for each part of its input:
STEPS_A_VALUE = 1_500  # a message is some three values; templates scan all of them for each
STEPS_A_CHARACTER = 2
CHARACTERS = 1_000_000  # of the text, and for each part of the input:
CHARACTERS_A_VALUE = 4_000  # what stands around a message, the indents of a schema
CHARACTERS_A_CHARACTER = 16  # escapes, and a text that is said twice
MAX_DEPTH = 400  # levels of a value; what reads it recurses, some of it in C
MAX_BITS = 20_000  # of an integer
_MAX_COUNTED = 100_000  # values of an input: more do not raise its budget

_HELD_AT_ONCE = 1_000  # values looked at before they are paid for

_PLAIN = frozenset({int, float, bool, type(None), complex})
_SEQUENCES = (list, tuple, AbstractSet, KeysView, ValuesView, ItemsView)


class OverBudget(Exception):
    """A template did more than its budget allows; the text says what."""


class ValueSize(NamedTuple):
    """How large a value is.  What it holds twice counts twice."""

    values: int
    characters: int  # about as many as it is written in
    depth: int


class Budget:
    """Counts the steps of one rendering.  Its methods raise OverBudget once they are spent."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        """variables: what the template is given.  How much that is, is looked up when it counts."""
        self._variables = variables
        self._granted = self._left = STEPS

    def spend(self, steps: int) -> None:
        self._left -= steps
        if self._left < 0:
            self._ask()

    def _ask(self) -> None:
        values, characters = _size(self._variables)
        worth = STEPS + values * STEPS_A_VALUE + characters * STEPS_A_CHARACTER
        self._left += worth - self._granted
        self._granted = worth
        if self._left < 0:
            raise OverBudget(f"no end of it within {worth} steps")

    def check_text(self, text: str) -> None:
        """Raises OverBudget for more than the input is worth."""
        if len(text) > CHARACTERS:
            values, characters = _size(self._variables)
            worth = CHARACTERS + values * CHARACTERS_A_VALUE + characters * CHARACTERS_A_CHARACTER
            if len(text) > worth:
                raise OverBudget(f"more than {worth} characters")

    def copy(self, size: int) -> None:
        """Spend for writing so many characters."""
        if size > 255:
            self.spend(size >> 8)

    def made(self, value: Any) -> None:
        """Spend for what an operation that reads its operands once brought."""
        if isinstance(value, str):
            if len(value) > 63:
                self.spend(len(value) >> 6)
        elif isinstance(value, list | tuple | dict | set):
            self.copy(len(value) << 5)
        elif type(value) is int and value.bit_length() > MAX_BITS:
            raise OverBudget(f"an integer of more than {MAX_BITS} bits")

    def turns(self, values: Iterable[Any], steps: int = 1) -> Iterator[Any]:
        """The same values, each for so many steps."""
        for value in values:
            self.spend(steps)
            yield value

    def counted(self, values: Any, steps: int = 1) -> Any:
        """`values`, or what yields the same, with so many steps spent on each of them."""
        if not values:
            return values
        if not isinstance(values, Sized):
            return self.turns(values, steps)
        self.spend(len(values) * steps)
        return values

    def weigh(self, value: Any) -> ValueSize:
        """For what reads all of a value.  Spends level by level, before it looks."""
        if type(value) is str:
            self.spend(1 + (len(value) >> 6))
            return ValueSize(1, 4 + len(value), 1)
        level: list[Any] = [value]
        values = characters = depth = 0
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise OverBudget(f"values nested more than {MAX_DEPTH} deep")
            inner: list[Any] = []
            read = held = 0
            for each in level:
                kind = type(each)
                if kind is str:
                    read += len(each)
                elif kind is dict or kind is list:
                    held += len(each)
                    if held > _HELD_AT_ONCE:
                        self.spend(held)
                        held = 0
                    inner += each
                    if kind is dict:
                        inner += each.values()
                elif kind not in _PLAIN:
                    read += self._open(each, inner)
            self.spend(len(level) + held + (read >> 6))
            values += len(level)
            characters += read
            level = inner
        return ValueSize(values, characters + 4 * values, depth)

    def _open(self, value: Any, inner: list[Any]) -> int:
        """Add what a value holds to `inner`; the length of one that is a text."""
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, Mapping):
            self.spend(len(value))
            inner.extend(value.keys())
            inner.extend(value.values())
        elif isinstance(value, _SEQUENCES):
            self.spend(len(value))
            inner.extend(value)
        return len(value) if isinstance(value, str | bytes | bytearray) else 0

    # What compiled templates call (template_code.py).

    def text(self, value: Any) -> str:
        """`str(value)`."""
        if type(value) is not str:
            if type(value) not in _PLAIN:
                self.weigh(value)
            value = str(value)
        if len(value) > 255:
            self.spend(len(value) >> 8)
        return value  # type: ignore[no-any-return]

    def linked(self, values: Iterable[Any]) -> str:
        """The texts of all values, one behind the other."""
        text = "".join([each if type(each) is str else self.text(each) for each in values])
        if len(text) > 255:
            self.spend(len(text) >> 8)
        return text

    def measured(self, value: Any) -> Any:
        """`value`, which is about to be hashed, compared or read."""
        if type(value) is str:
            if len(value) > 255:
                self.spend(len(value) >> 8)
        elif type(value) not in _PLAIN:
            self.weigh(value)
        return value

    def searched(self, values: Any) -> Any:
        """`values`, in which something is about to be found; a mapping finds it at once."""
        if type(values) is dict:
            return values
        if isinstance(values, str):
            self.copy(len(values))
        elif isinstance(values, LoopContext | range):
            self.spend(len(values))
        elif not isinstance(values, Mapping):
            self.weigh(values)
        return values

    def copied(self, value: Any) -> Any:
        """`value`, which was put together of others or cut from one."""
        if isinstance(value, str):
            if len(value) > 255:
                self.spend(len(value) >> 8)
        elif type(value) not in _PLAIN and isinstance(value, Sized):
            self.copy(len(value) << 2)
        return value


def _size(variables: Mapping[str, Any]) -> tuple[int, int]:
    """(values, characters) of a template's input, up to _MAX_COUNTED values."""
    values = characters = 0
    waiting: list[Any] = list(variables.values())
    while waiting and values < _MAX_COUNTED:
        value = waiting.pop()
        values += 1
        if isinstance(value, str):
            characters += len(value)
        elif isinstance(value, Mapping):
            waiting.extend(value.values())
        elif isinstance(value, _SEQUENCES):
            waiting.extend(value)
    return values, characters
