"""/v1/messages, /v1/responses and /tokenize say what a chat says, in their own forms."""

import json
from contextlib import suppress

import httpx
import openai
import pytest
from scripted import scripted
from texts import ALL

from paceline.core.errors import BusyError
from paceline.engine.request import FinishReason
from paceline.server.access.access import Access
from paceline.server.bodies.body import decoded
from paceline.server.bodies.counts import Room
from paceline.server.bodies.reader import TOKENIZE, Reader
from paceline.server.errors import ApiError
from paceline.server.messages.wire import MessagesRequest
from paceline.server.messages.writer import MessagesWriter
from paceline.server.responses.wire import ResponsesRequest

TEXT = "<think>Paris, then.</think>I look." + ALL["hermes, one"].text
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
ROOM = Room(context_len=4096, max_open=16)
MESSAGES = {
    "model": "tiny",
    "max_tokens": 50,
    "messages": [{"role": "user", "content": "How is Paris?"}],
    "tools": [{"name": "get_weather", "input_schema": SCHEMA}],
}
TOOL = {"type": "function", "name": "get_weather", "parameters": SCHEMA}
CALL = {"type": "function_call", "name": "a", "call_id": "c", "arguments": "{}"}
BLOCKS = [
    {"type": "thinking", "thinking": "Paris, then.", "signature": ""},
    {"type": "text", "text": "I look."},
    {"type": "tool_use", "name": "get_weather", "input": {"city": "Paris"}},
]


@pytest.fixture(scope="module")
def world():
    with scripted("hermes") as server:
        yield server


@pytest.fixture(scope="module")
def client(world):
    return openai.OpenAI(base_url=f"{world.url}/v1", api_key="any", max_retries=0)


def post(world, path, body):
    return httpx.post(f"{world.url}{path}", json=body)


def events_of(answer) -> list[tuple[str, dict]]:
    found = []
    for told in answer.text.strip().split("\n\n"):
        name, data = told.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    assert all(name == document["type"] for name, document in found)
    return found


def joined(events: list[tuple[str, dict]]) -> list[dict]:
    """The blocks of a streamed message."""
    blocks: list[dict] = []
    for name, document in events:
        if name == "content_block_start":
            blocks.append(dict(document["content_block"], json=""))
        elif name == "content_block_delta":
            delta = document["delta"]
            assert document["index"] == len(blocks) - 1
            for key in ("text", "thinking"):
                if key in delta:
                    blocks[-1][key] += delta[key]
            blocks[-1]["json"] += delta.get("partial_json", "")
    for block in blocks:
        text = block.pop("json")
        if block["type"] == "tool_use":
            block["input"] = json.loads(text)
    return blocks


def without_ids(blocks: list[dict]) -> list[dict]:
    return [{key: value for key, value in block.items() if key != "id"} for block in blocks]


def test_a_message_has_blocks_of_thought_text_and_calls(world) -> None:
    world.say(TEXT)
    found = post(world, "/v1/messages", MESSAGES).json()
    assert (found["type"], found["role"], found["model"]) == ("message", "assistant", "tiny")
    assert found["stop_reason"] == "tool_use"
    assert without_ids(found["content"]) == BLOCKS
    assert found["usage"]["cache_read_input_tokens"] == 2
    assert found["usage"]["input_tokens"] == len(world.engine.prompts[-1]) - 2


def test_a_streamed_message_is_the_same_in_events(world) -> None:
    world.say(TEXT)
    events = events_of(post(world, "/v1/messages", MESSAGES | {"stream": True}))
    names = [name for name, _ in events]
    assert (names[0], names[-2:]) == ("message_start", ["message_delta", "message_stop"])
    assert names.count("content_block_start") == names.count("content_block_stop") == 3
    assert without_ids(joined(events)) == BLOCKS
    assert events[0][1]["message"]["id"].startswith("msg_")
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"
    assert events[-2][1]["usage"]["output_tokens"] > 0


@pytest.mark.parametrize(
    ("finish", "reason"), [(FinishReason.STOP, "end_turn"), (FinishReason.LENGTH, "max_tokens")]
)
def test_a_message_says_why_it_ended(world, finish, reason) -> None:
    world.say("Hi.", finish=finish)
    assert post(world, "/v1/messages", MESSAGES).json()["stop_reason"] == reason


