"""No template works longer than its budget; what one operation could do alone is paid first."""

import time
import tracemalloc

import pytest

from paceline.core.errors import RequestError
from paceline.text.chat_template import ChatTemplate
from paceline.text.template_budget import STEPS, Budget, OverBudget
from paceline.text.template_sandbox import MAX_BOUND

MESSAGES = [{"role": "user", "content": "x"}]
MANY = "{% set r = range(99999) | list %}"
TWICE = (
    "{% set n = namespace(a=(1,), b=(1,), c=[1]) %}{% for i in range(60) %}"
    "{% set n.a = (n.a, n.a) %}{% set n.b = (n.b, n.b) %}{% set n.c = [n.c, n.c] %}{% endfor %}"
)
DEEP = "{% set n = namespace(a=(1,)) %}{% for i in range(2000) %}{% set n.a = (n.a,) %}{% endfor %}"
GROWING = "{% set n = namespace(x='a', y=[1]) %}{% for i in range(70) %}"
REFUSALS = (
    "no end of it within",
    "its refusal: a format whose width is an argument",
    "its refusal: a precision beyond 1000",
    "its refusal: a product of more than 20000 bits",
    "its refusal: RecursionError",
    "an integer of more than 20000 bits",
    "its refusal: encode is not served",
    "its refusal: to_bytes is not served",
    "its refusal: fromkeys is not served",
    f"its refusal: a range beyond {MAX_BOUND}",
    "its refusal: 'lipsum' is undefined",
    "values nested more than 400 deep",
)


def refusal(source):
    """What is told of a rendering that is refused, within the time of its steps."""
    template = ChatTemplate(source)
    started = time.thread_time()
    with pytest.raises(RequestError) as refused:
        template.render(MESSAGES, {})
    assert time.thread_time() - started < 20.0  # 0.3 on a slow machine, without tracemalloc
    text = str(refused.value)
    assert text.startswith("messages must be what the model's chat template accepts, got ")
    return text.split(", got ", 1)[1]


@pytest.mark.parametrize(
    "body",
    [
        "{% for j in r %}{% endfor %}",
        "{% for j in r recursive %}{% endfor %}",
        "{% for j in range(99999) if j < 0 %}{% endfor %}",
        "{% for j in r %}{% if 1.5 in loop %}{% endif %}{% break %}{% endfor %}",
        "{% set x = r[1:] %}",
        "{% set x = r + r %}",
        "{% set x = r == (r | list) %}",
        "{% if -1 in r %}{% endif %}",
        "{% if i + 0.5 is in(r) %}{% endif %}",
        "{{ r }}",
        "{{ r ~ r }}",
        "{{ '%s' % (r,) }}",
        "{{ '{}'.format(r) }}",
        "{{ ('{}' | safe).format(r) }}",
        "{{ r.index(99998) }}",
        "{{ r.count(-1) }}",
        "{{ cycler(*r) }}",
        "{{ loop.cycle(*r) }}",
        "{{ loop.changed(r | list) }}",
        "{{ {}.fromkeys(r) | length }}",
        "{{ {}.fromkeys(range(99999)) | length }}",
        "{{ {1: 2}.keys() - r }}",
        "{{ {1: 2}.keys().isdisjoint(r) }}",
        "{{ r | select('lt', 0) | first }}",
        "{{ r | map('string') | join | length }}",
        "{{ r | map(attribute='real') | list | length }}",
        *(
            f"{{{{ r | {name} }}}}"
            for name in ["sum", "min", "max", "string", "pprint", "tojson", "sort"]
        ),
        *(f"{{{{ r | {name} | list | length }}}}" for name in ["unique", "batch(3)", "slice(3)"]),
        "{{ r | groupby('real') | length }}",
        "{{ r | reverse | list | length }}",
    ],
)
def test_long_lists_in_a_loop_end(body):
    assert refusal(MANY + "{% for i in r %}" + body + "{% endfor %}").startswith(REFUSALS)


