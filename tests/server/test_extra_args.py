"""A server's logits processors: their arguments come with a request, and are checked there."""

import httpx
import openai
import pytest
import torch
from serving import serving, small_llm, wait_until

from paceline.layers.sampling import Column, LogitsProcessor

BODY = {"model": "tiny", "prompt": [5, 6, 7], "temperature": 0, "max_tokens": 4}


class Always(LogitsProcessor):
    """Makes one token the likeliest."""

    arguments = frozenset({"always"})
    columns = {"token": Column(torch.int64), "by": Column(torch.float32)}  # noqa: RUF012

    def pack(self, row):
        token = row.args.get("always", 0)
        return {"token": token, "by": 1000 * len(row.args)}

    def apply(self, logits, rows, positions, state):
        token, by = state.columns["token"][rows], state.columns["by"][rows]
        return logits.scatter_add(1, token[:, None], by[:, None])


@pytest.fixture(scope="module")
def server():
    with serving(small_llm(logits_processors=[f"{__name__}:Always"])) as world:
        yield world


def test_they_reach_the_processor_and_no_other_request(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        plain = client.completions.create(**BODY)
        token = server.tokenizer.encode("x")[0]
        changed = client.completions.create(**BODY, extra_body={"extra_args": {"always": token}})
        assert changed.choices[0].text == "xxxx"
        assert client.completions.create(**BODY).choices[0].text == plain.choices[0].text != "xxxx"


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"alwys": 5}, "a key of extra_args must be one of always, got 'alwys'; did you mean alw"),
        ({"always": "x"}, "column 'token' of Always must be one 64-bit integer, got 'x'; refuse"),
        ({"always": 2**63}, "column 'token' of Always must be one 64-bit integer, got 922337203"),
        ([1], "extra_args must be an object, got [1]; pass {name: value}"),
    ],
)
def test_wrong_ones_are_refused_and_the_engine_goes_on(server, args, text):
    answer = httpx.post(f"{server.url}/v1/completions", json=BODY | {"extra_args": args})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(text)
    assert httpx.post(f"{server.url}/v1/completions", json=BODY).status_code == 200
    wait_until(server.is_idle)
