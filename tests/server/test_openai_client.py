"""The unmodified openai client against a real server with the bundled model."""

import asyncio
import json

import httpx
import openai
import pytest
from serving import serving, small_llm, wait_until

from paceline.core.request.sampling_params import SamplingParams

PROMPT = "def fibonacci(n):"
PROMPTS = [f"def f{i}(x, y):\n    return x {op} y" for i in range(4) for op in "+-*/"]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
TOOL = {"type": "function", "function": {"name": "f"}}
MESSAGES = [{"role": "system", "content": "# python"}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def world():
    """The server, and what LLM.generate says before it is served."""
    llm = small_llm()
    expected = {
        prompt: llm.generate(prompt, GREEDY)[0].outputs[0].text for prompt in [PROMPT, *PROMPTS]
    }
    with serving(llm) as server:
        yield server, expected


@pytest.fixture(scope="module")
def client(world):
    return openai.OpenAI(base_url=f"{world[0].url}/v1", api_key="any", max_retries=0)


@pytest.fixture(autouse=True)
def _nothing_is_left(world):
    yield
    wait_until(world[0].is_idle)


def complete(client, **asked):
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 12} | asked
    )


def chat(client, **asked):
    return client.chat.completions.create(
        **{"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 12} | asked
    )


def joined(chunks, index=0):
    """The text of one choice of a stream, of either kind."""
    text = ""
    for chunk in chunks:
        for choice in chunk.choices:
            if choice.index == index:
                text += (choice.text if hasattr(choice, "text") else choice.delta.content) or ""
    return text


def test_models_are_listed_and_found(client):
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "paceline"


def test_a_completion_is_what_generate_returns(client, world):
    answer = complete(client)
    assert answer.choices[0].text == world[1][PROMPT]
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint.startswith("fp_")
    assert answer.choices[0].finish_reason == "length"


def test_usage_counts_tokens_and_those_found_in_the_cache(client, world):
    prompt = list(range(100, 160))
    first, second = (complete(client, prompt=prompt, max_tokens=3).usage for _ in range(2))
    assert (first.prompt_tokens, first.completion_tokens, first.total_tokens) == (60, 3, 63)
    assert first.prompt_tokens_details.cached_tokens == 0
    assert second.prompt_tokens_details.cached_tokens >= 32


def test_a_streamed_completion_is_the_same_text_in_pieces(client, world):
    chunks = list(complete(client, stream=True))
    assert joined(chunks) == world[1][PROMPT]
    assert len(chunks) > 3
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]


def test_a_stream_ends_with_its_usage_when_asked(client):
    *chunks, last = complete(client, stream=True, stream_options={"include_usage": True})
    assert last.choices == []
    assert last.usage == complete(client).usage.model_copy(
        update={"prompt_tokens_details": last.usage.prompt_tokens_details}
    )
    assert all(chunk.usage is None for chunk in chunks)


def test_prompts_of_every_form_are_answered_in_order(client, world):
    texts = [choice.text for choice in complete(client, prompt=PROMPTS[:3]).choices]
    assert texts == [world[1][prompt] for prompt in PROMPTS[:3]]
    tokenizer = world[0].llm.tokenizer
    ids = [tokenizer.encode(prompt) for prompt in PROMPTS[:3]]
    assert [choice.text for choice in complete(client, prompt=ids).choices] == texts
    assert complete(client, prompt=ids[0]).choices[0].text == texts[0]


