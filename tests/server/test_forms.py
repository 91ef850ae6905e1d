"""Forms of answers over HTTP, in the words of the openai client and of other servers; and what is
taken, of fields beside them.
"""

import json
import re
from typing import Literal

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel, Field
from serving import serving, small_llm, wait_until

SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "of": {"enum": ["a", "b"]}},
    "required": ["on", "of"],
    "additionalProperties": False,
}
MESSAGES = [{"role": "user", "content": "def answer():"}]
IGNORED = "X-Paceline-Ignored"


class Line(BaseModel):
    kind: Literal["in", "out"]
    count: int = Field(ge=0, le=99)


class Order(BaseModel):
    lines: list[Line] = Field(max_length=2)
    paid: bool
    note: Literal["x"] | None


@pytest.fixture(scope="module")
def server():
    with serving(small_llm()) as server:
        yield server


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0)


@pytest.fixture(autouse=True)
def _nothing_is_left(server):
    yield
    wait_until(server.is_idle)


def chat(client, **asked):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "temperature": 1.2, "max_tokens": 200} | asked
    )


def test_a_pydantic_class_is_parsed_from_the_answer(client):
    answer = client.chat.completions.parse(
        model="tiny", messages=MESSAGES, response_format=Order, temperature=0.8, seed=3
    )
    assert isinstance(answer.choices[0].message.parsed, Order)
    assert answer.choices[0].finish_reason == "stop"


def test_a_stream_brings_the_same_class(client):
    asked = {"model": "tiny", "messages": MESSAGES, "response_format": Order}
    with client.chat.completions.stream(**asked, temperature=0.8, seed=3) as stream:
        events = [event.type for event in stream]
        parsed = stream.get_final_completion().choices[0].message.parsed
    assert "content.delta" in events
    whole = client.chat.completions.parse(**asked, temperature=0.8, seed=3)
    assert parsed == whole.choices[0].message.parsed


@pytest.mark.parametrize("seed", range(3))
def test_a_schema_holds_for_every_choice(client, seed):
    schema = {"name": "s", "schema": SCHEMA, "strict": seed == 0}
    answer = chat(
        client, n=2, seed=seed, response_format={"type": "json_schema", "json_schema": schema}
    )
    for choice in answer.choices:
        jsonschema.validate(json.loads(choice.message.content), SCHEMA)
        assert choice.finish_reason == "stop"


@pytest.mark.parametrize(
    ("asked", "form"),
    [
        ({"guided_json": SCHEMA}, r"(?s)\{.*\}"),
        ({"guided_regex": "[ab]{3}-[0-9]"}, "[ab]{3}-[0-9]"),
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"guided_grammar": 'root ::= "x" ("y" | "z")'}, "xy|xz"),
        ({"structured_outputs": {"json": SCHEMA}}, r"(?s)\{.*\}"),
        ({"structured_outputs": {"regex": "a|bc"}}, "a|bc"),
        ({"structured_outputs": {"choice": ["red", "green"]}}, "red|green"),
        ({"structured_outputs": {"grammar": 'start: "x" | "yz"'}}, "x|yz"),
    ],
)
def test_other_servers_words_are_heeded_by_both_endpoints(client, asked, form):
    said = chat(client, extra_body=asked).choices[0].message.content
    prompt = {"model": "tiny", "prompt": "x = ", "temperature": 1.2, "max_tokens": 200}
    continued = client.completions.create(**prompt, extra_body=asked).choices[0].text
    assert re.fullmatch(form, said)
    assert re.fullmatch(form, continued)


def test_json_object_is_an_object(client):
    answer = chat(client, response_format={"type": "json_object"}, temperature=0.0, seed=1)
    choice = answer.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or type(json.loads(choice.message.content)) is dict


def test_max_tokens_in_the_middle_is_told(client):
    answer = chat(client, extra_body={"guided_regex": "[0-9]{100}"}, max_tokens=2)
    assert answer.choices[0].finish_reason == "length"
    assert answer.choices[0].message.content.isdigit()


@pytest.mark.parametrize(
    ("asked", "part"),
    [
        ({"guided_json": {"not": {}}}, '["not"]'),
        ({"guided_json": "{"}, "line 1 column 2"),
        ({"guided_regex": "(?<=a)b"}, "look-around"),
        ({"guided_grammar": "start: nothing"}, "nothing"),
        ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "s", "schema": {"contains": {}}},
                }
            },
            "contains",
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_followed_is_a_400_that_names_it(client, asked, part, stream):
    with pytest.raises(openai.BadRequestError) as refused:
        chat(client, extra_body=asked, stream=stream)
    assert part in refused.value.body["message"]
    assert refused.value.body["param"] == "structured_outputs"


