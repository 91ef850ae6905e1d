"""What a request may hold, and what is said about the rest; no engine."""

import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params

from paceline.core.errors import RequestError
from paceline.core.request.sampling_params import MAX_LOGIT_BIAS, SamplingParams
from paceline.server.bodies.body import body_schema, decoded
from paceline.server.bodies.counts import Room
from paceline.server.bodies.places import find
from paceline.server.bodies.refusals import refusals_of
from paceline.server.bodies.wire import ChatRequest, CompletionRequest, Message, StreamOptions
from paceline.server.errors import ApiError

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
ROOM = Room(context_len=256, max_open=20)
COMPLETION = {"model": "m", "prompt": "hi"}
DEFAULTS = {ChatRequest: SamplingParams(max_tokens=None), CompletionRequest: SamplingParams()}


def read(kind, body):
    return decoded(kind, json.dumps(body).encode(), ROOM)


def sampling_of(body):
    return SamplingParams.from_dict(body.sampling())


def fault(kind, body):
    with pytest.raises(ApiError) as refused:
        read(kind, body)
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (completion_create_params.CompletionCreateParamsBase, CompletionRequest),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest),
    ],
)
def test_every_field_the_openai_client_knows_is_served_or_refused_by_name(theirs, ours):
    assert set(theirs.__annotations__) <= set(ours.__struct_fields__)


@pytest.mark.parametrize(
    ("more", "text", "param"),
    [
        ({"temperature": "1"}, 'temperature must be a number, got "1"; types are strict', None),
        ({"temperature": True}, "temperature must be a number, got true", None),
        ({"max_tokens": 1.0}, "max_tokens must be an integer, got 1.0", None),
        ({"seed": True}, "seed must be an integer, got true", None),
        ({"stream": 1}, "stream must be true or false, got 1", None),
        ({"stop": 3}, "stop must be a string or a list, got 3", None),
        ({"stop": ["a", 3]}, "stop[1] must be a string, got 3", "stop[1]"),
        ({"logit_bias": {"5": "x"}}, 'logit_bias.5 must be a number, got "x"', "logit_bias.5"),
        ({"stream_options": {"usage": True}}, "stream_options.usage must be a field of this", None),
        ({"messages": []}, "messages must be a list of at least 1, got []", None),
        ({"messages": "hi"}, 'messages must be a list, got "hi"', None),
        ({"messages": ["hi"]}, 'messages[0] must be an object, got "hi"', "messages[0]"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content must be a text, got nothing",
            None,
        ),
        (
            {"messages": [{"role": "func", "content": "x"}]},
            "messages[0].role must be one of 'assistant', 'developer', 'system', 'tool' or 'user',",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type must be one of 'text', got \"image_url\"",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "messages[0].tool_calls[0].id must be present, got nothing",
            None,
        ),
        ({"top_logprobs": 21}, "top_logprobs must be an integer of at most 20, got 21", None),
        ({"max_token": 3}, "max_token must be a field of this endpoint, got an unknown one", None),
        (
            {"response_format": {"type": "json"}},
            "response_format.type must be one of 'json_object', 'json_schema' or 'text'",
            None,
        ),
        (
            {"response_format": {"type": "json_schema"}},
            "json_schema must be there with type json_schema, and with no other, got nothing; send",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_object", "json_schema": {"name": "a"}}},
            "json_schema must be there with type json_schema, and with no other, got type json_obj",
            "response_format.json_schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
            "schema must be present, got nothing; add it",
            "response_format.json_schema.schema",
        ),
        (
            {"guided_regex": "a", "response_format": {"type": "json_object"}},
            "response_format and guided_regex are two forms of one answer; send one of them",
            "guided_regex",
        ),
        (
            {"guided_json": {}, "guided_choice": ["a"]},
            "guided_json and guided_choice are two forms of one answer; send one of them",
            "guided_choice",
        ),
        (
            {"prompt_logprobs": 1},
            "prompt_logprobs must be null, got 1; ask /v1/completions for them",
            "prompt_logprobs",
        ),
        (
            {"stream": True, "stream_options": {"continuous_usage_stats": True}},
            "continuous_usage_stats needs include_usage to be true; set it, or leave continuous_",
            "stream_options.continuous_usage_stats",
        ),
        (
            {"messages": [{"role": "user", "content": "", "thinking_blocks": [1]}]},
            "thinking_blocks must be of an assistant's message, got one of role user; remove it",
            "messages[0].thinking_blocks",
        ),
        ({"store": True}, "store must be null or false, got true; nothing is stored here", None),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be true or false, got 1", None),
        ({"metadata": {"a": 1}}, "metadata.a must be a string, got 1", None),
        (
            {"stream_options": {"include_usage": True}},
            "stream_options needs stream to be true; set it",
            "stream_options",
        ),
        ({"top_logprobs": 2}, "top_logprobs needs logprobs to be true; set it", "top_logprobs"),
        (
            {"max_tokens": 3, "max_completion_tokens": 3},
            "max_tokens and max_completion_tokens are two names of one limit; send one of them",
            "max_completion_tokens",
        ),
        ({"user": "x" * 10**5, "n": "y" * 10**5}, "n must be an integer, got another value", None),
    ],
)
def test_a_fault_is_told_by_its_place(more, text, param):
    found = fault(ChatRequest, CHAT | more)
    assert str(found).startswith(text)
    assert found.param == (param or text.partition(" must")[0])
    assert len(str(found)) < 300


