"""/v1/embeddings: the unmodified openai client, against vectors of LLM.embed."""

import base64
import struct

import httpx
import numpy as np
import openai
import pytest
from serving import CONTEXT, serving, small_llm, wait_until

TEXTS = ["def fibonacci(n):", "import os", "class Stack:\n    pass"]


@pytest.fixture(scope="module")
def world():
    """The server, and the vectors before it is served."""
    llm = small_llm(pooling="mean")
    expected = [each.vector.tolist() for each in llm.embed(TEXTS)]
    with serving(llm) as server:
        yield server, expected


@pytest.fixture(scope="module")
def client(world):
    return openai.OpenAI(base_url=f"{world[0].url}/v1", api_key="any", max_retries=0)


@pytest.fixture(autouse=True)
def _nothing_is_left(world):
    yield
    wait_until(world[0].is_idle)


def near(found: list[float], wanted: list[float]) -> bool:
    return np.allclose(found, wanted, atol=1e-6)


@pytest.mark.parametrize("asked", [{}, {"encoding_format": "float"}, {"encoding_format": "base64"}])
def test_the_client_gets_the_vectors_in_their_order(world, client, asked) -> None:
    """It asks for base64 of itself, and reads it; asked for by name it hands it on."""
    server, expected = world
    answer = client.embeddings.create(model="tiny", input=TEXTS, **asked)
    assert (answer.object, answer.model) == ("list", "tiny")
    assert [each.index for each in answer.data] == [0, 1, 2]
    for each, wanted in zip(answer.data, expected, strict=True):
        found = each.embedding
        if "base64" in asked.values():
            raw = base64.b64decode(found)
            found = struct.unpack(f"<{len(raw) // 4}f", raw)
        assert near(found, wanted)
    num_tokens = sum(len(server.tokenizer.encode(text)) for text in TEXTS)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == num_tokens


def test_ids_and_one_input_alone_are_taken(world, client) -> None:
    server, expected = world
    ids = [server.tokenizer.encode(text) for text in TEXTS]
    for sent, wanted in ((TEXTS[0], expected[:1]), (ids[0], expected[:1]), (ids, expected)):
        answer = client.embeddings.create(model="tiny", input=sent)
        for each, vector in zip(answer.data, wanted, strict=True):
            assert near(each.embedding, vector)


def test_dimensions_and_length_are_as_asked(world, client) -> None:
    wanted = np.array(world[1][0][:8])
    [cut] = client.embeddings.create(model="tiny", input=TEXTS[0], dimensions=8).data
    assert near(cut.embedding, wanted / np.linalg.norm(wanted))
    raw = client.embeddings.create(model="tiny", input=TEXTS[0], extra_body={"normalize": False})
    length = np.linalg.norm(raw.data[0].embedding)
    assert abs(length - 1.0) > 1e-3
    assert near(np.array(raw.data[0].embedding) / length, world[1][0])


def test_many_clients_and_answers_at_once(world, client) -> None:
    """A text is pooled while others are generated."""
    stream = client.completions.create(model="tiny", prompt=TEXTS[0], max_tokens=30, stream=True)
    first = next(iter(stream))
    found = client.embeddings.create(model="tiny", input=TEXTS * 5).data
    assert first.choices
    assert sum(len(chunk.choices) for chunk in stream)
    for index, each in enumerate(found):
        assert near(each.embedding, world[1][index % 3])


@pytest.mark.parametrize(
    ("body", "text", "param"),
    [
        ({"input": []}, "input must be", "input"),
        ({"input": ["a", 3]}, "input[1] must be like those before it", "input[1]"),
        ({"input": ""}, "input must be at least one token, got none", "input"),
        ({"input": "a", "dimensions": 0}, "dimensions must be", "dimensions"),
        ({"input": "a", "dimensions": 1 << 20}, "dimensions must be an integer", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format must be", "encoding_format"),
        ({"input": "a", "stream": True}, "stream must be", "stream"),
        ({"input": [4] * (CONTEXT + 1)}, f"input must be within the context of {CONTEXT}", "input"),
        ({"input": "x " * 9 * CONTEXT}, f"input must be within the context of {CONTEXT}", "input"),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(world, body, text, param) -> None:
    sent = httpx.post(f"{world[0].url}/v1/embeddings", json={"model": "tiny"} | body)
    error = sent.json()["error"]
    assert sent.status_code == 400, error
    assert error["message"].startswith(text)
    assert error["param"] == param
    if "context" in text:
        assert error["message"].endswith("; shorten it: it is not cut")


def test_a_text_may_fill_the_context(client) -> None:
    [found] = client.embeddings.create(model="tiny", input=[4] * CONTEXT).data
    assert len(found.embedding) > 1


def test_a_large_body_is_counted_before_it_is_read(world) -> None:
    """It has more inputs than the queue has places."""
    sent = httpx.post(
        f"{world[0].url}/v1/embeddings", json={"model": "tiny", "input": ["a"] * 30000}
    )
    assert sent.status_code == 400
    assert "at most" in sent.json()["error"]["message"]


def test_a_model_that_makes_no_vectors_says_what_would(world) -> None:
    with serving(small_llm()) as server:
        sent = httpx.post(f"{server.url}/v1/embeddings", json={"model": "tiny", "input": "a"})
        wait_until(server.is_idle)
    assert sent.status_code == 400
    text = "the request must be one of what this model does: generate, score, got embed; start the"
    assert sent.json()["error"]["message"].startswith(text)
