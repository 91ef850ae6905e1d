"""vLLM's bench client, unmodified, where it is installed: it needs no GPU, and a part of what vLLM
requires (`pip install --no-deps vllm`, and what its import then misses).  Its requests run
everywhere, in test_openai_client.py."""

import json
import subprocess
import sys

import pytest
from serving import serving, small_llm

LENGTH = 6


@pytest.mark.parametrize("kind", ["completions", "chat/completions"])
def test_the_command_measures(kind, tmp_path):
    pytest.importorskip("vllm.benchmarks.serve", exc_type=ImportError)
    llm = small_llm()
    with serving(llm) as server:
        host, port = server.url.removeprefix("http://").split(":")
        options = {
            "backend": "openai-chat" if kind.startswith("chat") else "openai",
            "endpoint": f"/v1/{kind}",
            "host": host,
            "port": port,
            "model": "tiny",
            "tokenizer": str(llm.prepared.source.tokenizer.parent),
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
