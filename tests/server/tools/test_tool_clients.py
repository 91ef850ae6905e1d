"""The unmodified openai client calls tools: history, choice, streams, reasoning."""

import json

import openai
import pytest
from scripted import TEMPLATES, scripted, scripted_service
from texts import ALL

from paceline.core.errors import ConfigError
from paceline.engine.request import FinishReason
from paceline.server.tools.formats import Parsers

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
        },
    },
}
OTHER = {"type": "function", "function": {"name": "other"}}
USER = {"role": "user", "content": "How is Paris?"}
TEXT = ALL["hermes, thought before"].text


@pytest.fixture(scope="module")
def world():
    with scripted("hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(world):
    return openai.OpenAI(base_url=f"{world.url}/v1", api_key="any", max_retries=0)


def chat(client, **asked):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": [USER], "tools": [WEATHER]} | asked
    )


def test_a_call_is_a_call_to_the_client(world, client) -> None:
    world.say(TEXT)
    choice = chat(client).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    assert choice.message.reasoning_content == "Paris, then."
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name) == ("function", "get_weather")
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert '"description": "of a city"' in world.asked()


def test_a_streamed_call_is_joined_to_the_same(world, client) -> None:
    world.say(TEXT)
    with client.chat.completions.stream(model="tiny", messages=[USER], tools=[WEATHER]) as stream:
        names = [event.type for event in stream]
        final = stream.get_final_completion().choices[0]
    assert "tool_calls.function.arguments.delta" in names
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.name == "get_weather"
    assert json.loads(final.message.tool_calls[0].function.arguments) == {"city": "Paris"}
    thoughts = [
        getattr(chunk.choices[0].delta, "reasoning_content", None) or ""
        for chunk in chat(client, stream=True)
    ]
    assert "".join(thoughts) == "Paris, then."


def test_two_choices_are_read_each_for_itself(world, client) -> None:
    world.say(TEXT, "No.")
    choices = chat(client, n=2).choices
    assert [choice.finish_reason for choice in choices] == ["tool_calls", "stop"]
    assert choices[1].message.content == "No."
    calls = {0: "", 1: ""}
    for chunk in chat(client, n=2, stream=True):
        for choice in chunk.choices:
            for call in choice.delta.tool_calls or []:
                calls[choice.index] += call.function.arguments
    assert calls == {0: '{"city": "Paris"}', 1: ""}


def test_a_call_that_is_cut_by_its_limit_is_no_call(world, client) -> None:
    world.say(TEXT[:-40], finish=FinishReason.LENGTH)
    choice = chat(client).choices[0]
    assert (choice.finish_reason, choice.message.tool_calls) == ("length", None)
    assert choice.message.content.startswith("<tool_call>")


def test_calls_and_their_results_go_back_as_history(world, client) -> None:
    world.say(TEXT)
    message = chat(client).choices[0].message
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
    world.say("It is sunny.")
    answer = chat(client, messages=[USER, message, result])
    assert answer.choices[0].message.content == "It is sunny."
    shown = world.asked()
    assert '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}' in shown
    assert "<think>Paris, then.</think>" in shown
    assert "<tool>Sunny." in shown


def test_tools_that_are_not_to_be_called_are_not_shown(world, client) -> None:
    world.say(TEXT)
    message = chat(client, tool_choice="none").choices[0].message
    assert message.tool_calls is None
    assert "<tool_call>" in message.content
    assert "of a city" not in world.asked()


def test_of_parallel_calls_one_is_told_when_one_was_asked_for(world, client) -> None:
    world.say(ALL["hermes, words before two"].text)
    assert len(chat(client).choices[0].message.tool_calls) == 2
    assert len(chat(client, parallel_tool_calls=False).choices[0].message.tool_calls) == 1
    indices = {
        call.index
        for chunk in chat(client, parallel_tool_calls=False, stream=True)
        for call in chunk.choices[0].delta.tool_calls or []
    }
    assert indices == {0}


