"""Errors over HTTP: one shape for all, and the server goes on."""

import re

import httpx
import pytest
from serving import serving, small_llm, wait_until

from paceline.core.errors import CapacityError, ConfigError
from paceline.engine.answers.completion import Completion
from paceline.engine.request import FinishReason
from paceline.server.token_names import TokenNames
from paceline.text.chat_template import ChatTemplate

GOOD = {"model": "tiny", "prompt": "x", "max_tokens": 2}
CHAT = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": 2}


@pytest.fixture(scope="module")
def server():
    with serving(small_llm(), api_keys=["sesame"]) as world:
        yield world


@pytest.fixture
def client(server):
    headers = {"Authorization": "Bearer sesame"}
    with httpx.Client(base_url=server.url, headers=headers, timeout=None) as client:
        yield client
        assert client.post("/v1/completions", json=GOOD).status_code == 200
        wait_until(server.is_idle)


def refused(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    return error


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (b'{"model": ', "the body must be JSON, got Input data was truncated; send a JSON object"),
        (b"", "the body must be JSON, got Input data was truncated; send a JSON object in UTF-8"),
        (b"[1]", "the body must be an object, got [1]; send a JSON object"),
        (b'"x"', 'the body must be an object, got "x"'),
        (b'{"model": "tiny"}', "prompt must be present, got nothing; add it"),
        (b'{"\\ud800": 1, "model": "tiny", "prompt": "x"}', "the body must be JSON, got JSON is"),
        (
            b'{"model": "tiny", "prompt": "\\ud800"}',
            "the body must be JSON, got Input data was tru",
        ),
        (
            b'{"model": "tiny", "prompt": "x", "temperature": NaN}',
            "the body must be JSON, got JSON",
        ),
        (
            b'{"model": "tiny", "prompt": "x", "seed": 1' + b"0" * 99 + b"}",
            "seed must be an integer",
        ),
        (b"[" * 100_000, "the body must be an object, got [["),
        (b"\xff\xfe", "the body must be JSON, got JSON is malformed: invalid character (byte 0)"),
        (b'{"prompt": "\xe9"}', "the body must be JSON, got 'utf-8' codec can't decode byte 0xe9"),
        (b'{"seed": ' + b"1" * 5000 + b"}", "seed must be in bounds (Integer value out of range)"),
    ],
)
def test_a_bad_body_is_answered_with_400(client, body, text):
    headers = {"Content-Type": "application/json"}
    answer = client.post("/v1/completions", content=body, headers=headers)
    assert refused(answer, 400)["message"].startswith(text)


def test_a_body_of_another_kind_says_which_kind_is_wanted(client):
    error = refused(client.post("/v1/completions", content=b"{}"), 400)
    text = "Content-Type must be application/json, got 'nothing'; send a JSON object in UTF-8, with"
    assert error["message"].startswith(text)


