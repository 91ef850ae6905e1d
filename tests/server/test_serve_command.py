"""`paceline serve` as a process: what it prints, how it answers, how it ends."""

import json
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack

import httpx
import pytest
from click.testing import CliRunner
from serving import small_llm

from paceline.cli.app import app

COMMAND = [sys.executable, "-m", "paceline", "serve", "--port", "0", "--threads", "1"]
BODY = {"model": "bundled", "prompt": "x", "temperature": 0, "ignore_eos": True, "stream": True}


def started(command):
    """The process and its address, once it has printed it."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"^serving \S+ on (http://\S+)/v1, Ctrl-C stops$", line)
        if found:
            return process, found[1]
    raise AssertionError("".join(lines))


def rest_of(process):
    """What it prints until it ends."""
    text = process.stderr.read()
    process.stderr.close()
    return text


def test_ctrl_c_lets_running_requests_end_and_says_so():
    process, url = started(COMMAND)
    try:
        curl = process.stderr.readline()
        assert curl.startswith(f"  curl {url}/v1/completions -H 'Content-Type: application/json'")
        asked = json.loads(curl.partition(" -d '")[2].strip().rstrip("'"))
        answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=30)
        assert answer.json()["choices"][0]["text"]
        with httpx.stream(
            "POST", f"{url}/v1/completions", json=dict(BODY, max_tokens=300), timeout=30
        ) as stream:
            lines = stream.iter_lines()
            next(lines)
            process.send_signal(signal.SIGINT)
            seen = list(lines)
        assert '"finish_reason":"length"' in seen[-4]
        assert seen[-2] == "data: [DONE]"
        text = rest_of(process)
        assert process.wait(timeout=30) == 0
        assert "finishing 1 request(s), at most 20 s; Ctrl-C: at once" in text
        assert text.endswith("stopped\n")
        assert "Traceback" not in text
    finally:
        process.kill()


def test_a_second_ctrl_c_does_not_wait():
    process, url = started([*COMMAND, "--api-key", "sesame"])
    try:
        assert "'Authorization: Bearer '$PACELINE_API_KEY" in process.stderr.readline()
        assert httpx.get(f"{url}/v1/models").status_code == 401
        seen, running = [], threading.Event()

        def ask():
            headers = {"Authorization": "Bearer sesame"}
            body = dict(BODY, max_tokens=2000)
            with httpx.stream(
                "POST", f"{url}/v1/completions", json=body, headers=headers, timeout=60
            ) as stream:
                for line in stream.iter_lines():
                    if line:
                        seen.append(line)
                        running.set()

        thread = threading.Thread(target=ask)
        thread.start()
        assert running.wait(20)
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith("finishing 1 request(s)")
        assert thread.is_alive()
        process.send_signal(signal.SIGINT)
        text = rest_of(process)
        assert process.wait(timeout=30) == 0
        assert "Traceback" not in text
        thread.join(timeout=10)
        assert "the server stops before this answer was whole; send it again" in seen[-1]
    finally:
        process.kill()


def test_a_port_in_use_is_one_line_before_anything_is_loaded():
    def never(**asked):
        raise AssertionError("loaded")

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--port", str(port)], obj=never)
    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("ConfigError: --host and --port must be an address that is free here")
    assert f"got 127.0.0.1:{port} ([Errno 98]" in line
    assert line.endswith("choose another port, or 0 for any that is free")


def test_a_port_taken_while_the_model_loads_is_one_line():
    """Two servers may bind one port as long as neither listens."""
    with ExitStack() as stack:

        def load(**asked):
            other = stack.enter_context(socket.socket())
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            other.bind(("127.0.0.1", port))
            other.listen()
            return small_llm()

        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        done = CliRunner().invoke(app, ["serve", "--port", str(port)], obj=load)
    assert done.exit_code == 2
    assert done.stderr.splitlines()[-1].startswith("ConfigError: --host and --port must be an addr")


@pytest.mark.parametrize("host", ["256.1.1.1", "no.such.host.invalid"])
def test_a_host_that_is_none_is_one_line(host):
    done = CliRunner().invoke(app, ["serve", "--host", host])
    assert done.exit_code == 2
    assert f"got {host}:8000 (" in done.stderr


def test_help_teaches_by_examples():
    text = CliRunner().invoke(app, ["serve", "--help"]).stdout
    for part in ("--served-model-name", "PACELINE_API_KEY", "curl http://", "OpenAI(base_url="):
        assert part in text
