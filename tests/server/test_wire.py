"""What a request may hold, and what is said about the rest; no engine."""

import json
import re
from pathlib import Path

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import ValidationError

from paceline.core.sampling_params import SamplingParams
from paceline.server.faults import fault_of
from paceline.server.refusals import CHAT_REFUSALS, COMPLETION_REFUSALS
from paceline.server.wire import ChatRequest, CompletionRequest

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def fault(kind, body):
    with pytest.raises(ValidationError) as refused:
        kind.model_validate(body)
    return fault_of(refused.value.errors(), body)


@pytest.mark.parametrize(
    ("theirs", "ours", "refusals"),
    [
        (
            completion_create_params.CompletionCreateParamsBase,
            CompletionRequest,
            COMPLETION_REFUSALS,
        ),
        (chat_create_params.CompletionCreateParamsBase, ChatRequest, CHAT_REFUSALS),
    ],
)
def test_every_field_the_openai_client_knows_is_served_or_refused_by_name(theirs, ours, refusals):
    assert set(theirs.__annotations__) <= set(ours.model_fields) | set(refusals)
    assert not set(ours.model_fields) & set(refusals)


@pytest.mark.parametrize(
    ("more", "text", "param"),
    [
        ({"temperature": "1"}, "temperature must be a number, got '1'; types are strict", None),
        ({"temperature": True}, "temperature must be a number, got True", None),
        ({"max_tokens": 1.0}, "max_tokens must be an integer, got 1.0", None),
        ({"seed": True}, "seed must be an integer, got True", None),
        ({"stream": 1}, "stream must be true or false, got 1", None),
        ({"stop": 3}, "stop must be a string or a list, got 3", None),
        ({"stop": ["a", 3]}, "stop[1] must be a string, got 3", "stop[1]"),
        ({"logit_bias": {"5": "x"}}, "logit_bias.5 must be a number, got 'x'", "logit_bias.5"),
        ({"stream_options": {"usage": True}}, "stream_options.usage must be a field of this", None),
        ({"messages": []}, "messages must be a list of at least 1, got []", None),
        ({"messages": "hi"}, "messages must be a list, got 'hi'", None),
        ({"messages": ["hi"]}, "messages[0] must be an object, got 'hi'", "messages[0]"),
        (
            {"messages": [{"role": "user"}]},
            "messages[0].content must be present, got nothing",
            None,
        ),
        (
            {"messages": [{"role": "tool", "content": "x"}]},
            "messages[0].role must be one of 'system', 'developer', 'user' or 'assistant', got",
            None,
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type must be one of 'text', got 'image_url'",
            None,
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "tool_calls must be null or [], got [{}]; this server calls no tools",
            "messages[0].tool_calls",
        ),
        ({"top_logprobs": 21}, "top_logprobs must be at most 20, got 21", None),
        ({"max_token": 3}, "max_token must be a field of this endpoint, got an unknown one", None),
        (
            {"response_format": {"type": "json_object"}},
            'response_format must be null or {"type": "text"}, got {"type": "json_object"}; the',
            None,
        ),
        ({"store": True}, "store must be null or false, got true; nothing is stored here", None),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls must be null or true or false", None),
        ({"metadata": {"a": 1}}, "metadata.a must be a string, got 1", None),
        ({"user": "x" * 10**6, "n": "y" * 10**6}, "n must be an integer, got 'yyyy", None),
    ],
)
def test_a_fault_is_told_by_its_place(more, text, param):
    found = fault(ChatRequest, CHAT | more)
    assert found.text.startswith(text)
    assert found.param == (param or text.partition(" must")[0])
    assert len(found.text) < 300


def test_a_body_that_is_no_object_is_said_to_be_none():
    assert fault(ChatRequest, [1]).text.startswith("the body must be an object, got [1]; send a")


@pytest.mark.parametrize(
    "prompt", [3, [], [[]], [1, "a"], ["a", 1], [True], [[1], ["a"]], None, {}]
)
def test_prompts_of_other_forms_are_refused(prompt):
    assert fault(CompletionRequest, COMPLETION | {"prompt": prompt}).param.startswith("prompt")


@pytest.mark.parametrize("prompt", ["", "a", ["a", "b"], [1, 2], [[1], [2, 3]]])
def test_prompts_of_four_forms_are_taken(prompt):
    assert CompletionRequest.model_validate(COMPLETION | {"prompt": prompt}).prompt == prompt


@pytest.mark.parametrize(("kind", "body"), [(ChatRequest, CHAT), (CompletionRequest, COMPLETION)])
def test_null_is_the_same_as_absent(kind, body):
    names = set(kind.model_fields) | set(kind.refusals)
    request = kind.model_validate(dict.fromkeys(names - set(body)) | body)
    assert request == kind.model_validate(body)
    assert request.sampling() == SamplingParams()


def test_values_that_ask_for_nothing_are_taken():
    for refusals, kind, body in [
        (CHAT_REFUSALS, ChatRequest, CHAT),
        (COMPLETION_REFUSALS, CompletionRequest, COMPLETION),
    ]:
        for name, refusal in refusals.items():
            for value in refusal.allowed:
                assert kind.model_validate(body | {name: value}) == kind.model_validate(body)


def test_fields_about_the_caller_change_nothing():
    about = {"user": "u", "metadata": {"a": "b"}, "safety_identifier": "s", "prompt_cache_key": "k"}
    assert ChatRequest.model_validate(CHAT | about).sampling() == SamplingParams()


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
        "seed": 5,
        "logit_bias": {"9": 1.5},
        "extra_args": {"length_decay": [20, 1.05]},
        "speculative": "off",
    }
    body = CompletionRequest.model_validate(COMPLETION | asked)
    assert body.sampling() == SamplingParams.from_dict(asked)


def test_text_parts_are_joined_by_line_ends():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts, "name": "ann"}
    (found,) = ChatRequest.model_validate(CHAT | {"messages": [message]}).messages
    assert found.for_template() == {"role": "user", "content": "a\nb", "name": "ann"}


def test_the_request_in_the_readme_is_one():
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    (body,) = re.findall(r"/v1/completions -H [^\n]*\n\s+-d '([^']*)'", readme)
    assert CompletionRequest.model_validate(json.loads(body)).model == "bundled"