def test_a_chat_is_its_rendered_template_completed(client, world):
    answer = chat(client)
    text = "\n".join(entry["content"] for entry in MESSAGES)
    assert answer.choices[0].message.content == complete(client, prompt=text).choices[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.object == "chat.completion"
    parts = [{"type": "text", "text": "# python"}, {"type": "text", "text": PROMPT}]
    split = chat(client, messages=[{"role": "user", "content": parts}])
    assert split.choices[0].message.content == answer.choices[0].message.content


def test_a_streamed_chat_begins_with_its_role_and_ends_with_a_reason(client):
    chunks = list(chat(client, stream=True))
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[-1].choices[0].finish_reason == "length"
    assert joined(chunks) == chat(client).choices[0].message.content


def test_an_answer_becomes_the_next_request_unchanged(client):
    message = chat(client).choices[0].message
    again = chat(client, messages=[*MESSAGES, message, {"role": "user", "content": "x = 1"}])
    assert again.choices[0].message.content


def test_seeds_repeat_and_differ(client):
    def text(seed):
        return complete(client, temperature=1.0, seed=seed, max_tokens=16).choices[0].text

    assert text(7) == text(7)
    assert text(7) != text(8)


@pytest.mark.parametrize("stream", [False, True])
def test_n_completions_differ_and_the_first_is_that_of_one(client, stream):
    asked = {"temperature": 1.0, "seed": 3, "extra_body": {"ignore_eos": True}}
    alone = complete(client, **asked).choices[0].text
    asked |= {"n": 3, "stream": stream}
    answer = complete(client, **asked)
    if stream:
        chunks = list(answer)
        texts = [joined(chunks, index) for index in range(3)]
    else:
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        texts = [choice.text for choice in answer.choices]
        assert answer.usage.completion_tokens == 36
    assert len(set(texts)) == 3
    assert texts[0] == alone


def test_a_stop_string_ends_the_text_before_it(client, world):
    whole = world[1][PROMPT]
    stop = whole.strip()[3:6]
    choice = complete(client, stop=[stop, "never"]).choices[0]
    assert choice.text == whole[: whole.index(stop)]
    assert choice.finish_reason == "stop"
    assert joined(complete(client, stop=stop, stream=True)) == choice.text


def test_extensions_reach_the_sampler(client, world):
    likeliest = complete(client, temperature=2.0, seed=1, extra_body={"top_k": 1})
    assert likeliest.choices[0].text == world[1][PROMPT]
    token = world[0].llm.tokenizer.encode(world[1][PROMPT])[2]
    ended = complete(client, extra_body={"stop_token_ids": [token], "min_tokens": 1})
    assert ended.choices[0].finish_reason == "stop"
    banned = complete(client, logit_bias={str(token): -100})
    assert token not in world[0].llm.tokenizer.encode(banned.choices[0].text)


def test_completion_logprobs_are_parallel_lists(client):
    choice = complete(client, logprobs=3).choices[0]
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    for at, token, value, top in zip(
        found.text_offset, found.tokens, found.token_logprobs, found.top_logprobs, strict=True
    ):
        assert choice.text[at:].startswith(token)
        assert top[token] == value == max(top.values())  # greedy
        assert len(top) == 3


def test_tokens_of_one_character_share_its_offset(client):
    """Of "é日本x": two, three and three bytes, in eight tokens."""
    asked = {"prompt": "é日本x", "echo": True, "logprobs": 0, "max_tokens": 1}
    found = complete(client, **asked).choices[0].logprobs
    assert found.text_offset == [0, 0, 1, 1, 1, 2, 2, 2, 3, 4]
    assert found.tokens[0].startswith("token_id:")
    (first, *_) = complete(client, **asked, stream=True)
    assert first.choices[0].logprobs.text_offset == found.text_offset


def test_an_echoed_prompt_is_scored_as_it_was_when_it_was_generated(client):
    made = complete(client, logprobs=0).choices[0]
    text = PROMPT + made.text
    scored = complete(client, prompt=text, echo=True, logprobs=2, max_tokens=1).choices[0]
    assert scored.text.startswith(text)
    found = scored.logprobs
    assert "".join(found.tokens) == scored.text
    assert found.token_logprobs[0] is None
    assert found.top_logprobs[0] is None
    assert found.token_logprobs[-13:-1] == pytest.approx(made.logprobs.token_logprobs, abs=1e-3)
    streamed = list(complete(client, prompt=text, echo=True, logprobs=2, max_tokens=1, stream=True))
    assert joined(streamed) == scored.text
    assert streamed[0].choices[0].logprobs.tokens[: len(found.tokens) - 1] == found.tokens[:-1]


def test_each_of_n_streamed_completions_brings_the_scored_prompt_once(client, world):
    """The others follow the first, so that one begins while another goes on."""
    prompt = world[0].llm.tokenizer.encode(PROMPT * 6)
    asked = {"prompt": prompt, "echo": True, "logprobs": 0, "n": 3, "max_tokens": 6}
    found = {0: [], 1: [], 2: []}
    for chunk in complete(client, **asked, stream=True, extra_body={"ignore_eos": True}):
        found[chunk.choices[0].index].extend(chunk.choices[0].logprobs.tokens)
    assert [len(tokens) for tokens in found.values()] == [len(prompt) + 6] * 3


@pytest.mark.parametrize("stream", [False, True])
def test_chat_logprobs_are_one_object_per_token(client, stream):
    answer = chat(client, logprobs=True, top_logprobs=2, stream=stream)
    if stream:
        chunks = list(answer)
        found = [c.choices[0].logprobs for c in chunks if c.choices[0].logprobs is not None]
        content, text = [each for one in found for each in one.content], joined(chunks)
    else:
        content = answer.choices[0].logprobs.content
        text = answer.choices[0].message.content
    assert len(content) == 12
    assert b"".join(bytes(each.bytes) for each in content).decode() == text
    assert all(each.top_logprobs[0].token == each.token for each in content)  # greedy
    assert all(len(each.top_logprobs) == 2 for each in content)


def test_logprobs_of_none_beside_the_chosen(client):
    assert chat(client, logprobs=True).choices[0].logprobs.content[0].top_logprobs == []
    assert chat(client, logprobs=False).choices[0].logprobs is None


def test_sixteen_streams_at_once_get_their_own_answers(world):
    server, expected = world

    async def one(client, prompt):
        stream = await client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_of_them():
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any") as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in PROMPTS))

    assert asyncio.run(all_of_them()) == [expected[prompt] for prompt in PROMPTS]


@pytest.mark.parametrize(
    ("call", "asked", "param", "code"),
    [
        (complete, {"model": "other"}, "model", "model_not_found"),
        (complete, {"max_tokens": 300}, "prompt", "context_length_exceeded"),
        (complete, {"prompt": [5] * 256}, "prompt", "context_length_exceeded"),
        (chat, {"max_tokens": 300}, "messages", "context_length_exceeded"),
        (complete, {"prompt": ""}, "prompt", None),
        (complete, {"prompt": [4096]}, None, None),
        (complete, {"temperature": -1}, "temperature", None),
        (complete, {"logit_bias": {"x": 1}}, "logit_bias", None),
        (complete, {"stream_options": {}}, "stream_options", None),
        (chat, {"top_logprobs": 2}, "top_logprobs", None),
        (chat, {"max_completion_tokens": 3}, "max_completion_tokens", None),
        (chat, {"tools": [TOOL]}, "tools", "unsupported_parameter"),
        (chat, {"extra_body": {"foo": 1}}, "foo", "unknown_parameter"),
        (chat, {"seed": 1, "temperature": "1"}, "temperature", None),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(client, call, asked, param, code):
    kind = openai.NotFoundError if code == "model_not_found" else openai.BadRequestError
    for stream in (False, True):
        if "stream_options" in asked and stream:
            continue
        with pytest.raises(kind) as refused:
            call(client, **asked, stream=stream)
        assert refused.value.type == "invalid_request_error"
        assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        (
            "completions",
            {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": 6, "logprobs": None},
        ),
        (
            "chat/completions",
            {
                "messages": [{"role": "user", "content": [{"type": "text", "text": PROMPT}]}],
                "max_completion_tokens": 6,
            },
        ),
    ],
)
def test_what_vllms_bench_client_sends_is_answered_as_it_reads(world, path, asked):
    """As vLLM 0.33 does; the client itself: clients/test_vllm_bench.py."""
    body = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, **asked}
    answer = httpx.post(
        f"{world[0].url}/v1/{path}",
        json=body | {"ignore_eos": True},
        headers={"x-request-id": "bench-0"},
        timeout=60,
    )
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "bench-0")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *pieces, last = [json.loads(each.removeprefix("data: ")) for each in events]
    assert all(piece["choices"] for piece in pieces)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 6)