@pytest.mark.parametrize("given", [None, "Bearer open", "sesame", "Bearer sesame2"])
def test_a_wrong_key_is_answered_with_401_before_anything_is_read(server, given):
    headers = {} if given is None else {"Authorization": given}
    answer = httpx.post(f"{server.url}/v1/completions", content=b"{", headers=headers)
    assert refused(answer, 401)["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"
    assert httpx.get(f"{server.url}/health").json() == {"status": "ok"}


def test_the_scheme_of_a_key_has_no_case(server):
    for scheme in ("bearer", "BEARER", "Bearer "):
        headers = {"Authorization": f"{scheme} sesame"}
        assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/v1x", "/nothing"])
def test_pages_ask_for_the_key_too(client, server, path):
    assert refused(httpx.get(server.url + path), 401)["code"] == "invalid_api_key"
    assert client.get(path).status_code in (200, 404)


def test_the_schema_promises_no_422(client):
    schema = client.get("/openapi.json").json()
    answers = [each["responses"] for path in schema["paths"].values() for each in path.values()]
    assert answers
    assert not any("422" in each for each in answers)
    (name,) = schema["paths"]["/v1/models/{name}"]["get"]["parameters"]
    assert (name["name"], name["in"]) == ("name", "path")
    said = {path: schema["paths"][path] for path in ("/metrics", "/v1/completions", "/v1/messages")}
    kinds = [
        list(way["responses"]["200"]["content"]) for each in said.values() for way in each.values()
    ]
    assert kinds == [["text/plain"], ["application/json"], ["application/json"]]


def test_a_name_of_ten_megabytes_is_not_said_again(client):
    body = b'{"model":"tiny","prompt":"x","%b":1}' % (b"k" * 10_000_000)
    answer = client.post(
        "/v1/completions", content=body, headers={"Content-Type": "application/json"}
    )
    assert refused(answer, 400)["code"] == "unknown_parameter"
    assert len(answer.content) < 500


@pytest.mark.parametrize("sent", [None, "abc-1", "x" * 129, "two words"])
def test_every_answer_says_the_id_of_its_request(client, server, sent):
    """That of the client, where it is one that a log can hold."""
    headers = {} if sent is None else {"X-Request-Id": sent}
    for path in ("/health", "/v1/models", "/nothing"):
        said = client.get(path, headers=headers).headers.get_list("x-request-id")
        assert len(said) == 1
        assert said == [sent] if sent == "abc-1" else re.fullmatch("[0-9a-f]{32}", said[0])
    assert len(httpx.get(f"{server.url}/docs").headers["x-request-id"]) == 32


def test_unknown_paths_methods_and_models_are_named(client):
    assert refused(client.get("/v1/nothing"), 404)["message"].startswith("GET /v1/nothing: Not Fo")
    answer = client.get("/v1/completions")
    assert "GET /v1/completions: Method" in refused(answer, 405)["message"]
    assert answer.headers["allow"] == "POST"
    error = refused(client.get("/v1/models/org/other"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert error["message"] == "model must be 'tiny', got 'org/other'; ask GET /v1/models"


def test_fields_in_the_address_are_refused(client):
    for path, body in (("completions", GOOD), ("chat/completions", CHAT)):
        error = refused(client.post(f"/v1/{path}?temperature=0&x", json=body), 400)
        assert error["message"] == "temperature must be in the body, got in the address; move it"
        assert (error["param"], error["code"]) == ("temperature", "unknown_parameter")


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/tiny"])
def test_what_can_be_got_has_a_head(client, path):
    head, whole = client.head(path), client.get(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == whole.headers["content-length"]


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(client, server, monkeypatch):
    def full(*values):
        raise CapacityError("KV pages of request 'r' must be at most [1], got [2]; shorten it")

    with monkeypatch.context() as patch:
        patch.setattr(server.llm, "enqueue", full)
        for stream in (False, True):
            error = refused(client.post("/v1/completions", json=GOOD | {"stream": stream}), 400)
            assert error["code"] == "capacity_exceeded"


def test_logits_without_numbers_are_a_server_error(client, server, monkeypatch):
    growth = Completion.growth
    failed = {"finish_reason": FinishReason.ERROR, "error": "logits must be finite"}

    def broken(self, make):
        return growth(self, lambda **fields: make(**fields | failed))

    with monkeypatch.context() as patch:
        patch.setattr(Completion, "growth", broken)
        error = refused(client.post("/v1/completions", json=GOOD), 500)
        assert (error["message"], error["code"]) == ("logits must be finite", "generation_failed")
        streamed = client.post("/v1/completions", json=GOOD | {"stream": True})
        assert streamed.status_code == 200
        assert '"message":"logits must be finite"' in streamed.text
        assert "[DONE]" not in streamed.text


def test_a_template_that_refuses_is_a_400_with_its_words(client, server, monkeypatch):
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "_template", template)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        error = refused(client.post("/v1/chat/completions", json=body), 400)
    assert error["param"] == "messages"
    assert "got its refusal: roles must alternate; check roles" in error["message"]


def test_a_template_that_does_not_end_is_a_400(client, server, monkeypatch):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "_template", ChatTemplate(endless))
        error = refused(client.post("/v1/chat/completions", json=CHAT), 400)
    assert error["param"] == "messages"
    assert "got no end of it within 210562 steps; check roles" in error["message"]


def test_a_template_in_a_request_is_refused(client):
    body = CHAT | {"chat_template": "{{ messages }}"}
    error = refused(client.post("/v1/chat/completions", json=body), 400)
    assert (error["param"], error["code"]) == ("chat_template", "unsupported_parameter")
    assert "the template is the one in the model's folder" in error["message"]
    body = GOOD | {"chat_template": "{{ messages }}"}
    error = refused(client.post("/v1/completions", json=body), 400)
    assert (error["param"], error["code"]) == ("chat_template", "unknown_parameter")


def test_a_model_without_a_template_says_so(client, server, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(server.tokenizer, "_template", None)
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}]}
        error = refused(client.post("/v1/chat/completions", json=body), 400)
    assert error["message"].startswith("chat must be sent to a model with a chat template")


@pytest.mark.parametrize("token", [-1, 2**40, 4096])
def test_ids_that_are_no_tokens_are_refused_when_they_are_echoed_too(client, token):
    answer = client.post("/v1/completions", json=GOOD | {"prompt": [5, token], "echo": True})
    text = f"prompt token id 1 must be an integer from 0 to 4095, got {token}"
    assert refused(answer, 400)["message"].startswith(text)


def test_a_bug_is_a_server_error_and_others_go_on(client, server, monkeypatch):
    def broken(*values, **how):
        raise ZeroDivisionError("a bug")

    with monkeypatch.context() as patch:
        patch.setattr(type(server.tokenizer), "encode", broken)
        answer = client.post("/v1/completions", json=GOOD, headers={"X-Request-Id": "mine"})
    assert refused(answer, 500)["message"] == "ZeroDivisionError: a bug; the server's log has more"
    assert answer.headers.get_list("X-Request-Id") == ["mine"]


def test_what_the_engine_refuses_otherwise_is_a_server_error_and_others_go_on(
    client, server, monkeypatch
):
    def broken(*values):
        raise ConfigError("columns packed by X must be ['a'], got []; pack every column")

    with monkeypatch.context() as patch:
        patch.setattr(server.llm, "enqueue", broken)
        error = refused(client.post("/v1/completions", json=GOOD), 500)
    assert error["message"].startswith("columns packed by X must be")


def test_a_token_without_a_tokenizer_is_named_by_its_id():
    assert TokenNames(None).name(5) == "token_id:5"


def test_the_schema_lists_the_endpoints(client):
    paths = client.get("/openapi.json").json()["paths"]
    assert set(paths) == {
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v1/models",
        "/v1/models/{name}",
        "/v1/messages",
        "/v1/messages/count_tokens",
        "/v1/responses",
        "/tokenize",
        "/detokenize",
        "/version",
        "/capabilities",
        "/health",
        "/metrics",
        "/progress",
        "/ready",
    }