def test_a_body_that_is_no_object_is_said_to_be_none():
    assert str(fault(ChatRequest, [1])).startswith("the body must be an object, got [1]; send a")


@pytest.mark.parametrize(
    "prompt", [3, [], [[]], [1, "a"], ["a", 1], [True], [[1], ["a"]], None, {}]
)
def test_prompts_of_other_forms_are_refused(prompt):
    assert fault(CompletionRequest, COMPLETION | {"prompt": prompt}).param.startswith("prompt")


@pytest.mark.parametrize("prompt", ["", "a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_four_forms_are_taken(prompt):
    assert read(CompletionRequest, COMPLETION | {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_null_is_the_same_as_absent(kind, body):
    nulls = dict.fromkeys(set(kind.__struct_fields__) - set(body))
    assert served(read(kind, nulls | body)) == served(read(kind, body))
    assert sampling_of(read(kind, nulls | body)) == DEFAULTS[kind]


def served(request):
    as_sent = {"extra_args", "guided_json", *refusals_of(type(request))}
    names = set(request.__struct_fields__) - as_sent
    return {name: getattr(request, name) for name in names}


@pytest.mark.parametrize(
    ("kind", "within"),
    [
        (ChatRequest, lambda field: CHAT | field),
        (CompletionRequest, lambda field: COMPLETION | field),
        (Message, lambda field: CHAT | {"messages": [CHAT["messages"][0] | field]}),
        (StreamOptions, lambda field: CHAT | {"stream": True, "stream_options": field}),
    ],
)
def test_what_is_not_served_may_ask_for_nothing_and_is_else_refused(kind, within):
    whole = CompletionRequest if kind is CompletionRequest else ChatRequest
    assert refusals_of(kind)
    for name, refusal in refusals_of(kind).items():
        for value in (None, *refusal.allowed):
            assert sampling_of(read(whole, within({name: value}))) == DEFAULTS[whole]
        found = fault(whole, within({name: ["x"]}))
        assert str(found).startswith(f"{name} must be null")
        assert found.param.rpartition(".")[2] == name


def test_fields_about_the_caller_change_nothing():
    about = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert sampling_of(read(ChatRequest, CHAT | about)) == DEFAULTS[ChatRequest]


def test_sampling_fields_arrive_as_they_are():
    asked = {
        "n": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 4,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "min_tokens": 2,
        "stop": ["a"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 3,
        "seed": 5,
        "logit_bias": {"9": 1.5},
        "extra_args": {"length_decay": [20, 1.05]},
        "speculative": "off",
    }
    body = read(CompletionRequest, COMPLETION | asked)
    assert sampling_of(body) == SamplingParams.from_dict(asked)


@pytest.mark.parametrize("kind", [ChatRequest, CompletionRequest])
@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "n", "schema": {}},
                }
            },
            {"json": "{}"},
        ),
        ({"response_format": {"type": "text"}, "guided_regex": "a"}, {"regex": "a"}),
        ({"structured_outputs": {"json": {"type": "null"}}}, {"json": '{"type": "null"}'}),
        ({"structured_outputs": {"json": '{"a": "\\u00e9"}'}}, {"json": '{"a": "\\u00e9"}'}),
        ({"structured_outputs": {"json_object": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": ["a", "b"]}),
        ({"structured_outputs": {"grammar": "start: /a/"}}, {"grammar": "start: /a/"}),
        ({"guided_json": True}, {"json": "true"}),
        ({"guided_json": "{}"}, {"json": "{}"}),
        ({"guided_choice": ["a"]}, {"choice": ["a"]}),
        ({"guided_grammar": "start: /a/"}, {"grammar": "start: /a/"}),
    ],
)
def test_the_form_of_an_answer_may_be_asked_for_in_three_languages(kind, asked, meant):
    body = read(kind, (CHAT if kind is ChatRequest else COMPLETION) | asked)
    assert sampling_of(body) == replace(DEFAULTS[kind], structured_outputs=meant)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"structured_outputs": {}}, "structured_outputs must be one of json, json_object, regex,"),
        (
            {"structured_outputs": {"regex": "a", "choice": ["b"]}},
            "structured_outputs must be one of json, json_object, regex, choice, grammar, got c",
        ),
        ({"guided_regex": ""}, "structured_outputs.regex must be not empty, got an empty text; l"),
    ],
)
def test_a_form_that_says_nothing_or_two_things_is_refused(asked, text):
    with pytest.raises(RequestError, match=re.escape(text)):
        sampling_of(read(ChatRequest, CHAT | asked))


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"best_of": 2},
            "best_of must be n, 1, got 2; ask for n completions and choose among them",
        ),
        ({"best_of": 2, "n": 3}, "best_of must be n, 3, got 2; ask for n completions and choose"),
        (
            {"echo": True, "logprobs": 1, "prompt_logprobs": 2},
            "prompt_logprobs must be logprobs, 1, where there is echo, got 2; leave one of",
        ),
        (
            {"stream": True, "prompt_logprobs": 2},
            "stream and prompt_logprobs exclude each other: a prompt's scores come in one piece;",
        ),
    ],
)
def test_numbers_that_must_agree_are_held_against_each_other(asked, text):
    assert str(fault(CompletionRequest, COMPLETION | asked)).startswith(text)


