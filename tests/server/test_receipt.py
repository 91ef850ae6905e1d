"""`"receipt": true`: what the engine did for one request, in its last document."""

import json
from pathlib import Path

import httpx
import jsonschema
import pytest
from openai import OpenAI
from serving import serving, small_llm

from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"
BODY = {"model": "tiny", "prompt": "def f(x):", "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def server():
    with serving(small_llm(speculative_algorithm="off")) as world:
        yield world


def post(server, **more):
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | more, timeout=None)
    assert answer.status_code == 200, answer.text
    return answer


def steps(receipt):
    return {(row["phase"], row["run"]): row for row in receipt["phases"]}


def test_a_receipt_tells_backend_steps_and_counts(server):
    prompt = len(server.llm.tokenizer.encode(BODY["prompt"]))
    (receipt,) = post(server, receipt=True, temperature=0).json()["receipt"]
    assert receipt["attention"] == {"prefill": "torch", "decode": "torch"}
    assert receipt["drafter"] is None
    assert receipt["versions"]["torch"]
    assert receipt["queue_s"] >= 0
    found = steps(receipt)
    assert found[("prefill", "eager")]["tokens"] == prompt - receipt["cached_tokens"]
    assert found[("decode", "eager")]["steps"] == 7
    assert found[("decode", "eager")]["tokens"] == 7
    assert (receipt["preemptions"], receipt["fallbacks"], receipt["rounds"]) == (0, [], 0)


def test_a_hit_is_on_the_receipt(server):
    long = {"prompt": "x = 1\n" * 30}
    (first,) = post(server, receipt=True, **long).json()["receipt"]
    (again,) = post(server, receipt=True, **long).json()["receipt"]
    assert again["cached_tokens"] > first["cached_tokens"]
    spared = again["cached_tokens"] - first["cached_tokens"]
    computed = [steps(each)[("prefill", "eager")]["tokens"] for each in (first, again)]
    assert computed[0] - computed[1] == spared


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}], ids=str)
def test_a_stream_brings_it_in_its_last_chunk(server, options):
    text = post(server, receipt=True, stream=True, **options).text
    events = [line.removeprefix("data: ") for line in text.splitlines() if line]
    assert events[-1] == "[DONE]"
    last = json.loads(events[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    assert steps(last["receipt"][0])[("decode", "eager")]["steps"] == 7
    assert not any("receipt" in each for each in events[:-2])


def test_who_does_not_ask_hears_nothing_and_the_engine_notes_nothing(server):
    for more in ({}, {"receipt": False}, {"receipt": None}):
        assert "receipt" not in post(server, **more).json()
    assert "receipt" not in post(server, stream=True).text
    assert not server.llm.engine._noted


def test_several_prompts_bring_one_each_and_completions_share_theirs(server):
    body = {"prompt": ["a", "b = 2"], "n": 2, "seed": 3}
    receipts = post(server, receipt=True, **body).json()["receipt"]
    assert len(receipts) == 2
    assert [steps(each)[("decode", "eager")]["steps"] for each in receipts] == [14, 14]


def test_the_unmodified_client_reads_it(server):
    client = OpenAI(base_url=f"{server.url}/v1", api_key="any")
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=4,
        extra_body={"receipt": True, "ignore_eos": True},
    )
    assert answer.receipt[0]["phases"]


def test_a_receipt_is_true_or_false(server):
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"receipt": 1})
    assert answer.status_code == 400
    assert "receipt" in answer.json()["error"]["message"]


def test_an_aborted_request_is_noted_no_further():
    with small_llm(speculative_algorithm="off") as llm:
        params = SamplingParams(max_tokens=20, ignore_eos=True, receipt=True)
        (tracker,) = llm.submit(["def f"], params)
        llm.engine.step()
        assert llm.engine._noted == {tracker}
        llm.abort(tracker.request.request_id)
        assert not llm.engine._noted


def test_rounds_and_graphs_are_told_from_python():
    with LLM("bundled", dtype="float32", threads=1, max_num_seqs=4, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, receipt=True)
        (output,) = llm.generate(["def fibonacci(n):"], params)
    metrics = output.metrics
    found = steps(metrics.receipt_document())
    assert {"prefill", "round"} <= {phase for phase, _ in found}
    assert ("round", "graph") in found
    assert found[("round", "capture")]["steps"] == 1
    rounds = sum(row["steps"] for (phase, _), row in found.items() if phase == "round")
    assert rounds >= metrics.rounds > 0
    assert metrics.receipt_document()["drafter"]
    document = output.as_document()
    assert document["metrics"]["receipt"]["phases"]
    schema = json.loads((SCHEMAS / "generate.json").read_text())["properties"]["metrics"]
    jsonschema.validate(json.loads(json.dumps(document["metrics"])), schema)