def test_others_stream_on_beside_it(client):
    free = {"temperature": 0.0, "max_tokens": 12}
    alone = chat(client, **free).choices[0].message.content
    stream = chat(client, **free, stream=True)
    chat(client, extra_body={"guided_json": SCHEMA})
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == alone


def test_what_is_not_read_is_listed_in_a_header(server):
    added = {
        "content": "hello",
        "role": "assistant",
        "tool_calls": None,
        "function_call": None,
        "annotations": [],
        "provider_specific_fields": {"refusal": None},
        "thinking_blocks": None,
    }
    body = {"model": "tiny", "messages": [*MESSAGES, added, *MESSAGES], "max_tokens": 1}
    url = f"{server.url}/v1/chat/completions"
    for stream in (False, True):
        answer = httpx.post(url, json=body | {"stream": stream})
        assert answer.status_code == 200
        assert answer.headers[IGNORED] == "messages[].provider_specific_fields"
    assert IGNORED not in httpx.post(url, json=body | {"messages": MESSAGES}).headers
    unknown = body | {"messages": [added | {"provider_fields": {}}]}
    assert httpx.post(url, json=unknown).json()["error"]["code"] == "unknown_parameter"
    long = body | {"messages": [added | {"content": "a" * (1 << 16)}]}  # read by the other process
    assert httpx.post(url, json=long).status_code == 400


def test_every_chunk_tells_what_has_come_where_that_is_asked(client):
    options = {"include_usage": True, "continuous_usage_stats": True}
    stream = chat(client, stream=True, stream_options=options, max_tokens=5, temperature=0.0)
    usages = [chunk.usage for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (0, 5)
    assert len({usage.prompt_tokens for usage in usages}) == 1
    assert all(u.total_tokens == u.prompt_tokens + u.completion_tokens for u in usages)


def complete(client, **asked):
    return client.completions.create(
        **{"model": "tiny", "prompt": "def f(x):", "temperature": 0, "max_tokens": 4} | asked
    )


def test_an_echo_of_no_tokens_is_the_prompt_with_its_scores(client):
    one = complete(client, echo=True, logprobs=2, max_tokens=1).choices[0]
    for stream in (False, True):
        asked = {"echo": True, "logprobs": 2, "max_tokens": 0, "stream": stream}
        found = complete(client, **asked)
        [none] = [c for c in found for c in c.choices] if stream else found.choices
        assert (none.text, none.finish_reason) == ("def f(x):", "length")
        assert none.logprobs.tokens == one.logprobs.tokens[:-1]
        assert none.logprobs.token_logprobs == one.logprobs.token_logprobs[:-1]
    usage = complete(client, echo=True, max_tokens=0).usage
    assert (usage.completion_tokens, usage.prompt_tokens) == (0, len(one.logprobs.tokens) - 1)


def test_prompt_logprobs_are_those_of_an_echo(client):
    echoed = complete(client, echo=True, logprobs=2).choices[0].logprobs
    answer = complete(client, extra_body={"prompt_logprobs": 2}, n=2, temperature=1.0)
    for choice in answer.choices:
        first, *rest = choice.model_extra["prompt_logprobs"]
        assert first is None
        for scores, logprob, name in zip(
            rest, echoed.token_logprobs[1:], echoed.tokens[1:], strict=False
        ):
            [chosen, *_] = scores.values()
            assert chosen["logprob"] == pytest.approx(logprob, abs=1e-4)
            assert chosen["decoded_token"] == name
            assert chosen["rank"] is None or chosen["rank"] >= 1
    assert not complete(client).choices[0].model_extra.get("prompt_logprobs")


def test_special_tokens_and_stop_strings_are_shown_where_that_is_asked(client):
    text = complete(client, max_tokens=24).choices[0].text
    stop = text[6:9]
    cut = complete(client, max_tokens=24, stop=stop).choices[0].text
    kept = complete(
        client, max_tokens=24, stop=stop, extra_body={"include_stop_str_in_output": True}
    )
    assert kept.choices[0].text == cut + stop
    bias = {"logit_bias": {"0": 100}, "max_tokens": 2, "extra_body": {"ignore_eos": True}}
    assert complete(client, **bias).choices[0].text == ""
    bias["extra_body"] |= {"skip_special_tokens": False}
    assert complete(client, **bias).choices[0].text == "<|endoftext|>" * 2