def test_best_of_n_is_n_and_no_token_is_shown_behind_an_echo_of_none():
    assert sampling_of(read(CompletionRequest, COMPLETION | {"best_of": 3, "n": 3})).n == 3
    body = read(CompletionRequest, COMPLETION | {"echo": True, "max_tokens": 0})
    assert body.echoes_alone
    assert sampling_of(body).max_tokens == 1
    with pytest.raises(RequestError, match="max_tokens must be an integer of at least 1"):
        sampling_of(read(CompletionRequest, COMPLETION | {"max_tokens": 0}))


@pytest.mark.parametrize("value", [-1, 0])
def test_top_k_of_none_keeps_every_token(value):
    assert sampling_of(read(ChatRequest, CHAT | {"top_k": value})) == DEFAULTS[ChatRequest]


def test_text_parts_are_joined_by_line_ends():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "ann"}
    (found,) = read(ChatRequest, CHAT | {"messages": [message]}).messages
    assert (found.role, found.text, found.name) == ("user", "a\nb", "ann")


def test_the_request_in_the_readme_is_one():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (body,) = re.findall(r"/v1/completions -H [^\n]*\n\s+-d '([^']*)'", readme)
    assert read(CompletionRequest, json.loads(body)).model == "bundled"


MANY = 40_000  # items of a body
FAULTS = {
    "messages": {"messages": [{}] * MANY},
    "content": {"messages": [{"role": "user", "content": [{}] * MANY}]},
    "stop": {"stop": [1] * MANY},
    "stop_token_ids": {"stop_token_ids": [""] * MANY},
    "metadata": {"metadata": {str(key): 1 for key in range(MANY)}},
    "logit_bias": {"logit_bias": {str(key): "" for key in range(MANY)}},
    "extra_args": CHAT | {"extra_args": {"a": [[]] * (10 * MANY)}},
    "tools": CHAT | {"tools": [{}] * MANY},
    "f0": {f"f{key}": 1 for key in range(MANY)},
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_a_wrong_body_costs_does_not_grow_with_its_items(name):
    """A validator that tells every fault needs memory for each."""
    body = json.dumps(FAULTS[name]).encode()
    tracemalloc.start()
    try:
        with pytest.raises(ApiError) as refused:
            decoded(ChatRequest, body, ROOM)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.param.startswith(name) or refused.value.param.startswith("messages[0].")
    assert peak < 2 * len(body) + (1 << 20)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"messages": CHAT["messages"] * 2049}, "messages must be a list of at most 2048, got [{"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 2049}]},
            "messages[0].content must be a list of at most 2048, got [{",
        ),
        (
            {"metadata": {str(key): "" for key in range(17)}},
            'metadata must be an object of at most 16, got {"0"',
        ),
        ({"extra_args": {"a": "x" * 2**17}}, "extra_args must be at most 131072 bytes, got 1310"),
        ({"extra_args": [1]}, "extra_args must be an object, got [1]; pass {name: value}"),
    ],
)
def test_counts_are_bounded(more, text):
    assert str(fault(ChatRequest, CHAT | more)).startswith(text)


