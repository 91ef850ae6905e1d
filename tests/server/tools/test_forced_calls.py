"""`tool_choice` that forces a call: the bundled model, which knows no tools, must call one."""

import json
import shutil
from contextlib import contextmanager, nullcontext
from pathlib import Path

import jsonschema
import openai
import pytest
from scripted import BUNDLED
from serving import serving, small_llm

from paceline.server.errors import ApiError
from paceline.server.tools.formats import TOOL_FORMATS
from paceline.server.tools.forms import Form
from paceline.server.tools.grammar import calls_grammar
from paceline.server.tools.speech import Speech, message_of
from paceline.server.tools.wire import Function, Tool
from paceline.server.tools.xml_calls import kinds_of
from paceline.text.tokenizer import Tokenizer

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "maximum": 9}},
    "required": ["unit", "days"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "stop", "parameters": {"maxProperties": 0}}},
]
MESSAGES = [{"role": "user", "content": "Hi"}]
NAMED = {"type": "function", "function": {"name": "weather"}}


@contextmanager
def serving_tools(folder, marks):
    """The bundled model behind a template that shows tools."""
    for path in BUNDLED.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    template = f"{{{{ (tools | length) if tools }}}}{marks}{{{{ messages[-1].content }}}}"
    (Path(folder) / "chat_template.jinja").write_text(template)
    with serving(small_llm(model=str(folder))) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    with serving_tools(tmp_path_factory.mktemp("model"), "<tool_call></tool_call>") as client:
        yield client


@pytest.fixture(scope="module")
def elements_client(tmp_path_factory):
    """Of a model that writes arguments as elements."""
    with serving_tools(tmp_path_factory.mktemp("model"), "<tool_call><arg_key>") as client:
        yield client


def test_a_named_tool_is_called_with_arguments_of_its_schema(client) -> None:
    asked = {"model": "tiny", "messages": MESSAGES, "tools": TOOLS, "temperature": 1.0, "seed": 3}
    choice = client.chat.completions.create(**asked, tool_choice=NAMED).choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "weather"
    jsonschema.validate(json.loads(call.function.arguments), SCHEMA)
    streamed = ""
    for chunk in client.chat.completions.create(**asked, tool_choice=NAMED, stream=True):
        for part in chunk.choices[0].delta.tool_calls or []:
            streamed += part.function.arguments
    assert streamed == call.function.arguments


def test_a_required_tool_is_one_of_those_sent(client) -> None:
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required",
        parallel_tool_calls=False,
    )  # fmt: skip
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name in ("weather", "stop")


def test_a_forced_call_has_no_other_form(client) -> None:
    with pytest.raises(openai.BadRequestError, match="exclude each other"):
        client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=TOOLS, tool_choice="required",
            response_format={"type": "json_object"},
        )  # fmt: skip


def inner(elements, arguments):
    """As the format writes them."""
    if elements is None:
        return arguments
    return "".join(
        f"{elements.before_value % key}{value}{elements.after_value}"
        for key, value in json.loads(arguments).items()
    )