@pytest.mark.parametrize(
    "source",
    [
        "{{ [1] | batch(10 ** 9, 1) | list }}",
        "{{ [] | slice(10 ** 9) | list }}",
        "{{ 'x' | center(10 ** 9) }}",
        "{{ ['x'] | map('center', 10 ** 9) | list }}",
        "{% filter center(10 ** 9) %}x{% endfilter %}",
        *(f"{{{{ 'x'.{name}(10 ** 9) }}}}" for name in ["center", "ljust", "rjust", "zfill"]),
        "{{ '\\t'.expandtabs(10 ** 9) }}",
        "{{ '\\t'.expandtabs(tabsize=10 ** 9) }}",
        "{{ 'x' | indent(10 ** 9) }}",
        "{{ ('x\\n' * 100000) | indent('y' * 100000) }}",
        "{{ messages | tojson(indent=10 ** 9) }}",
        "{{ range(999) | list | tojson(separators=['x' * 999999, 'y']) }}",
        "{{ ('a' * 999999) | replace('', 'b' * 999999) }}",
        "{{ ('a' * 999999).replace('a', 'b' * 999999) }}",
        "{{ ('a' * 999999).translate({97: 'b' * 999999}) }}",
        "{{ (['a' * 999999] * 999999) | join | length }}",
        "{{ ''.join(['a' * 999999] * 99999) | length }}",
        "{{ range(99999) | join('a' * 999999) }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '%1000000000d' | format(1) }}",
        "{{ '%1000000000d' is odd }}",
        "{{ '%1000000000d' is divisibleby(3) }}",
        "{{ '%.1000000000f' % 1 }}",
        "{{ '%*d' % (10 ** 9, 1) }}",
        "{{ '%.*f' % (10 ** 9, 1) }}",
        "{{ ('%(a)s' * 99999) % {'a': 'x' * 999999} }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ '{:{}}'.format(1, 10 ** 9) }}",
        "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
        "{{ ('{:1000000000}' | safe).format(1) }}",
        "{{ ('{0}' * 99999).format('x' * 999999) }}",
        "{{ (1).to_bytes(10 ** 9, 'big') }}",
        "{{ ('ü' * 999999).encode('punycode') }}",
        "{{ lipsum(n=10 ** 9) }}",
        "{{ 1.5 | round(10 ** 9, 'ceil') }}",
        "{{ 5 | round(-10 ** 9) }}",
        "{{ ('x' * 999999) | wordwrap(1) }}",
        "{{ ('x y ' * 9999) | wordwrap(1, wrapstring='z' * 999999) }}",
        "{{ ('<!---->' * 99999) | striptags }}",
        "{{ (('<!---->' * 99999) | safe).striptags() }}",
        "{{ ('http://a.b ' * 9999) | urlize(rel='z' * 999999) }}",
        "{{ (['a'] * 9999) | map(attribute='0.' * 400000 ~ '0') | list }}",
        "{{ ([[]] * 99999) | sum(start=[]) }}",
        "{{ ('f' * 999999) | int(0, 16) }}",
        "{% set a = [[[1] * 999] * 999] * 99999 %}{{ a }}",
        GROWING + "{% set n.x = n.x + n.x %}{% endfor %}",
        GROWING + "{% set n.x = n.x ~ n.x %}{% endfor %}",
        GROWING + "{% set n.y = n.y + n.y %}{% endfor %}",
        GROWING + "{% set n.x = [n.x, n.x] | join %}{% endfor %}",
        GROWING + "{% set n.x = '%s%s' % (n.x, n.x) %}{% endfor %}",
        "{% set s = 'b' * 400000 %}{{ s.strip('a' * 400000 ~ 'b') | length }}",
        "{% set s = 'b' * 400000 %}{{ s | trim('a' * 400000 ~ 'b') | length }}",
        "{% set s = 'a' * 400000 %}{{ s.rfind('ab' ~ 'a' * 200000) }}",
        "{% set s = 'a' * 400000 %}{{ s.rsplit('ab' ~ 'a' * 200000) | length }}",
        "{% set p = 2**61 - 1 %}{{ dict.fromkeys(range(0, p * 15000, p)) | length }}",
        "{% set p = 2**61 - 1 %}{{ range(0, p * 15000, p) | unique | list | length }}",
        GROWING + "{% set n.x = '{0}{0}'.format(n.x) %}{% endfor %}",
        GROWING + "{% set n.x = n.x | replace('a', 'aa') %}{% endfor %}",
        GROWING + "{% set n.x = n.x | tojson | tojson | tojson %}{% endfor %}",
        GROWING + "{% set y %}{{ n.x }}{{ n.x }}{% endset %}{% set n.x = y %}{% endfor %}",
        GROWING + "{% set n.z = (n.z or 9) * (n.z or 9) %}{% endfor %}",
        "{% macro f(n) %}{{ f(n - 1) if n }}{{ f(n - 1) if n }}{% endmacro %}{{ f(30) }}",
        "{% macro f() %}{{ caller() }}{{ caller() }}{% endmacro %}"
        "{% macro g(n) %}{% call f() %}{{ g(n - 1) if n }}{% endcall %}{% endmacro %}{{ g(60) }}",
        "{% for x in [1] recursive %}{{ loop([1, 1]) }}{{ loop([1, 1]) }}{% endfor %}",
        "{% block b %}{{ self.b() }}{% endblock %}",
        "{% block b %}"
        + "x" * 9999
        + "{% endblock %}"
        + MANY
        + "{% for i in r %}{{ self.b() }}{% endfor %}",
        "{% macro f() %}"
        + "x" * 9999
        + "{% endmacro %}"
        + MANY
        + "{% for i in r %}{{ f() }}{% endfor %}",
    ],
)
def test_little_does_not_become_much(source):
    tracemalloc.start()
    try:
        assert refusal(source).startswith(REFUSALS)
        assert tracemalloc.get_traced_memory()[1] < 200e6
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("value", ["n.a", "n.c"])
@pytest.mark.parametrize(
    "source",
    [
        *(
            f"{{{{ VALUE | {name} }}}}"
            for name in ["string", "tojson", "pprint", "upper", "trim", "e", "safe"]
        ),
        *(
            f"{{{{ VALUE | {name} }}}}"
            for name in ["title", "urlencode", "wordcount", "replace(1, 2)"]
        ),
        "{{ VALUE }}",
        "{{ VALUE ~ 1 }}",
        "{{ [VALUE] | join }}",
        "{{ '%s' % (VALUE,) }}",
        "{{ '{}'.format(VALUE) }}",
        "{{ '{!r}'.format(VALUE) }}",
        "{{ 'x' | replace(VALUE, 2) }}",
        "{{ [VALUE] | map('upper') | list }}",
        "{{ {VALUE: 1} }}",
        "{{ {}[VALUE] }}",
        "{{ [][VALUE] }}",
        "{{ {}.get(VALUE) }}",
        "{{ VALUE in {} }}",
        "{{ [].index(VALUE) }}",
        "{{ [VALUE] | unique | list }}",
        "{{ [VALUE, 1] | sort }}",
        "{{ dict([(VALUE, 1)]) }}",
        "{{ VALUE is upper }}",
        "{{ VALUE is test }}",
        "{{ n }}",
        "{{ {'a': VALUE}.values() }}",
        "{{ raise_exception(VALUE) }}",
    ],
)
def test_what_holds_itself_twice_is_weighed_twice(source, value):
    source = source.replace("VALUE", value)
    assert refusal(TWICE + source).startswith("no end of it within")