def test_a_message_of_the_assistant_goes_on(world, client) -> None:
    world.say(" four.")
    messages = [USER, {"role": "assistant", "content": "It is"}]
    goes_on = {"continue_final_message": True}
    assert (
        chat(client, messages=messages, extra_body=goes_on).choices[0].message.content == " four."
    )
    assert world.asked().endswith("<assistant>It is")
    messages[1]["content"] = "<think>Two and"
    world.say(" two.</think>Four.")
    found = chat(client, messages=messages, extra_body=goes_on).choices[0].message
    assert (found.reasoning_content, found.content) == ("two.", "Four.")


def test_the_template_hears_what_it_reads(world, client) -> None:
    world.say("Hi.")
    chat(client, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert world.asked().endswith("<think>\n\n</think>\n\n")
    chat(client, reasoning_effort="none")
    assert world.asked().endswith("<think>\n\n</think>\n\n")
    chat(client, extra_body={"add_generation_prompt": False})
    assert not world.asked().endswith("<assistant>")


BAD_TOOL = {"type": "function", "function": {"name": "a b"}}
BAD_SCHEMA = {"type": "function", "function": {"name": "a", "parameters": {"type": "array"}}}


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [BAD_TOOL]}, "tools[0].function.name"),
        ({"tools": [{"type": "web"}]}, "tools[0].type"),
        ({"tools": [BAD_SCHEMA]}, "tools[0].function.parameters.type"),
        ({"tools": [OTHER, OTHER]}, "tools[1].function.name"),
        ({"tools": [OTHER], "tool_choice": {"type": "function", "function": {"name": "x"}}},
         "tool_choice"),
        ({"tools": None, "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"reasoning_effort": "most"}, "reasoning_effort"),
        ({"extra_body": {"chat_template_kwargs": {"x": 1}}}, "chat_template_kwargs.x"),
        ({"extra_body": {"chat_template_kwargs": {"tools": 1}}}, "chat_template_kwargs.tools"),
        ({"extra_body": {"continue_final_message": True}}, "continue_final_message"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
        ({"messages": [{**USER, "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{}"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "a", "arguments": "{"}}]}]},
         "messages[0].tool_calls[0].function.arguments"),
    ],
)  # fmt: skip
def test_what_is_no_tool_is_refused_by_name(client, asked, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, **asked)
    assert refused.value.param == param


def test_a_message_that_goes_on_begins_no_other(client) -> None:
    body = {"continue_final_message": True, "add_generation_prompt": True}
    messages = [USER, {"role": "assistant", "content": "It is"}]
    with pytest.raises(openai.BadRequestError, match="exclude one another"):
        chat(client, messages=messages, extra_body=body)


CALLS = {"deepseek": "V3", "harmony": "thought and call"}


@pytest.mark.parametrize("name", ["llama3_json", "mistral", "deepseek", "harmony"])
def test_a_template_tells_its_format(name: str) -> None:
    recorded = ALL[f"{name}, {CALLS.get(name, 'one')}"]
    with scripted(name) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        server.say(("Hm.</think>" if name == "deepseek" else "") + recorded.text)
        message = chat(client).choices[0].message
        calls = [(call.function.name, call.function.arguments) for call in message.tool_calls]
        assert calls == recorded.calls
        assert not server.engine.params[-1].skip_special_tokens
        shown = client.models.retrieve("tiny").model_dump()
        assert shown["tool_call_parser"] == name
        if name == "mistral":
            assert all(len(call.id) == 9 and call.id.isalnum() for call in message.tool_calls)
        if name == "harmony":
            chat(client, reasoning_effort="high")
            assert "high" in server.asked()
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "Sunny."}
        assert chat(client, messages=[USER, message, result]).choices


def test_a_model_that_knows_no_tools_is_not_asked_to_call_any() -> None:
    with scripted("plain") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        server.say(TEXT)
        with pytest.raises(openai.BadRequestError, match="known format"):
            chat(client)
        assert chat(client, tools=[]).choices[0].message.content == TEXT