@pytest.mark.parametrize("has_begun", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_llguidance_takes_what_the_format_writes_and_the_parser_reads_it(name, has_begun) -> None:
    llguidance = pytest.importorskip("llguidance")
    tokenizer = Tokenizer.from_folder(BUNDLED)
    about = TOOL_FORMATS[name]
    tools = [
        Tool(type="function", function=Function(name="weather", parameters=SCHEMA)),
        Tool(type="function", function=Function(name="stop")),
    ]
    form = Form(
        tools=name,
        reasoning="think" if has_begun else None,
        has_begun=has_begun,
        types={"weather": kinds_of(SCHEMA)},
    )
    core = llguidance.LLTokenizer(tokenizer.to_json())
    matcher = llguidance.LLMatcher(
        core, llguidance.LLMatcher.grammar_from_lark(calls_grammar(tools, form))
    )
    arguments = '{"unit": "C", "days": 3}'
    text = about.between.join(
        f"{about.before % called}{inner(about.elements, said)}{about.after}"
        for called, said in (("weather", arguments), ("stop", "{}"))
    )
    thought = "Hm.\n</think>" if has_begun else ""
    whole = thought + about.opening + text + about.closing
    tokens = tokenizer.encode(whole, add_special_tokens=False)
    assert matcher.try_consume_tokens(tokens) == len(tokens)
    assert matcher.is_accepting()
    message = message_of(Speech(form).push(whole, is_end=True))
    found = [tuple(call["function"].values()) for call in message["tool_calls"]]
    assert found == [("weather", arguments), ("stop", "{}")]


XML = ("qwen3_coder", "glm")


def matcher_of(tool, name):
    """Of one call."""
    llguidance = pytest.importorskip("llguidance")
    core = llguidance.LLTokenizer(Tokenizer.from_folder(BUNDLED).to_json())
    grammar = calls_grammar([tool], Form(tools=name, is_one_call=True))
    return llguidance.LLMatcher(core, llguidance.LLMatcher.grammar_from_lark(grammar))


def goes_on(matcher, text):
    """Whether the whole text may come next."""
    tokens = Tokenizer.from_folder(BUNDLED).encode(text, add_special_tokens=False)
    return matcher.try_consume_tokens(tokens) == len(tokens)


@pytest.mark.parametrize("schema", [{}, {"enum": ["Paris"]}, {"type": "integer"}])
@pytest.mark.parametrize(
    ("name", "end"),
    [("glm", "</arg_value>"), ("qwen3_coder", "\n</parameter>"), ("qwen3_coder", "</parameter>")],
)
def test_a_grammar_ends_a_value_where_the_reader_does(name, end, schema) -> None:
    """With no line end behind it, as GLM-4.7 writes: the call is whole, and nothing may follow."""
    value = "3" if "type" in schema else "Paris"
    if schema and end == "</parameter>":
        value += "\n"  # where the text is free the reader needs none
    parameters = {"properties": {"city": schema}, "required": ["city"]}
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    about = TOOL_FORMATS[name]
    text = f"{about.before % 'f'}{about.elements.before_value % 'city'}{value}{end}{about.after}"
    form = Form(tools=name, types={"f": kinds_of(parameters)})
    (call,) = message_of(Speech(form).push(text, is_end=True))["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"city": 3 if value[0] == "3" else "Paris"}
    matcher = matcher_of(tool, name)
    assert goes_on(matcher, text)
    assert matcher.is_accepting()
    assert not goes_on(matcher, " and more")


@pytest.mark.parametrize("name", ["hermes", *XML])
def test_blanks_of_arguments_are_ours_to_allow(name) -> None:
    """They would have no end."""
    loose = {"x-guidance": {"whitespace_flexible": True}}
    inner = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"], **loose}
    outer = {"properties": {"a": inner}, "required": ["a"], **(loose if name == "hermes" else {})}
    matcher = matcher_of(Tool(type="function", function=Function(name="f", parameters=outer)), name)
    about = TOOL_FORMATS[name]
    opens = '{"a": ' if about.elements is None else about.elements.before_value % "a"
    assert goes_on(matcher, f'{about.opening}{about.before % "f"}{opens}{{"b":')
    assert not goes_on(matcher, "  1")


REQUIRED = r"tools\[0\].function.parameters.required must be a list of names"


@pytest.mark.parametrize(
    ("parameters", "choice", "refused"),
    [
        ({"properties": {"a": {"enum": 5}}}, "auto", None),
        ({"properties": {"a": {"enum": 5}}}, "required", "enum must be an array"),
        ({"properties": {"a": {"anyOf": [True]}}}, "auto", None),
        ({"properties": {"a": {"anyOf": [True]}}}, "required", "objects alone in anyOf"),
        ({"required": [5]}, "auto", REQUIRED),
        ({"required": [{}]}, "required", REQUIRED),
    ],
)
def test_a_wrong_schema_is_never_the_servers_failure(
    elements_client, parameters, choice, refused
) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    is_fine = nullcontext()
    with pytest.raises(openai.BadRequestError, match=refused) if refused else is_fine:
        elements_client.chat.completions.create(
            model="tiny", messages=MESSAGES, tools=tools, tool_choice=choice, max_tokens=2
        )


WIDE = {
    "type": "object",
    "$defs": {"Day": {"enum": ["Mon", 3]}},
    "properties": {
        "text": {"anyOf": [{"type": "string"}, {"type": "null"}], "title": "Text"},
        "unit": {"type": ["string", "null"], "enum": ["C", "F", None]},
        "count": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        "day": {"$ref": "#/$defs/Day"},
        "list": {"type": "array", "items": {"type": "number"}, "maxItems": 2},
    },
    "required": ["text"],
}


@pytest.mark.parametrize(
    ("values", "is_taken"),
    [
        (["text", 'a\n</b> "c"'], True),
        (["text", "a", "unit", "F", "count", "3", "day", '"Mon"', "list", "[1.5, 2]"], True),
        (["text", "a", "count", "null", "list", "[]"], True),
        (["text", "a", "unit", "null"], True),
        (["unit", "F"], False),  # without what is required
        (["unit", "F", "text", "a"], False),  # in another order
        (["text", "a", "unit", "K"], False),
        (["text", "a", "count", "many"], False),
        (["text", "a", "day", '"Tue"'], False),
        (["text", "a", "list", "[1, 2, 3]"], False),
        (["text", "a", "more", "b"], False),
    ],
)
@pytest.mark.parametrize("name", XML)
def test_a_grammar_of_elements_follows_the_schema(name, values, is_taken) -> None:
    llguidance = pytest.importorskip("llguidance")
    about, tokenizer = TOOL_FORMATS[name], Tokenizer.from_folder(BUNDLED)
    tool = Tool(type="function", function=Function(name="f", parameters=WIDE))
    grammar = calls_grammar([tool], Form(tools=name, is_one_call=True))
    core = llguidance.LLTokenizer(tokenizer.to_json())
    matcher = llguidance.LLMatcher(core, llguidance.LLMatcher.grammar_from_lark(grammar))
    pairs = list(zip(values[::2], values[1::2], strict=True))
    elements = about.elements
    written = [f"{elements.before_value % key}{each}{elements.after_value}" for key, each in pairs]
    text = f"{about.before % 'f'}{''.join(written)}{about.after}"
    tokens = tokenizer.encode(text, add_special_tokens=False)
    assert (matcher.try_consume_tokens(tokens) == len(tokens)) is is_taken
    if is_taken:
        assert matcher.is_accepting()
        form = Form(tools=name, types={"f": kinds_of(WIDE)})
        (call,) = message_of(Speech(form).push(text, is_end=True))["tool_calls"]
        found = json.loads(call["function"]["arguments"])
        if name == "glm" and "null" in values:
            return  # there a string is what it says
        jsonschema.validate(found, WIDE)
        assert found["text"] == values[1]


@pytest.mark.parametrize(
    ("parameters", "text"),
    [
        ({"properties": {"a": {"type": "string", "pattern": "x"}}}, "got 'pattern'; leave it out"),
        ({"properties": {"a": {"anyOf": [{"type": "string", "format": "date"}]}}}, "got 'format'"),
        ({"properties": {"a": {}}, "minProperties": 1}, "got 'minProperties'"),
        ({"patternProperties": {}}, "got 'patternProperties'"),
        ({"properties": {"a>": {}}}, "names of arguments without <, > and line ends"),
        ({"properties": {"a": {"anyOf": [True]}}}, "objects alone in anyOf and oneOf"),
        ({"properties": {"a": {"oneOf": 5}}}, "oneOf as a list of at least one: this model"),
        ({"properties": {"a": {"type": "string", "enum": 5}}}, "enum as a list of at least one"),
    ],
)
def test_what_elements_cannot_follow_is_refused_by_its_name(parameters, text) -> None:
    tool = Tool(type="function", function=Function(name="f", parameters=parameters))
    with pytest.raises(ApiError, match="parameters of 'f', which must be called, must be") as told:
        calls_grammar([tool], Form(tools="glm"))
    assert text in str(told.value)
    assert told.value.status == 400
