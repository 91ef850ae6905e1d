"""Chat templates are other people's programs: they end, they reach nothing, they fail in words."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from paceline.core.errors import ConfigError, RequestError
from paceline.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]


def refusal(source):
    with pytest.raises(RequestError) as refused:
        ChatTemplate(source).render(MESSAGES, {})
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
        "{{ joiner.__globals__ }}",
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
def test_an_endless_template_is_refused(body):
    loops = "{% for i in r %}{% for j in r %}" + body + "{% endfor %}{% endfor %}"
    text = refusal("{% set r = range(99999) | list %}" + loops)
    assert "got no end of it within 206010 steps; check roles" in text


def test_the_words_of_a_template_are_cut():
    assert len(refusal("{{ raise_exception('x' * 100000) }}")) < 1_300


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError("),
        ("{{ 1" + "0" * 9000 + " }}", "ValueError("),
        ("{{ 0x1" + "0" * 9000 + " }}", "ValueError("),
        ("{% for i in x %}" * 30 + "{% endfor %}" * 30, "too many statically nested blocks"),
        ("{% autoescape true %}{% endautoescape %}", "line 1: autoescape is for HTML"),
    ],
)
def test_a_template_that_cannot_be_compiled_is_a_fault_of_the_model(source, told):
    with pytest.raises(ConfigError, match="chat template must be a valid Jinja template") as found:
        ChatTemplate(source)
    assert told in str(found.value)


def test_threads_have_budgets_of_their_own():
    endless = ChatTemplate(
        "{% for i in range(99999) %}{% for j in range(9) %}{% endfor %}{% endfor %}"
    )
    short = ChatTemplate("{% for i in range(20000) %}{% endfor %}{{ messages[0].content }}")
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(endless.render, MESSAGES, {}) for _ in range(4)]
        found = [pool.submit(short.render, MESSAGES, {}) for _ in range(8)]
        assert [each.result() for each in found] == ["x"] * 8
        assert all(isinstance(each.exception(), RequestError) for each in refused)