def test_a_conversation_with_calls_and_results_is_the_chat_it_is(world) -> None:
    world.say("Sunny.")
    turns = [
        *MESSAGES["messages"],
        {"role": "assistant", "content": [BLOCKS[0], BLOCKS[1], {**BLOCKS[2], "id": "call_1"}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "call_1", "content": "23 degrees"},
                {"type": "text", "text": "And?", "cache_control": {"type": "ephemeral"}},
            ],
        },
    ]
    body = MESSAGES | {"messages": turns, "system": [{"type": "text", "text": "Be brief."}]}
    assert post(world, "/v1/messages", body).status_code == 200
    shown = world.asked()
    for part in ("<system>Be brief.", "<think>Paris, then.</think>I look.<tool_call>",
                 "<tool>23 degrees", "<user>And?"):  # fmt: skip
        assert part in shown
    count = post(
        world, "/v1/messages/count_tokens", {k: body[k] for k in body if k != "max_tokens"}
    )
    assert count.json() == {"input_tokens": len(world.engine.prompts[-1])}


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        (
            {"tools": [{"name": "a", "input_schema": {"type": "array"}}]},
            "tools[0].input_schema.type",
        ),
        ({"tools": [{"name": "a", "input_schema": {}}] * 2}, "tools[1].name"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [BLOCKS[0]]}]}, "messages[0].content[0].type"),
        ({"model": "other"}, "model"),
        ({"foo": 1}, "foo"),
    ],
)
def test_a_wrong_message_is_refused_as_that_api_refuses(world, asked, text) -> None:
    answer = post(world, "/v1/messages", MESSAGES | asked)
    assert answer.status_code in (400, 404)
    assert answer.json()["type"] == "error"
    assert text in answer.json()["error"]["message"]


def test_a_forced_tool_is_a_grammar(world) -> None:
    world.say(TEXT)
    post(world, "/v1/messages", MESSAGES | {"tool_choice": {"type": "any"}})
    assert "get_weather" in world.engine.params[-1].structured_outputs.text


def test_a_response_is_read_by_the_openai_client(world, client) -> None:
    world.say(TEXT)
    found = client.responses.create(model="tiny", input="How is Paris?", tools=[TOOL])
    assert (found.status, found.output_text) == ("completed", "I look.")
    assert [item.type for item in found.output] == ["reasoning", "message", "function_call"]
    assert found.output[0].content[0].text == "Paris, then."
    assert json.loads(found.output[2].arguments) == {"city": "Paris"}
    assert found.usage.input_tokens == len(world.engine.prompts[-1])
    world.say("Hi", finish=FinishReason.LENGTH)
    cut = client.responses.create(model="tiny", input="How is Paris?")
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    world.say("Sunny.")
    more = {"ignore_eos": True, "stop": ["!"]}  # additions, as a chat has them
    client.responses.create(model="tiny", input="How is Paris?", extra_body=more)
    params = world.engine.params[-1]
    assert (params.ignore_eos, params.stop) == (True, ("!",))


def test_a_streamed_response_is_joined_by_the_openai_client(world, client) -> None:
    world.say(TEXT)
    with client.responses.stream(model="tiny", input="How is Paris?", tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    names = [event.type for event in events]
    assert names[:3] == [
        "response.created", "response.in_progress", "response.output_item.added"]  # fmt: skip
    assert names[-1] == "response.completed"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == final.output_text == "I look."
    assert json.loads(final.output[2].arguments) == {"city": "Paris"}


def test_items_go_back_as_history(world, client) -> None:
    world.say(TEXT)
    found = client.responses.create(model="tiny", input="How is Paris?", tools=[TOOL])
    call = found.output[2]
    world.say("Sunny.")
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "How is Paris?"}]},
        found.output[1].model_dump(exclude_none=True, exclude={"phase"}),
        {k: getattr(call, k) for k in ("type", "call_id", "name", "arguments", "id", "status")},
        {"type": "function_call_output", "call_id": call.call_id, "output": "23 degrees"},
    ]
    answer = client.responses.create(model="tiny", input=items, instructions="Be brief.")
    assert answer.output_text == "Sunny."
    shown = world.asked()
    assert '<assistant>I look.<tool_call>{"name": "get_weather"' in shown
    assert "<system>Be brief." in shown
    assert "<tool>23 degrees" in shown


@pytest.mark.parametrize("calls", [True, False])
def test_a_whole_output_goes_back_as_one_turn(world, client, calls) -> None:
    world.say(TEXT if calls else "<think>Paris, then.</think>I look.")
    user = {"role": "user", "content": "How is Paris?"}
    found = client.responses.create(model="tiny", input=[user], tools=[TOOL])
    world.say("Sunny.")
    output = [item.model_dump(exclude_none=True) for item in found.output]
    results = [
        {"type": "function_call_output", "call_id": item["call_id"], "output": "23 degrees"}
        for item in output
        if item["type"] == "function_call"
    ]
    again = [user, *output, *results, {"role": "user", "content": "And?"}]
    assert client.responses.create(model="tiny", input=again).output_text == "Sunny."
    ending = '<tool_call>{"name": "get_weather"' if calls else "<user>And?"
    assert f"<assistant><think>Paris, then.</think>I look.{ending}" in world.asked()


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": [{"type": "function_call", "name": "a"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "a", "output": "b"}]}, "input[0].output"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"reasoning": {"effort": "low"}}, "reasoning.effort"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "input"),
        ({"tools": [TOOL, TOOL]}, "tools[1].name"),
        ({"tools": [TOOL | {"parameters": {"type": "array"}}]}, "tools[0].parameters.type"),
        ({"input": [CALL | {"arguments": "["}]}, "input"),
    ],
)
def test_a_wrong_response_is_refused_by_name(client, asked, param) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.responses.create(**{"model": "tiny", "input": "Hi"} | asked)
    assert refused.value.param == param
    assert param in refused.value.body["message"]


