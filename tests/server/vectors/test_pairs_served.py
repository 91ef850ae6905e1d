"""/v1/rerank and /v1/score, against the scores of LLM.score_pairs."""

import httpx
import pytest
from classifiers import CONTEXT, make_cross_encoder, some_pairs
from llm_cases import random_prompts
from serving import serving, small_llm, wait_until

from paceline.llm.llm import LLM

QUERY, DOCUMENTS = some_pairs(random_prompts((7, 30, 1, 12, 45, 19)))


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """The server, scores behind the activation and as the head makes them, tokens of all pairs."""
    encoder = make_cross_encoder("bert", tmp_path_factory.mktemp("bert"))
    llm = LLM(str(encoder.folder), threads=1, max_num_seqs=8, enforce_eager=True)
    found = llm.score_pairs(QUERY, DOCUMENTS)
    raw = [each.score for each in llm.score_pairs(QUERY, DOCUMENTS, raw=True)]
    with serving(llm) as server:
        num_tokens = sum(len(each.prompt_token_ids) for each in found)
        yield server, [each.score for each in found], raw, num_tokens


@pytest.fixture(autouse=True)
def _nothing_is_left(world):
    yield
    wait_until(world[0].is_idle)


def post(world, path: str, **body) -> httpx.Response:
    return httpx.post(f"{world[0].url}{path}", json={"model": "tiny", **body})


@pytest.mark.parametrize("asked", [{}, {"top_n": 2, "return_documents": True}])
def test_documents_come_by_their_scores(world, asked) -> None:
    _, scores, _, num_tokens = world
    answer = post(world, "/v1/rerank", query=QUERY, documents=DOCUMENTS, **asked).json()
    order = sorted(range(len(scores)), key=lambda index: -scores[index])[: asked.get("top_n")]
    assert [each["index"] for each in answer["results"]] == order
    for each in answer["results"]:
        assert each["relevance_score"] == pytest.approx(scores[each["index"]], abs=1e-6)
        text = each.get("document", {}).get("text")
        assert text == (DOCUMENTS[each["index"]] if asked else None)
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    assert (answer["object"], answer["model"]) == ("list", "tiny")
    assert httpx.get(f"{world[0].url}/capabilities").json()["scores_pairs"]


@pytest.mark.parametrize("first", [QUERY, [QUERY], [QUERY] * 5])
@pytest.mark.parametrize("is_raw", [False, True])
def test_scores_come_in_the_order_of_the_pairs(world, first, is_raw: bool) -> None:
    own = {"use_activation": False} if is_raw else {}
    answer = post(world, "/v1/score", text_1=first, text_2=DOCUMENTS, **own).json()
    assert [each["index"] for each in answer["data"]] == list(range(5))
    found = [each["score"] for each in answer["data"]]
    assert found == pytest.approx(world[1 + is_raw], abs=1e-6)
    one = post(world, "/v1/score", text_1=QUERY, text_2=DOCUMENTS[0], **own).json()
    assert one["data"][0]["score"] == pytest.approx(found[0], abs=1e-6)


@pytest.mark.parametrize(
    ("path", "body", "text", "param"),
    [
        ("rerank", {"query": "a", "documents": []}, "documents must be", "documents"),
        ("rerank", {"query": "a", "documents": ["b", 3]}, "documents[1] must be", "documents[1]"),
        ("rerank", {"documents": ["b"]}, "query must be", "query"),
        ("rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n must be", "top_n"),
        (
            "rerank",
            {"query": "a", "documents": ["b"], "max_tokens_per_doc": 9},
            "max_tokens_per_doc must be null",
            "max_tokens_per_doc",
        ),
        ("rerank", {"query": "a", "documents": ["b"] * 30000}, "n must be at", "n"),
        (
            "score",
            {"text_1": ["a", "b"], "text_2": ["c"] * 3},
            "text_1 must be one text, or as many as text_2, 3, got 2",
            "text_1",
        ),
        (
            "score",
            {"text_1": "aa", "text_2": "ab" * CONTEXT},
            f"text_2 must be within the context of {CONTEXT} tokens",
            "text_2",
        ),
        ("score", {"text_1": ["a"] * 30000, "text_2": "b"}, "n must be at", "n"),
        (
            "embeddings",
            {"input": [4]},
            "the request must be one of what this model does: score pairs, got embed; ask for sco",
            None,
        ),
    ],
)
def test_what_is_wrong_is_a_400_that_says_so(world, path, body, text, param) -> None:
    sent = post(world, f"/v1/{path}", **body)
    error = sent.json()["error"]
    assert sent.status_code == 400, error
    assert error["message"].startswith(text)
    assert error["param"] == param


@pytest.mark.parametrize("path", ["rerank", "score"])
def test_a_model_that_scores_no_pairs_says_what_it_does_and_reads_no_body(path: str) -> None:
    with serving(small_llm()) as server:
        sent = httpx.post(f"{server.url}/v1/{path}", json={"model": "tiny", "query": 5})
        wait_until(server.is_idle)
    assert sent.status_code == 400
    text = "model must be one that scores pairs, got one that does generate, score; serve a cross-e"
    assert sent.json()["error"]["message"].startswith(text)


def test_a_model_of_several_labels_is_for_python(tmp_path) -> None:
    encoder = make_cross_encoder("bert-labels", tmp_path)
    with serving(LLM(str(encoder.folder), threads=1, enforce_eager=True)) as server:
        body = {"model": "tiny", "text_1": "a", "text_2": "b"}
        sent = httpx.post(f"{server.url}/v1/score", json=body)
    assert sent.status_code == 400
    assert sent.json()["error"]["message"].startswith("model must be one with one label, got one")