@pytest.mark.parametrize(
    ("template", "asked", "text"),
    [
        ("hermes", {"tools": "xml"}, "must be one of auto, none, hermes"),
        ("hermes", {"reasoning": "xml"}, "must be one of auto, none, think"),
        ("plain", {"tools": "hermes"}, "shows tools to the model, got 'hermes' with one"),
        ("hermes", {"reasoning": "harmony"}, "both harmony, or none"),
        ("harmony", {"reasoning": "think"}, "both harmony, or none"),
    ],
)
def test_a_parser_that_does_not_fit_is_refused_at_the_start(template, asked, text) -> None:
    with pytest.raises(ConfigError, match=text):
        scripted_service(TEMPLATES[template], parsers=Parsers(**asked))


def test_parsers_asked_for_by_name_are_taken() -> None:
    found = scripted_service(
        TEMPLATES["hermes"], parsers=Parsers(tools="mistral", reasoning="none")
    )
    assert found.reader.formats.describe() == {
        "tool_call_parser": "mistral",
        "reasoning_parser": None,
    }
    off = scripted_service(TEMPLATES["harmony"], parsers=Parsers(tools="none", reasoning="none"))
    assert off.reader.formats.describe() == {"tool_call_parser": None, "reasoning_parser": None}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_form_that_was_asked_for_is_content_where_the_prompt_begins_a_thought(is_stream) -> None:
    with scripted("deepseek") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        server.say('{"a": 1}')
        asked = {"model": "tiny", "messages": [USER], "response_format": {"type": "json_object"}}
        if is_stream:
            chunks = client.chat.completions.create(**asked, stream=True)
            content = "".join(each.choices[0].delta.content or "" for each in chunks)
        else:
            content = client.chat.completions.create(**asked).choices[0].message.content
        assert content == '{"a": 1}'


SAY = {
    "type": "function",
    "function": {
        "name": "say",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "n": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
                "all": {"type": "array"},
            },
        },
    },
}
ARGUMENTS = '{"text": "12 \\"a\\"\\n", "n": 3, "all": [true, null]}'


@pytest.mark.parametrize("name", ["qwen3_coder", "glm"])
def test_arguments_that_are_elements_go_there_and_back(name: str) -> None:
    """As the template writes them in the history, so they are read."""
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": ARGUMENTS}}
    history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
    history.append({"role": "tool", "tool_call_id": "1", "content": "Said."})
    with scripted(name) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)
        server.say("Good.")
        chat(client, tools=[SAY], messages=history)
        shown = server.asked()
        written = shown[shown.rindex("<tool_call>") : shown.rindex("</tool_call>")] + "</tool_call>"
        server.say(f"I say it.\n\n{written}")
        message = chat(client, tools=[SAY]).choices[0].message
        assert (message.content, message.tool_calls[0].function.arguments) == (
            "I say it.",
            ARGUMENTS,
        )
        asked = {"model": "tiny", "messages": [USER], "tools": [SAY]}
        with client.chat.completions.stream(**asked) as stream:
            events = [each for each in stream if each.type == "tool_calls.function.arguments.delta"]
            final = stream.get_final_completion().choices[0]
        assert len(events) > 5
        assert final.message.tool_calls[0].function.arguments == ARGUMENTS
        assert final.finish_reason == "tool_calls"
        assert client.models.retrieve("tiny").model_dump()["tool_call_parser"] == name
        chat(client, tools=[SAY], tool_choice="required")
        grammar = server.engine.params[-1].structured_outputs.text
        assert "arguments_0: arguments_0_0? arguments_0_1? arguments_0_2?" in grammar
        assert chat(client, tools=[SAY], tool_choice="none").choices[0].message.tool_calls is None
        assert "arguments_0" not in str(server.engine.params[-1].structured_outputs)