LONG = "k" * 10**5


@pytest.mark.parametrize(
    "more",
    [
        {LONG: 1},
        {"messages": [{"role": "user", "content": "", LONG: 1}]},
        {"metadata": {LONG[:5000]: 1}},
        {"messages": [{"role": LONG, "content": ""}]},
        {"model": [LONG]},
    ],
    ids=["field", "field of a message", "key", "choice", "value"],
)
def test_a_refusal_does_not_say_again_what_is_long(more):
    refused = fault(ChatRequest, CHAT | more)
    assert len(str(refused)) < 400
    assert len(refused.param) <= 80


def test_a_long_field_of_a_message_is_told_with_its_place():
    refused = fault(ChatRequest, CHAT | {"messages": [{"role": "user", "content": "", LONG: 1}]})
    assert refused.param == f"messages[0].{'k' * 65}..."
    assert refused.code == "unknown_parameter"


def test_counts_of_sampling_fields_are_told_before_their_items():
    for asked, text in (
        ({"stop": [""] * 33}, "stop must be at most 32 strings, got 33"),
        ({"stop_token_ids": [-1] * 33}, "stop_token_ids must be at most 32 ids, got 33"),
        (
            {"logit_bias": {f"x{key}": 1 for key in range(MAX_LOGIT_BIAS + 1)}},
            "logit_bias must be at most 300 entries, got 301",
        ),
    ):
        with pytest.raises(RequestError, match=text):
            sampling_of(read(ChatRequest, CHAT | asked))


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"model": ', "the body must be JSON, got Input data was truncated; send a JSON object"),
        (b'{"store":' + b"[" * 10**6, "the body must be JSON, got more levels than can be read"),
        (b'{"model":"\xff"}', "the body must be JSON, got 'utf-8' codec can't decode byte 0xff"),
        (b'{"temperature":1e999}', "temperature must be in bounds (Number out of range), got 1e"),
        (b'{"seed":1' + b"0" * 5000 + b"}", "seed must be in bounds (Integer value out of range)"),
        (b'{"x` - at `$.n":1}', "n.x must be a field of this endpoint, got an unknown one"),
    ],
)
def test_what_no_client_library_sends_is_told_too(body, text):
    with pytest.raises(ApiError) as refused:
        decoded(ChatRequest, body, ROOM)
    assert str(refused.value).startswith(text)


def never(value):
    return False


@pytest.mark.parametrize("blank", ["", " ", "\r\n\t"])
def test_a_value_is_shown_as_it_was_sent(blank):
    text = '{ "a" : [ { "b" : 1 } , { "c,]" : { "x" : "]" , "y" : 1.50 } } ] , "d" : 2 }'
    body = text.replace(" ", blank).encode()
    assert find(body, ("a", 1, "c,]", "y"), never).text == "1.50"
    assert find(body, ("a", 1, "c,]", "..."), lambda value: value == 1.5).place[-1] == "y"
    assert find(body, ("d",), never) == (("d",), "2")
    assert find(body, ("a", 0), never).text == '{ "b" : 1 }'.replace(" ", blank)


def test_a_value_that_lies_far_behind_is_not_looked_for():
    body = b'{"a":"%s","b":12}' % (b"x" * (1 << 16))
    assert find(body, ("b",), bool) is None
    assert find(body, ("a",), bool).text == '"' + "x" * 76 + "..."
    assert find(b'{"b":%s12}' % (b" " * ((1 << 16) - 6)), ("b",), bool) is None


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_the_schema_takes_what_the_server_takes(kind, body):
    schema = body_schema(kind)["requestBody"]["content"]["application/json"]["schema"]
    assert set(schema["properties"]) == set(kind.__struct_fields__)
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(body, schema)
    for wrong in ({"n": "1"}, {"no_field": 1}, {"messages": []}, {"prompt": {}}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(body | wrong, schema)
