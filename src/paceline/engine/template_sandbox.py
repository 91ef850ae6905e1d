"""What chat templates run in: a sandbox with the helpers they expect, and a limit on their time.

A template comes with a model, so it is somebody else's program.  It sees what it is given, cannot
reach the interpreter, and is interrupted when it does not end.  A single operation is not
interrupted; those that make much of little (`*`, `**`) are bounded.

Needs jinja2, so it is imported only for a model that brings a template.
"""

import ctypes
import json
import threading
from collections.abc import Sized
from datetime import datetime
from types import TracebackType
from typing import Any, NoReturn

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_REPEATED = 1_000_000  # characters or items of a product
MAX_POWER = 1_000  # base and exponent


class Sandbox(ImmutableSandboxedEnvironment):
    """Templates see data, not the interpreter, and cannot change what they are given."""

    intercepted_binops = frozenset({"*", "**"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """A product or a power; raises TemplateError for one that is huge."""
        if operator == "**" and max(abs(left), abs(right)) > MAX_POWER:
            raise TemplateError(f"a power of numbers beyond {MAX_POWER}")
        for repeated, times in ((left, right), (right, left)):
            if isinstance(repeated, Sized) and len(repeated) * times > MAX_REPEATED:
                raise TemplateError(f"a product of more than {MAX_REPEATED} characters or items")
        return super().call_binop(context, operator, left, right)


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
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class Expired(Exception):
    """A block under a TimeLimit took too long."""


class TimeLimit:
    """Interrupts the Python code of its block, in the thread that entered it, with Expired.

    Another thread asks the interpreter to raise it (PyThreadState_SetAsyncExc): the block costs
    nothing until then.  The lock keeps that from happening once the block has been left.
    """

    def __init__(self, seconds: float) -> None:
        self._thread = ctypes.c_ulong(threading.get_ident())
        self._lock = threading.Lock()
        self._is_over = False
        self._has_fired = False
        self._timer = threading.Timer(seconds, self._interrupt)
        self._timer.daemon = True

    @property
    def has_fired(self) -> bool:
        """Whether the block was interrupted, whatever came out of it then."""
        return self._has_fired

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
            if self._has_fired and kind is not Expired:  # asked for, and perhaps not raised yet
                self._raise_here()

    def _raise_here(self) -> None:
        """Let what was asked for reach nobody else.

        To withdraw it (None for the exception) leaves a flag of the interpreter up for good: every
        loop is a tenth slower, and Python 3.11 does not go on under a tracer.
        """
        try:
            self._ask()
            for _ in range(1_000):  # it is raised where a loop turns
                pass
        except Expired:
            pass

    def _interrupt(self) -> None:
        with self._lock:
            if not self._is_over:
                self._has_fired = True
                self._ask()

    def _ask(self) -> None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(self._thread, ctypes.py_object(Expired))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    *,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(text: str) -> NoReturn:
    raise TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
