"""Chat templates are other people's programs: they end, they reach nothing, they fail in words."""

import ctypes
import gc
import subprocess
import sys
import threading

import pytest

from paceline.core.errors import RequestError
from paceline.engine.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]


def refusal(source, *, limit_s=5.0):
    with pytest.raises(RequestError) as refused:
        ChatTemplate(source, limit_s=limit_s).render(MESSAGES, {})
    return str(refused.value)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ ''.__class__.__mro__ }}", "access to attribute '__class__' of 'str' object is unsafe"),
        ("{{ cycler.__init__.__globals__ }}", "access to attribute '__init__'"),
        ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
        ("{{ messages[0].update(a=1) }}", "access to attribute 'update' of 'dict' object"),
        ("{{ ('%s' | attr('format'))('{0.__class__}') }}{{ 1 / 0 }}", "division by zero"),
        ("{{ raise_exception('roles must alternate') }}", "its refusal: roles must alternate;"),
        ("{{ 1 / 0 }}", "ZeroDivisionError('division by zero')"),
        ("{{ messages[0].missing.deeper }}", "'dict object' has no attribute 'missing'"),
        ("{{ messages + 1 }}", "TypeError("),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError("),
        ("{{ range(10 ** 9) }}", "OverflowError("),
        ("{{ 'ab' * 10 ** 7 }}", "a product of more than 1000000 characters or items"),
        ("{{ 10 ** 7 * [1] }}", "a product of more than 1000000 characters or items"),
        ("{{ 2 ** (10 ** 9) }}", "a power of numbers beyond 1000"),
    ],
)
def test_a_hostile_template_is_refused_in_words(source, told):
    text = refusal(source)
    assert text.startswith("messages must be what the model's chat template accepts, got its ref")
    assert told in text


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ messages | attr('__class__') }}",
        "{{ messages | map(attribute='__class__') | join }}",
        "{{ lipsum.__globals__ }}",
        "{{ self._TemplateReference__context }}",
        "{{ '{0.__class__}'.format(1) }}",
    ],
)
def test_what_is_hidden_is_empty(source):
    assert ChatTemplate(source).render(MESSAGES, {}) == ""


def test_small_products_and_powers_are_arithmetic():
    assert ChatTemplate("{{ 3 * 4 }} {{ '-' * 3 }} {{ 2 ** 10 }}").render([], {}) == "12 --- 1024"


@pytest.mark.parametrize(
    "body",
    ["", "{% for k in range(99999) if k < 0 %}{% endfor %}", "{% if r | sum < 0 %}{% endif %}"],
)
def test_an_endless_template_is_interrupted(body):
    loops = "{% for i in r %}{% for j in r %}" + body + "{% endfor %}{% endfor %}"
    text = refusal("{% set r = range(99999) | list %}" + loops, limit_s=0.2)
    assert "got no end of it within 0.2 s; check roles" in text


def test_an_interrupted_thread_goes_on():
    """A limit that passes just as its block ends reaches nobody: neither code behind nor others."""
    template = ChatTemplate("{% for i in range(3000) %}{{ i }}{% endfor %}", limit_s=0.0008)
    ends = {True: 0, False: 0}
    gc.disable()  # Python warns of what is raised in a callback of the collector
    try:
        for _ in range(300):
            try:
                ends[len(template.render([], {})) > 3000] += 1
            except RequestError:
                ends[False] += 1
    finally:
        gc.enable()
    assert sum(ends.values()) == 300
    assert ChatTemplate("{{ messages[0].content }}").render(MESSAGES, {}) == "x"


def test_a_template_that_ends_in_time_asks_the_interpreter_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
):
    """Even to take back what was never asked for raises a flag that nobody lowers."""
    asked: list[object] = []
    monkeypatch.setattr(
        ctypes.pythonapi, "PyThreadState_SetAsyncExc", lambda *given: asked.append(given)
    )
    ChatTemplate("x", limit_s=3600.0).render([], {})
    assert asked == []


@pytest.mark.parametrize("limit_s", [3600.0, 0.0008], ids=["in-time", "interrupted"])
def test_a_tracer_goes_on_behind_templates(limit_s: float):
    """Python 3.11 never does where a flag for asynchronous exceptions was left up."""
    source = f"""
import gc, sys
from paceline.core.errors import RequestError
from paceline.engine.chat_template import ChatTemplate
gc.disable()
template = ChatTemplate("{{% for i in range(3000) %}}{{{{ i }}}}{{% endfor %}}", limit_s={limit_s})
for _ in range(100):
    try:
        template.render([], {{}})
    except RequestError:
        pass
def trace(frame, event, argument):
    frame.f_trace_opcodes = True
    return trace
sys.settrace(trace)
(lambda: sum([1, 2]))()
sys.settrace(None)
"""
    subprocess.run([sys.executable, "-c", source], check=True, timeout=300)


def test_no_timer_is_left_behind():
    before = set(threading.enumerate())
    for _ in range(20):
        ChatTemplate("x", limit_s=3600.0).render([], {})
    for timer in set(threading.enumerate()) - before:
        timer.join()  # none waits for its hour
