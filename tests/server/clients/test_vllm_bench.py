"""vLLM's bench client: the command as it is, where it is installed, and everywhere its requests.

It needs no GPU, and of vLLM's own requirements a part: `pip install --no-deps vllm` and what its
import then misses.
"""

import json
import subprocess
import sys

import httpx
import pytest
from serving import serving, small_llm

PROMPT = "def add(a, b):\n"
LENGTH = 6
USAGE = {"stream": True, "stream_options": {"include_usage": True}, "ignore_eos": True}
MESSAGE = {"role": "user", "content": [{"type": "text", "text": PROMPT}]}
# As vLLM 0.33 sends them, by its name of the backend.
REQUESTS = {
    "openai": (
        "/v1/completions",
        {"prompt": PROMPT, "repetition_penalty": 1.0, "max_tokens": LENGTH, "logprobs": None},
    ),
    "openai-chat": (
        "/v1/chat/completions",
        {"messages": [MESSAGE], "max_completion_tokens": LENGTH},
    ),
}


@pytest.fixture(scope="module")
def world():
    llm = small_llm()
    with serving(llm) as server:
        yield server, str(llm.prepared.source.tokenizer.parent)


@pytest.mark.parametrize("backend", REQUESTS)
def test_what_it_sends_is_answered_as_it_reads(world, backend):
    server, _ = world
    path, body = REQUESTS[backend]
    headers = {"x-request-id": "bench-0"}
    body = {"model": "tiny", **body, **USAGE}
    answer = httpx.post(f"{server.url}{path}", json=body, headers=headers, timeout=60)
    assert (answer.status_code, answer.headers["x-request-id"]) == (200, "bench-0")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    *pieces, last = [json.loads(each.removeprefix("data: ")) for each in events]
    assert all(piece["choices"] for piece in pieces)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], LENGTH)


@pytest.mark.parametrize("backend", REQUESTS)
def test_the_command_measures(world, backend, tmp_path):
    pytest.importorskip("vllm.benchmarks.serve", exc_type=ImportError)
    server, folder = world
    host, port = server.url.removeprefix("http://").split(":")
    options = {
        "backend": backend,
        "endpoint": REQUESTS[backend][0],
        "host": host,
        "port": port,
        "model": "tiny",
        "tokenizer": folder,
        "dataset-name": "random",
        "random-input-len": 16,
        "random-output-len": LENGTH,
        "num-prompts": 8,
        "max-concurrency": 4,
        "result-dir": str(tmp_path),
        "result-filename": "found.json",
    }
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", *words]
    subprocess.run([*command, "--ignore-eos", "--save-result"], check=True, timeout=300)
    found = json.loads((tmp_path / "found.json").read_text())
    assert (found["completed"], found["failed"]) == (8, 0)
    assert found["total_output_tokens"] == 8 * LENGTH