def test_a_call_that_breaks_off_is_text_of_a_response(world, client) -> None:
    text = ALL["malformed, wrong arguments"].text
    world.say(text)
    found = client.responses.create(model="tiny", input="Hi", tools=[TOOL])
    assert [item.type for item in found.output] == ["message"]
    assert found.output_text == text


def test_texts_are_tokens_and_tokens_are_texts(world) -> None:
    found = post(world, "/tokenize", {"prompt": "def f(x):"}).json()
    assert found["tokens"] == world.tokenizer.encode("def f(x):")
    assert (found["count"], found["max_model_len"]) == (len(found["tokens"]), 4096)
    back = post(world, "/detokenize", {"model": "tiny", "tokens": found["tokens"]})
    assert back.json() == {"prompt": "def f(x):"}
    chat = {"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": False}
    tokens = post(world, "/tokenize", chat).json()["tokens"]
    assert world.tokenizer.decode(tokens) == "<user>Hi"
    long = "x " * 40_000  # read in the process for large bodies, whose model has no such template
    assert post(world, "/tokenize", {"prompt": long}).json()["count"] > 4096


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/tokenize", {}, "prompt or messages, got none"),
        ("/tokenize", {"prompt": "a", "messages": MESSAGES["messages"]}, "got both"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools must be sent with messages"),
        ("/tokenize", {"model": "x", "prompt": "a"}, "model must be 'tiny'"),
        ("/detokenize", {"tokens": [1, 9_999]}, "tokens[1] must be below the vocabulary"),
        ("/detokenize", {"tokens": "a"}, "tokens must be a list"),
    ],
)
def test_what_is_no_text_is_refused(world, path, body, text) -> None:
    answer = post(world, path, body)
    assert answer.status_code in (400, 404)
    assert text in answer.json()["error"]["message"]


def test_a_version_is_told(world) -> None:
    assert set(httpx.get(f"{world.url}/version").json()) == {"version"}


@pytest.mark.parametrize("name", ["no number", "half a pair", "half a pair, the name behind"])
@pytest.mark.parametrize("is_stream", [False, True])
def test_no_text_of_a_model_breaks_a_message(world, name, is_stream) -> None:
    world.say(ALL[f"malformed, {name}"].text)
    answer = post(world, "/v1/messages", MESSAGES | {"stream": is_stream})
    assert answer.status_code == 200
    if is_stream:
        assert events_of(answer)[-1][0] == "message_stop"
    else:
        assert [block["type"] for block in answer.json()["content"]] == ["text"]


def test_a_stream_whose_writing_fails_ends_with_an_error(world, monkeypatch) -> None:
    def fail(*_) -> None:
        raise ValueError("wrong")

    monkeypatch.setattr(MessagesWriter, "piece", fail)
    world.say("Hi.")
    events, asked = [], MESSAGES | {"stream": True}
    with (
        suppress(httpx.RemoteProtocolError),  # the connection is closed behind it
        httpx.stream("POST", f"{world.url}/v1/messages", json=asked) as answer,
    ):
        for line in answer.iter_lines():
            events.append(line)
    assert any('"type":"error"' in each and "ValueError: wrong" in each for each in events)


CACHED = {"cache_control": {"type": "ephemeral"}}
SAID = [{"role": "user", "content": [{"type": "input_text", "text": "Hi", "annotations": []}]}]


@pytest.mark.parametrize(
    ("path", "asked", "ignored"),
    [
        (
            "/v1/messages",
            MESSAGES | {"system": [{"type": "text", "text": "Be brief."} | CACHED]},
            "system[].cache_control",
        ),
        (
            "/v1/messages/count_tokens",
            {
                "model": "tiny",
                "messages": MESSAGES["messages"],
                "tools": [{"name": "a", "input_schema": {}} | CACHED],
            },
            "tools[].cache_control",
        ),
        (
            "/v1/responses",
            {"model": "tiny", "input": [*SAID, {"type": "reasoning", "summary": []}]},
            "input[].content[].annotations, input[].summary",
        ),
    ],
)
def test_what_is_not_read_is_listed(world, path, asked, ignored) -> None:
    world.say("Hi.")
    assert post(world, path, asked).headers["X-Paceline-Ignored"] == ignored


