"""`"trace_tokens": true`: where the tokens of an answer came from, whole and streamed."""

import json

import httpx
import pytest
from openai import OpenAI
from scripted import scripted_service
from serving import serving, small_llm

from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.answers.trace import Round, Trace
from paceline.server.tokens.trace import Traces

BODY = {"model": "tiny", "prompt": "def fibonacci(n):", "max_tokens": 20, "temperature": 0,
        "ignore_eos": True, "trace_tokens": True}  # fmt: skip
CHAT = {"messages": [{"role": "user", "content": "x = 1"}], "prompt": None}
SHAPES = {
    "chain": {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
    "tree": {"speculative_eagle_topk": 3, "speculative_num_steps": 3,
             "speculative_num_draft_tokens": 8},
}  # fmt: skip


@pytest.fixture(scope="module", params=SHAPES)
def server(request):
    with serving(small_llm(**SHAPES[request.param])) as world:
        yield world


def post(server, path="completions", **more):
    body = {name: value for name, value in (BODY | more).items() if value is not None}
    answer = httpx.post(f"{server.url}/v1/{path}", json=body, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def check(trace, token_ids):
    """Rounds and tokens tell one story."""
    tokens = trace["tokens"]
    assert [each["id"] for each in tokens] == list(token_ids)
    is_drafted = [False] * len(tokens)
    ends = [1]  # prefill brings the first token
    for found in trace["rounds"]:
        drafts, taken = found["drafts"], [each for each in found["drafts"] if each["taken"]]
        assert found["emitted"] == len(taken) + 1
        assert found["at"] >= ends[-1]  # plain steps may lie between
        ends.append(found["at"] + found["emitted"])
        at = found["at"]
        assert [each["id"] for each in taken] == [each["id"] for each in tokens[at : ends[-1] - 1]]
        is_drafted[at : ends[-1] - 1] = [True] * len(taken)
        assert all(each["parent"] < index for index, each in enumerate(drafts))
        above = -1
        for index, draft in enumerate(drafts):
            if draft["taken"]:
                assert draft["parent"] == above
                above = index
    assert [each["drafted"] for each in tokens] == is_drafted
    assert ends[-1] <= len(tokens)


def test_a_whole_answer_tells_its_tokens_and_rounds(server):
    (choice,) = post(server).json()["choices"]
    check(choice["trace"], [each["id"] for each in choice["trace"]["tokens"]])
    assert "".join(each["text"] for each in choice["trace"]["tokens"]) == choice["text"]
    prompt = choice["trace"]["prompt"]["tokens"]
    assert [each["id"] for each in prompt] == server.tokenizer.encode(BODY["prompt"])
    assert "".join(each["text"] for each in prompt).endswith(BODY["prompt"])
    assert any(each["taken"] for found in choice["trace"]["rounds"] for each in found["drafts"])


@pytest.mark.parametrize("more", [{}, {"logprobs": 2}], ids=str)
def test_a_stream_tells_the_same_piece_by_piece(server, more):
    (choice,) = post(server).json()["choices"]
    pieces = [e["choices"][0] for e in events(post(server, stream=True, **more)) if e["choices"]]
    joined = {"tokens": [], "rounds": []}
    for piece in pieces:
        for name in joined:
            joined[name] += piece["trace"][name]
        if more and piece["logprobs"]:
            assert len(piece["logprobs"]["tokens"]) == len(piece["trace"]["tokens"])
    assert [("prompt" in piece["trace"]) for piece in pieces] == [True] + [False] * (
        len(pieces) - 1
    )
    assert joined == {name: choice["trace"][name] for name in joined}


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_tells_it_too_with_log_probabilities_beside(server, stream):
    more = CHAT | {"logprobs": True, "top_logprobs": 1}
    answer = post(server, "chat/completions", stream=stream, **more)
    choices = [answer.json()["choices"][0]] if not stream else [
        found["choices"][0] for found in events(answer) if found["choices"]
    ]  # fmt: skip
    tokens, rounds = [], []
    for choice in choices:
        if "trace" in choice:
            assert len(choice["trace"]["tokens"]) == len(choice["logprobs"]["content"])
            tokens += choice["trace"]["tokens"]
            rounds += choice["trace"]["rounds"]
    check({"tokens": tokens, "rounds": rounds}, [each["id"] for each in tokens])
    assert len(tokens) == 20


def test_a_hit_is_told_before_the_first_token_is(server):
    long = {"prompt": "y = 2\n" * 20, "max_tokens": 2}
    for expected in (False, True):
        first = events(post(server, stream=True, **long))[0]["choices"][0]["trace"]["prompt"]
        assert (first["cached"] > 0) == expected
    usage = post(server, **long).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == first["cached"]


def test_who_takes_no_drafts_has_no_rounds(server):
    (choice,) = post(server, speculative=False).json()["choices"]
    assert choice["trace"]["rounds"] == []
    assert not any(each["drafted"] for each in choice["trace"]["tokens"])


def test_the_prompt_is_told_once_for_its_completions(server):
    choices = post(server, n=2, seed=1, temperature=1.0).json()["choices"]
    assert ["prompt" in each["trace"] for each in choices] == [True, False]
    for choice in choices:
        check(choice["trace"], [each["id"] for each in choice["trace"]["tokens"]])


def test_an_echo_alone_tells_its_prompt(server):
    (choice,) = post(server, echo=True, max_tokens=0).json()["choices"]
    assert choice["trace"]["tokens"] == choice["trace"]["rounds"] == []
    assert choice["trace"]["prompt"]["tokens"]


def test_who_does_not_ask_is_told_nothing_and_nothing_is_copied(server, monkeypatch):
    asked = []
    launch = server.llm.engine._runner.launch
    monkeypatch.setattr(
        server.llm.engine._runner, "launch", lambda step: asked.append(step) or launch(step)
    )
    for more in ({"trace_tokens": None}, {"trace_tokens": False}):
        assert "trace" not in post(server, **more).text
    assert asked
    assert not any(step.tells_drafts for step in asked)
    post(server)
    assert any(step.tells_drafts for step in asked if step.is_round)
    assert not any(step.tells_drafts for step in asked if not step.is_round)


@pytest.mark.parametrize("shape", SHAPES)
def test_poison_changes_no_draft_that_is_told(shape):
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True, trace_tokens=True)
    told = []
    for sanitize in (False, True):
        with small_llm(sanitize=sanitize, **SHAPES[shape]) as llm:
            (output,) = llm.generate([BODY["prompt"]], params)
        told.append(output.outputs[0].trace)
    assert told[0] == told[1]
    assert told[0].rounds


def test_the_unmodified_client_reads_it(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="any")
    stream = client.chat.completions.create(
        model="tiny",
        messages=CHAT["messages"],
        max_tokens=8,
        stream=True,
        extra_body={"trace_tokens": True, "ignore_eos": True},
    )
    told = [chunk.choices[0].trace for chunk in stream if hasattr(chunk.choices[0], "trace")]
    assert sum(len(each["tokens"]) for each in told) == 8


def test_other_apis_do_not_take_it(server):
    body = {"model": "tiny", "input": "x", "trace_tokens": True}
    assert httpx.post(f"{server.url}/v1/responses", json=body).status_code == 400


def test_a_character_of_several_tokens_is_told_by_its_last():
    names = scripted_service(None).names
    ids = names._tokenizer.encode("é😀a", add_special_tokens=False)
    traces, told = Traces(names), []
    for at, token in enumerate(ids):
        output = CompletionOutput(
            text="",
            token_ids=(token,),
            is_drafted=(False,),
            num_tokens_before=at,
            trace=Trace(cached_tokens=0),
        )
        growth = RequestOutput(
            request_id="r",
            prompt=None,
            prompt_token_ids=(),
            outputs=(),
            finished=False,
            metrics=None,
        )
        told += traces.of(0, growth, output)["trace"]["tokens"]
    assert "".join(each["text"] for each in told) == "é😀a"
    assert len(told) > 3
    drafted = Round(at=1, emitted=1, token_ids=(5,), parents=(-1,), taken=())
    assert traces._round(drafted)["drafts"][0]["taken"] is False