@pytest.mark.parametrize(
    "source",
    ["{{ n.a == n.b }}", "{{ n.a in [n.b] }}", "{{ [n.a].count(n.b) }}", "{{ n.a is eq(n.b) }}"],
)
def test_twins_are_not_compared_forever(source):
    assert refusal(TWICE + source).startswith("no end of it within")


@pytest.mark.parametrize("source", ["{{ {n.a: 1} }}", "{{ n.a in {} }}", "{{ n.a }}"])
def test_deep_values_do_not_end_the_process(source):
    assert refusal(DEEP + source).startswith("values nested more than 400 deep")


def test_the_budget_grows_with_what_is_given():
    source = "{% for i in range(90000) %}{% endfor %}{{ messages | length }}"
    many = [{"role": "user", "content": "x"}] * 50
    source = source * 3
    assert refusal(source).startswith("no end of it within 206010 steps")
    assert ChatTemplate(source).render(many, {}) == "505050"


def test_a_text_far_longer_than_its_messages_is_refused():
    source = "{% set x = 'x' * 999999 %}{{ x }}{{ x }}"
    assert refusal(source).startswith("more than 1016080 characters")
    assert len(ChatTemplate("{{ 'x' * 999999 }}").render(MESSAGES, {})) == 999_999


def test_a_budget_says_what_it_was():
    budget = Budget({})
    budget.spend(STEPS)
    with pytest.raises(OverBudget, match=f"no end of it within {STEPS} steps"):
        budget.spend(1)