CITED = [{"type": "text", "text": "a", "citations": [{"type": "x"}]}]
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": CITED}


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ({"system": CITED}, "system"),
        ({"messages": [{"role": "user", "content": [RESULT]}]}, "messages[0].content[0].content"),
    ],
)
def test_what_is_not_served_is_refused_in_every_block(world, asked, place) -> None:
    with pytest.raises(ApiError, match="nothing is cited here") as refused:
        decoded(MessagesRequest, json.dumps(MESSAGES | asked).encode(), ROOM)
    assert refused.value.param == f"{place}[0].citations"


@pytest.mark.parametrize("name", ["system", "instructions", "input"])
def test_a_prompt_may_be_longer_than_other_fields(name) -> None:
    kind, asked = (
        (MessagesRequest, MESSAGES)
        if name == "system"
        else (ResponsesRequest, {"model": "tiny", "input": "Hi"})
    )
    long = "x" * (1 << 20)
    found = decoded(kind, json.dumps(asked | {name: long}).encode(), ROOM)
    assert getattr(found, name) == long


@pytest.mark.parametrize("method", ["POST", "GET"])
def test_whoever_refuses_a_message_does_it_as_that_api_does(world, method) -> None:
    answer = httpx.request(method, f"{world.url}/v1/messages", content=b"{}")
    assert answer.status_code == (400 if method == "POST" else 405)
    assert (answer.json()["type"], set(answer.json()["error"])) == ("error", {"type", "message"})


def test_a_message_without_a_key_is_refused_as_that_api_does() -> None:
    with scripted(access=Access(api_keys=("secret",))) as server:
        error = post(server, "/v1/messages", MESSAGES).json()["error"]
        assert error["type"] == "authentication_error"
        assert "code" in post(server, "/v1/messagesx", MESSAGES).json()["error"]


@pytest.mark.parametrize("name", ["wrong arguments", "cut in its arguments"])
def test_a_streamed_call_that_is_none_does_not_look_whole(world, client, name) -> None:
    world.say(ALL[f"malformed, {name}"].text)
    asked = {"model": "tiny", "input": "Hi", "tools": [TOOL]}
    events = list(client.responses.create(**asked, stream=True))
    names = [event.type for event in events]
    assert "response.function_call_arguments.delta" in names
    assert "response.function_call_arguments.done" not in names
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_that_was_cut_says_which_item_is(client, world, is_stream) -> None:
    world.say("Hi", finish=FinishReason.LENGTH)
    found = client.responses.create(model="tiny", input="Hi", stream=is_stream)
    response = list(found)[-1].response if is_stream else found
    assert [item.status for item in response.output] == ["incomplete"]


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_response_repeats_what_was_asked_and_counts_its_thought(client, world, is_stream) -> None:
    asked = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "parallel_tool_calls": False,
        "tool_choice": "none",
        "tools": [TOOL | {"strict": True}],
    }
    world.say(TEXT)
    found = client.responses.create(model="tiny", input="Hi", stream=is_stream, **asked)
    response = list(found)[-1].response if is_stream else found
    told = response.model_dump(exclude_none=True)
    assert {name: told[name] for name in asked} == asked
    thought = len(world.tokenizer.encode("Paris, then.", add_special_tokens=False))
    assert response.usage.output_tokens_details.reasoning_tokens == thought


def test_a_text_that_is_far_too_long_is_no_tokens(world) -> None:
    """A tokenizer that says how few tokens it can be is not asked for them."""

    class Unread:
        def fewest_tokens(self, text: str, enough: int) -> int:
            return enough

    reader = Reader(model="tiny", room=ROOM, vocab_size=4096, tokenizer=Unread())
    with pytest.raises(ApiError, match="prompt must be at most 65536 tokens, 16 contexts") as got:
        reader.read(TOKENIZE, b'{"prompt": "x"}')
    assert got.value.param == "prompt"


def test_what_is_only_told_waits_for_no_engine(world, monkeypatch) -> None:
    def is_full(count: int) -> None:
        raise BusyError("full")

    monkeypatch.setattr(world.engine.callers, "require_room", is_full)
    counted = {"model": "tiny", "messages": MESSAGES["messages"]}
    assert post(world, "/v1/messages/count_tokens", counted).status_code == 200
    assert post(world, "/tokenize", {"prompt": "x"}).status_code == 200
    assert post(world, "/detokenize", {"tokens": [5]}).status_code == 200
    assert post(world, "/v1/messages", MESSAGES).status_code == 503
