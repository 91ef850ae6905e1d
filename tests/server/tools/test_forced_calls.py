"""`tool_choice` that forces a call: the bundled model, which knows no tools, must call one."""

import json
import shutil
from pathlib import Path

import jsonschema
import openai
import pytest
from scripted import BUNDLED
from serving import serving, small_llm

from paceline.server.tools.formats import TOOL_FORMATS
from paceline.server.tools.forms import Form
from paceline.server.tools.grammar import calls_grammar
from paceline.server.tools.speech import Speech, message_of
from paceline.server.tools.wire import Function, Tool
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


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """The bundled model behind a template that shows tools."""
    folder = tmp_path_factory.mktemp("model")
    for path in BUNDLED.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    template = "{{ (tools | length) if tools }}<tool_call></tool_call>{{ messages[-1].content }}"
    (Path(folder) / "chat_template.jinja").write_text(template)
    with serving(small_llm(model=str(folder))) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


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
    form = Form(tools=name, reasoning="think" if has_begun else None, has_begun=has_begun)
    core = llguidance.LLTokenizer(tokenizer.to_json())
    matcher = llguidance.LLMatcher(
        core, llguidance.LLMatcher.grammar_from_lark(calls_grammar(tools, form))
    )
    arguments = '{"unit": "C", "days": 3}'
    text = about.between.join(
        f"{about.before % called}{said}{about.after}"
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
