"""A budget changes no text: what jinja2 and transformers render is what is rendered."""

import json

import pytest

from paceline.text.chat_template import ChatTemplate

MESSAGES = [{"role": "user", "content": "x"}]
PLAIN = [
    (
        "{{ [3, 1, 2] | sort | join(', ') }} {{ {'b': 1, 'a': 2} | dictsort }}",
        "1, 2, 3 [('a', 2), ('b', 1)]",
    ),
    ("{{ 'a' + 'b' + 1 | string + 'c' }}{{ [1] + [2] }}{{ 1 + 2 }}", "ab1c[1, 2]3"),
    (
        "{{ '<a>' | safe + '<b>' }}|{{ '<a>' | e }}|{{ '%s' | safe % '<' }}",
        "<a>&lt;b&gt;|&lt;a&gt;|&lt;",
    ),
    ("{{ '{} {x!r:>5} {{}}'.format(1, x='a') }}{{ '%5.1f%%' % 2.25 }}", "1   'a' {}  2.2%"),
    ("{{ '{a}'.format_map({'a': 2}) }}{{ ('{}' | safe).format('<') }}", "2&lt;"),
    (
        "{{ none | map('upper') | list }}{{ missing | join }}{{ [] | sum }}{{ 'ab' | list }}",
        "[]0['a', 'b']",
    ),
    ("{% for c in 'abc' %}{{ loop.index }}/{{ loop.length }}{{ c }}{% endfor %}", "1/3a2/3b3/3c"),
    ("{% for i in range(6) if i is odd %}{{ i }}{{ '.' if loop.last }}{% endfor %}", "135."),
    (
        "{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "123",
    ),
    (
        "{% macro f(a, b='x') %}{{ a }}{{ b }}{{ caller() }}{% endmacro %}"
        "{% call f(1) %}c{% endcall %}",
        "1xc",
    ),
    (
        "{{ 'a,b'.split(',') }}{{ 'a'.replace('a', 'b') }}{{ ','.join(['x', 'y']) }}",
        "['a', 'b']bx,y",
    ),
    ("{{ (messages | selectattr('role', 'eq', 'user') | list)[0].content }}", "x"),
    (
        "{{ messages[0] | tojson(indent=1) }}{{ {'b': 1, 'a': 'é'} | tojson(sort_keys=true) }}",
        '{\n "role": "user",\n "content": "x"\n}{"a": "é", "b": 1}',
    ),
    (
        "{{ {'items': 1}.items() | list }}{{ {'items': 1}['items'] }}{{ messages[0].role }}",
        "[('items', 1)]1user",
    ),
    (
        "{% set ns = namespace(n=0) %}{% for i in range(5) %}{% set ns.n = ns.n + i %}{% endfor %}"
        "{{ ns.n }}",
        "10",
    ),
    ("{% autoescape false %}{{ '<' }}{% endautoescape %}{{ 7 // 2 }}{{ 7 % 4 }}{{ -2 }}", "<33-2"),
]


@pytest.mark.parametrize(("source", "text"), PLAIN)
def test_plain_templates_say_what_they_said(source, text):
    assert ChatTemplate(source).render(MESSAGES, {}) == text


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": f"tool{index}",
            "parameters": {"type": "object", "properties": {"a": {"enum": ["é", 1, None, True]}}},
        },
    }
    for index in range(20)
]
LONG_TEMPLATE = """{%- macro said(content) -%}
{%- if content is string %}{{ content | trim }}{% else %}{% for part in content %}{{ part.text }}{% endfor %}{% endif -%}
{%- endmacro -%}
{%- for tool in tools %}{{ tool | tojson(indent=4) }}{{ tool.function.parameters | tojson }}{% endfor -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{%- if m.role == 'assistant' and m.tool_calls -%}
{%- set later = namespace(answered=false) -%}
{%- for other in messages[loop.index:] if other.role == 'assistant' and not other.tool_calls -%}
{%- set later.answered = true -%}
{%- endfor -%}
{%- for call in m.tool_calls %}<call>{{ call.function.name ~ (call.function.arguments | tojson) }}{% endfor -%}
{{ '+' if later.answered }}
{%- else -%}
{{ '<' + m.role + '>' + said(m.content).split('</think>')[-1].lstrip('\\n') + ('' if loop.index0 > ns.last else '!') }}
{%- endif -%}
{%- endfor %}"""  # noqa: E501


def conversation(turns):
    said = []
    for index in range(turns):
        call = {"function": {"name": "tool1", "arguments": {"a": index, "b": ["é"] * 5}}}
        said += [
            {"role": "user", "content": f"question {index} " + "word " * 80},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": [{"type": "text", "text": json.dumps({"n": index})}]},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nanswer " + "text " * 80},
        ]
    return said


def test_a_long_conversation_with_tools_is_what_transformers_renders():
    """A thousand messages, each of whose calls scans all that follow, at a tenth of the budget."""
    from transformers.utils.chat_template_utils import render_jinja_template

    said = conversation(250)
    found = ChatTemplate(LONG_TEMPLATE).render(said, {"tools": TOOLS})
    wanted, _ = render_jinja_template([said], tools=TOOLS, chat_template=LONG_TEMPLATE)
    assert found == wanted[0]
