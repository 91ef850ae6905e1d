"""Unmodified clients of the field, where they are installed (`paceline[clients]`)."""

import json
import warnings

import pytest
from scripted import scripted
from tools.texts import ALL

CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
CALL = ALL["hermes, one"].text
TOOL = {"name": "get_weather", "description": "of a city", "parameters": CITY}

# What their imports warn of is not ours.
pytestmark = pytest.mark.filterwarnings("ignore")


def client_library(name):
    """A skip where it is not installed; its import may warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip(name, exc_type=ImportError)


@pytest.fixture(scope="module")
def world():
    with scripted("hermes") as server:
        yield server


def test_anthropic_talks_streams_and_calls(world):
    client_library("anthropic")
    import anthropic

    with anthropic.Anthropic(base_url=world.url, api_key="any", max_retries=0) as client:
        asked = {"model": "tiny", "max_tokens": 20}
        user = {"role": "user", "content": "How is Paris?"}
        world.say("Sunny.")
        assert client.messages.create(messages=[user], **asked).content[0].text == "Sunny."
        with client.messages.stream(messages=[user], **asked) as stream:
            assert "".join(stream.text_stream) == "Sunny."
            assert stream.get_final_message().stop_reason == "end_turn"
        world.say(CALL)
        tool = {"name": "get_weather", "input_schema": CITY}
        said = client.messages.create(messages=[user], tools=[tool], **asked)
        (call,) = [block for block in said.content if block.type == "tool_use"]
        assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
        world.say("Mild.")
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "20 degrees"}
        turns = [user, {"role": "assistant", "content": said.content}]
        turns.append({"role": "user", "content": [result]})
        again = client.messages.create(messages=turns, tools=[tool], **asked)
        assert again.content[0].text == "Mild."
        counted = client.messages.count_tokens(model="tiny", messages=[user])
        assert counted.input_tokens > 0
        with pytest.raises(anthropic.BadRequestError, match="max_tokens"):
            client.messages.create(messages=[user], model="tiny", max_tokens=0)


def test_litellm_talks_streams_and_sends_back_what_it_got(world):
    client_library("litellm")
    import litellm

    asked = {"model": "openai/tiny", "api_base": f"{world.url}/v1", "api_key": "any"}
    user = {"role": "user", "content": "How is Paris?"}
    world.say("Sunny.")
    assert litellm.completion(messages=[user], **asked).choices[0].message.content == "Sunny."
    chunks = litellm.completion(messages=[user], stream=True, **asked)
    assert "".join(each.choices[0].delta.content or "" for each in chunks) == "Sunny."
    tool = {"type": "function", "function": TOOL}
    world.say(CALL)
    message = litellm.completion(messages=[user], tools=[tool], **asked).choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    world.say("Mild.")
    result = {"role": "tool", "tool_call_id": call.id, "content": "20 degrees"}
    again = [user, message.model_dump(), result]
    answer = litellm.completion(messages=again, tools=[tool], **asked)
    assert answer.choices[0].message.content == "Mild."
    assert "20 degrees" in world.asked()


def test_langchain_calls_tools_and_takes_structured_answers(world):
    client_library("langchain_openai")
    from langchain_core.messages import HumanMessage, ToolMessage
    from langchain_openai import ChatOpenAI

    chat = ChatOpenAI(model="tiny", base_url=f"{world.url}/v1", api_key="any", max_retries=0)
    world.say("Sunny.")
    assert chat.invoke("How is Paris?").content == "Sunny."
    assert "".join(piece.content for piece in chat.stream("How is Paris?")) == "Sunny."
    world.say(CALL)
    user = HumanMessage("How is Paris?")
    said = chat.bind_tools([TOOL]).invoke([user])
    (call,) = said.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    world.say("Mild.")
    result = ToolMessage("20 degrees", tool_call_id=call["id"])
    assert chat.bind_tools([TOOL]).invoke([user, said, result]).content == "Mild."
    world.say('{"city": "Paris"}')
    schema = CITY | {"title": "Place", "description": "where"}
    for method in ("json_schema", "json_mode"):
        formed = chat.with_structured_output(schema, method=method)
        assert formed.invoke("Where, in JSON?") == {"city": "Paris"}
        assert world.engine.params[-1].structured_outputs is not None
