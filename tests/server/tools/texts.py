"""What models write, recorded by format, with the message that it is.

The texts are those that the models' published chat templates render for a call in the history; the
templates here are short ones with the same marks.
"""

from typing import NamedTuple

CITY = '{"city": "Paris"}'


class Recorded(NamedTuple):
    """A text, what it says, and how it is to be read."""

    text: str
    content: str | None
    calls: list[tuple[str, str]] = []  # noqa: RUF012  (name, arguments)
    reasoning: str = ""
    tools: str | None = "hermes"
    thinks: str | None = None
    has_begun: bool = False
    types: dict[str, dict[str, str]] = {}  # noqa: RUF012


HERMES = {
    "one": Recorded(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        None,
        [("get_weather", CITY)],
    ),
    "words before two": Recorded(
        'Let me look.\n<tool_call>\n{"name": "a", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "b", "arguments": {"x": {"y": ["}", "\\"{"]}}}\n</tool_call>',
        "Let me look.",
        [("a", "{}"), ("b", '{"x": {"y": ["}", "\\"{"]}}')],
    ),
    "the name behind": Recorded(
        '<tool_call>\n{"arguments": {"city": "Paris"}, "name": "get_weather"}\n</tool_call>',
        None,
        [("get_weather", CITY)],
    ),
    "the last mark is missing": Recorded(
        '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}',
        None,
        [("get_weather", CITY)],
    ),
    "a mark within an argument": Recorded(
        '<tool_call>{"name": "say", "arguments": {"text": "</tool_call> }"}}</tool_call>ok',
        "ok",
        [("say", '{"text": "</tool_call> }"}')],
    ),
    "no call at all": Recorded("a < b, and <tool is none\n", "a < b, and <tool is none\n", []),
    "thought before": Recorded(
        "<think>\nParis, then.\n</think>\n\n<tool_call>\n"
        '{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
        None,
        [("get_weather", CITY)],
        "Paris, then.",
        thinks="think",
    ),
}
THOUGHTS = {
    "empty": Recorded("<think>\n\n</think>\n\nHi.", "Hi.", tools=None, thinks="think"),
    "begun": Recorded(
        "It is 4.\n</think>\n\nFour.", "Four.", [], "It is 4.", None, "think", has_begun=True
    ),
    "begun and cut": Recorded("It is", "", [], "It is", None, "think", has_begun=True),
    "begun, and said again": Recorded(
        "<think>It\n</think>Four.", "Four.", [], "It", None, "think", has_begun=True
    ),
    "none": Recorded("  Four <think>.", "  Four <think>.", tools=None, thinks="think"),
}
MALFORMED = {  # all of it is content
    "no JSON": '<tool_call>\nget_weather("Paris")\n</tool_call>',
    "no object": "<tool_call>[1, 2]</tool_call>",
    "no name": '<tool_call>{"city": "Paris"}</tool_call>',
    "cut in its head": 'So: <tool_call>\n{"name": "get_wea',
    "cut in its arguments": '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Pa',
    "wrong arguments": '<tool_call>{"name": "f", "arguments": {"a": }}</tool_call> then',
    "no arguments but a list": '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
    "more behind": '<tool_call>{"name": "f", "arguments": {}, "x": 1}</tool_call>',
    "another mark behind": '<tool_call>{"name": "f", "arguments": {}}</tool>',
    "no number": '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
    "a number without end": '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
    "half a pair": r'<tool_call>{"name": "f", "arguments": {"x": "\ud800"}}</tool_call>',
    "half a pair, the name behind": (
        r'<tool_call>{"arguments": {"x": "\ud800"}, "name": "f"}</tool_call>'
    ),
    "a name of blanks": '<tool_call>{"name": "a b", "arguments": {}}</tool_call>',
}
LLAMA = {
    "one": Recorded(
        '{"name": "get_weather", "parameters": {"city": "Paris"}}', None, [("get_weather", CITY)]
    ),
    "behind its tag": Recorded(
        '<|python_tag|>{"name": "get_weather", "parameters": {"city": "Paris"}}',
        None,
        [("get_weather", CITY)],
    ),
    "two": Recorded(
        '{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"x": 1}}',
        None,
        [("a", "{}"), ("b", '{"x": 1}')],
    ),
    "arguments as a text": Recorded(
        '{"name": "a", "parameters": "{\\"x\\": 1}"}', None, [("a", '{"x": 1}')]
    ),
    "other JSON": Recorded('{"city": "Paris", "n": [1]}', '{"city": "Paris", "n": [1]}'),
    "words before it": Recorded(
        'So {"name": "a", "parameters": {}}', 'So {"name": "a", "parameters": {}}'
    ),
    "words behind it": Recorded('{"name": "a", "parameters": {}} So', "So", [("a", "{}")]),
    "one and no second": Recorded('{"name": "a", "parameters": {}}; then', "; then", [("a", "{}")]),
}
MISTRAL = {
    "one": Recorded(
        '[TOOL_CALLS] [{"name": "get_weather", "arguments": {"city": "Paris"}}]',
        None,
        [("get_weather", CITY)],
    ),
    "two with ids": Recorded(
        '[TOOL_CALLS][{"name": "a", "arguments": {}, "id": "abcdefghi"}, '
        '{"name": "b", "arguments": {"x": 1}, "id": "abcdefghj"}]',
        None,
        [("a", "{}"), ("b", '{"x": 1}')],
    ),
    "names outside": Recorded(
        'Well.[TOOL_CALLS]a[ARGS]{"x": 1}[TOOL_CALLS]b[CALL_ID]abcdefghi[ARGS]{}',
        "Well.",
        [("a", '{"x": 1}'), ("b", "{}")],
    ),
    "malformed": Recorded("[TOOL_CALLS] get the weather", "[TOOL_CALLS] get the weather"),
    "an empty list": Recorded("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
}
DEEPSEEK = {
    "V3": Recorded(
        "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
        '```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>\n'
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>a\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "I look.",
        [("get_weather", CITY), ("a", "{}")],
    ),
    "V3.1": Recorded(
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Paris"}'
        "<｜tool▁call▁end｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>{}<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        None,
        [("get_weather", CITY), ("function", "{}")],
    ),
    "R1": Recorded(
        "Paris, then.\n</think>\n\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function"
        '<｜tool▁sep｜>get_weather\n```json\n{"city": "Paris"}\n```<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        None,
        [("get_weather", CITY)],
        "Paris, then.",
        thinks="think",
        has_begun=True,
    ),
    "no call": Recorded(
        "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>none<｜tool▁calls▁end｜>",
    ),
    "malformed": Recorded(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f(1)<｜tool▁call▁end｜>",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f(1)<｜tool▁call▁end｜>",
    ),
}
SAY = {"say": {"text": "string", "n": "integer", "x": "number", "on": "boolean", "all": "json"}}
QWEN3_CODER = {
    "one": Recorded(
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
        "</function>\n</tool_call>",
        None,
        [("get_weather", CITY)],
    ),
    "words before two": Recorded(
        "I look.\n\n<tool_call>\n<function=a>\n</function>\n</tool_call>\n"
        '<tool_call>\n<function=say>\n<parameter=text>\n\nA <b>\n"line"\n\n</parameter>\n'
        "<parameter=n>\n2\n</parameter>\n<parameter=x>\n2.0\n</parameter>\n<parameter=on>\n"
        'True\n</parameter>\n<parameter=all>\n{"b": [1, null]}\n</parameter>\n</function>\n'
        "</tool_call>",
        "I look.",
        [
            ("a", "{}"),
            (
                "say",
                '{"text": "\\nA <b>\\n\\"line\\"\\n", "n": 2, "x": 2, "on": true, '
                '"all": {"b": [1, null]}}',
            ),
        ],
        types=SAY,
    ),
    "values of other types": Recorded(
        "<tool_call>\n<function=say>\n<parameter=text>\n12\n</parameter>\n<parameter=n>\ntwo\n"
        "</parameter>\n<parameter=x>\ninf\n</parameter>\n<parameter=on>\nno\n</parameter>\n"
        "<parameter=all>\n{'b': (1, None)}\n</parameter>\n<parameter=more>\n7\n</parameter>\n"
        "</function>\n</tool_call>",
        None,
        [
            (
                "say",
                '{"text": "12", "n": "two", "x": "inf", "on": false, "all": {"b": [1, null]}, '
                '"more": "7"}',
            )
        ],
        types=SAY,
    ),
    "null is none": Recorded(
        "<tool_call><function=say><parameter=text>Null</parameter><parameter=more>nul</parameter>"
        "<parameter=n>null</parameter><parameter=a></parameter></function></tool_call>",
        None,
        [("say", '{"text": null, "more": "nul", "n": null, "a": ""}')],
        types=SAY,
    ),
    "the outer marks are missing": Recorded(
        "<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n</function>\n"
        "</tool_call> ok",
        "ok",
        [("get_weather", CITY)],
    ),
    "the last mark is missing": Recorded(
        "<tool_call><function=get_weather><parameter=city>Paris</parameter></function>",
        None,
        [("get_weather", CITY)],
    ),
    "what no answer can hold": Recorded(
        '<tool_call><function=say><parameter=all>\n{"a": NaN}\n</parameter><parameter=n>\n'
        '"\\ud800"</parameter></function></tool_call>',
        None,
        [("say", '{"all": "{\\"a\\": NaN}", "n": "\\"\\\\ud800\\""}')],
        types={"say": {"all": "json", "n": "json"}},
    ),
}
GLM = {
    "4.5": Recorded(
        "I look.\n<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
        "</tool_call>\n<tool_call>say\n<arg_key>text</arg_key>\n<arg_value>null</arg_value>\n"
        "<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n<arg_key>all</arg_key>\n"
        '<arg_value>["a"]</arg_value>\n<arg_key>on</arg_key>\n<arg_value>True</arg_value>\n'
        "</tool_call>",
        "I look.",
        [("get_weather", CITY), ("say", '{"text": "null", "n": 2, "all": ["a"], "on": true}')],
        types=SAY,
    ),
    "4.7, behind a thought": Recorded(
        "Paris, then.</think><tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris"
        "</arg_value></tool_call><tool_call>a</tool_call>",
        None,
        [("get_weather", CITY), ("a", "{}")],
        "Paris, then.",
        thinks="think",
        has_begun=True,
    ),
    "no value of its type": Recorded(
        "<tool_call>say\n<arg_key>n</arg_key>\n<arg_value>two</arg_value>\n</tool_call>",
        None,
        [("say", '{"n": "two"}')],
        types=SAY,
    ),
}
NO_ELEMENTS = {  # all of it is content
    "qwen3_coder": [
        "<tool_call>\nget_weather\n</tool_call>",
        "So: <tool_call>\n<function=get_wea",
        "<tool_call>\n<function=f>\n<parameter=city>\nPar",
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</param",
        "<tool_call>\n<function=f>\n<parameter=n",
        "<tool_call>\n<function=f>\n<parameter=city>\nParis\n</parameter>\n",
        "<tool_call>\n<function=f>\nParis\n</function>\n</tool_call>",
        "<tool_call>\n<function=f>\n</function>\n</tool>",
        "a <function=> b",
    ],
    "glm": [
        "<tool_call>\nthe weather\n</tool_call>",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n",
        "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_val",
        "<tool_call>f\n<arg_key>a</arg_key>\n2</tool_call>",
    ],
}
HARMONY = {
    "thought and words": Recorded(
        "<|channel|>analysis<|message|>2 + 2.<|end|><|start|>assistant<|channel|>final"
        "<|message|>Four.",
        "Four.",
        [],
        "2 + 2.",
    ),
    "thought and call": Recorded(
        "<|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant<|channel|>commentary "
        'to=functions.get_weather <|constrain|>json<|message|>{"city": "Paris"}',
        None,
        [("get_weather", CITY)],
        "Paris, then.",
    ),
    "recipient first, and a preamble": Recorded(
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant to=functions.get_weather"
        '<|channel|>commentary json<|message|>{"city": "Paris"}<|call|>',
        "I look.",
        [("get_weather", CITY)],
    ),
    "as openai-harmony renders it": Recorded(
        "<|start|>assistant<|channel|>analysis<|message|>Paris, then.<|end|><|start|>assistant "
        "to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>"
        '{"city": "Paris"}<|call|>',
        None,
        [("get_weather", CITY)],
        "Paris, then.",
    ),
    "no end before the next": Recorded(
        "<|channel|>analysis<|message|>Hm.<|channel|>final<|message|>Four.", "Four.", [], "Hm."
    ),
    "words alone": Recorded("Four.", "Four."),
    "malformed": Recorded(
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>no",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>no",
    ),
}


def _of(tools: str, texts: dict[str, Recorded], thinks: str | None = None) -> dict[str, Recorded]:
    return {
        f"{tools}, {name}": each._replace(tools=tools, thinks=thinks or each.thinks)
        for name, each in texts.items()
    }


ALL = {
    **_of("qwen3_coder", QWEN3_CODER),
    **_of("glm", GLM),
    **{
        f"malformed, {tools} {index}": Recorded(text, text, tools=tools)
        for tools, texts in NO_ELEMENTS.items()
        for index, text in enumerate(texts)
    },
    **_of("llama3_json", LLAMA),
    **_of("mistral", MISTRAL),
    **_of("deepseek", DEEPSEEK),
    **_of("harmony", HARMONY, "harmony"),
    **{f"hermes, {name}": each for name, each in HERMES.items()},
    **{f"thought, {name}": each for name, each in THOUGHTS.items()},
    **{f"malformed, {name}": Recorded(text, text) for name, text in MALFORMED.items()},
}
