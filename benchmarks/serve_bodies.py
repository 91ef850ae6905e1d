"""What large bodies cost a server, and what a stream beside them notices.

    python benchmarks/serve_bodies.py --against ../old/src

Each side is `paceline serve` of the bundled model, whose tokenizer is given a normalizer that
leaves no bound by bytes.  Each body is sent to an idle server: shown are the status, CPU seconds
and growth of the peak memory per MB of body, of its workers too; and once more beside a stream that
another process reads: shown is the longest time between two of its pieces.  The last line is JSON.
"""

import argparse
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from sides import SOURCES

MB = 1_000_000
TICKS = os.sysconf("SC_CLK_TCK")
STREAM = {"model": "m", "prompt": "x", "max_tokens": 1900, "ignore_eos": True, "stream": True}
TURN = b'{"role":"user","content":"x"}'
COMPLETION, CHAT = "completions", "chat/completions"
SETTLE_S = 2.0


def repeated(item: bytes, size: int) -> bytes:
    return b",".join([item] * max(1, size // (len(item) + 1)))


def keys(size: int) -> bytes:
    return b",".join(b'"%d":1' % key for key in range(size // 11))


def field(name: str, value: bytes) -> bytes:
    """A completion with a field, the last of its name."""
    return b'{"model":"m","prompt":"x","' + name.encode() + b'":' + value + b"}"


def listed(name: str, item: bytes, size: int) -> bytes:
    return field(name, b"[" + repeated(item, size) + b"]")


def chat(items: bytes, size: int, more: bytes = b"") -> bytes:
    """A conversation of `items`, repeated."""
    return b'{"model":"m"' + more + b',"messages":[' + repeated(items, size) + b"]}"


def parts(item: bytes, size: int) -> bytes:
    return chat(b'{"role":"user","content":[' + repeated(item, size) + b"]}", 0)


def text(size: int) -> bytes:
    return b'"' + b"hello world " * (size // 12) + b'"'


BODIES: dict[str, tuple[str, Callable[[int], bytes]]] = {
    "messages that are none": (CHAT, lambda size: chat(b"{}", size)),
    "parts that are none": (CHAT, lambda size: parts(b"{}", size)),
    "unknown fields": (COMPLETION, lambda size: b"{" + keys(size) + b"}"),
    "stop of numbers": (COMPLETION, lambda size: listed("stop", b"1", size)),
    "stop of texts": (COMPLETION, lambda size: listed("stop", b'"ab"', size)),
    "stop_token_ids": (COMPLETION, lambda size: listed("stop_token_ids", b"300", size)),
    "logit_bias": (COMPLETION, lambda size: field("logit_bias", b"{" + keys(size) + b"}")),
    "metadata": (CHAT, lambda size: chat(TURN, 0, b',"metadata":{' + keys(size) + b"}")),
    "many lists of ids": (COMPLETION, lambda size: listed("prompt", b"[1]", size)),
    "many ids": (COMPLETION, lambda size: listed("prompt", b"300", size)),
    "many texts": (COMPLETION, lambda size: listed("prompt", b'"ab"', size)),
    "many messages": (CHAT, lambda size: chat(TURN, size)),
    "many parts": (CHAT, lambda size: parts(b'{"type":"text","text":"ab"}', size)),
    "one long text": (COMPLETION, lambda size: field("prompt", text(size))),
    "one long message": (
        CHAT,
        lambda size: chat(b'{"role":"user","content":' + text(size) + b"}", 0),
    ),
}


@contextmanager
def server(source: Path, folder: Path) -> Iterator[tuple[str, int]]:
    """(its address, its process id)"""
    command = [sys.executable, "-m", "paceline", "serve", str(folder), "--served-model-name", "m"]
    command += ["--port", "0", "--threads", "1"]
    environment = os.environ | {"PYTHONPATH": str(source), "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        for line in process.stderr:
            found = re.search(r"on (http://\S+)/v1", line)
            if found:
                break
        else:
            raise SystemExit("the server did not start")
        threading.Thread(target=process.stderr.read, daemon=True).start()
        try:
            yield found[1], process.pid
        finally:
            process.terminate()


def family(pid: int) -> list[int]:
    """A process and its children."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    return [pid, *(int(child) for each in children for child in each.read_text().split())]


def cpu_s(pids: list[int]) -> float:
    fields = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
    return sum(int(each[11]) + int(each[12]) for each in fields) / TICKS


def memory(pids: list[int], name: str) -> float:
    """name: VmRSS or VmHWM; MB of all."""
    texts = [Path(f"/proc/{pid}/status").read_text() for pid in pids]
    found = [re.search(rf"{name}:\s+(\d+) kB", text) for text in texts]
    return sum(int(each[1]) * 1024 for each in found if each) / MB


class Stream:
    """A client in a process of its own, which keeps when pieces of its streams came."""

    def __init__(self, url: str) -> None:
        self._stop = multiprocessing.Event()
        self._times, sent = multiprocessing.Pipe(duplex=False)
        self._process = multiprocessing.Process(target=_watch, args=(url, sent, self._stop))
        self._process.start()

    def end(self) -> list[float]:
        """When, by time.monotonic()."""
        self._stop.set()
        times: list[float] = self._times.recv()
        self._process.join()
        return times


def _watch(url: str, sent: Any, stop: Any) -> None:
    times: list[float] = []
    with httpx.Client(base_url=url, timeout=None) as client:
        while not stop.is_set():
            with client.stream("POST", "/v1/completions", json=STREAM) as stream:
                times += [time.monotonic() for line in stream.iter_lines() if line]
    sent.send(times)


def gaps_ms(times: list[float], begin: float, end: float) -> list[float]:
    """Between pieces, from `begin` to the first behind `end`."""
    found = [begin, *(each for each in times if each > begin)]
    return [1e3 * (after - before) for before, after in pairwise(found) if before < end]


def measured(source: Path, folder: Path, size: int, only: str) -> dict[str, dict[str, float]]:
    """Rows by body."""
    rows: dict[str, dict[str, float]] = {}
    headers = {"Content-Type": "application/json"}
    with server(source, folder) as (url, pid), httpx.Client(base_url=url, timeout=None) as client:
        client.post("/v1/completions", json=STREAM | {"stream": False, "max_tokens": 64})
        client.post("/v1/completions", content=b" " * 100_000, headers=headers)
        for name, (path, make) in BODIES.items():
            if only in name:
                rows[name] = alone(client, pid, path, make(size))
        stream = Stream(url)
        time.sleep(SETTLE_S)
        spans = {"no body": (time.monotonic(), time.monotonic() + SETTLE_S)}
        time.sleep(SETTLE_S)
        for name in rows:
            path, make = BODIES[name]
            body, began = make(size), time.monotonic()
            client.post(f"/v1/{path}", content=body, headers=headers)
            spans[name] = (began, time.monotonic())
        times = stream.end()
    for name, span in spans.items():
        found = gaps_ms(times, *span)
        rows.setdefault(name, {}).update(gap_ms=max(found), median_gap_ms=statistics.median(found))
    return rows


def alone(client: httpx.Client, pid: int, path: str, body: bytes) -> dict[str, float]:
    """What a body costs a server that has nothing else to do."""
    pids = family(pid)
    for each in pids:
        Path(f"/proc/{each}/clear_refs").write_text("5")  # the peak is now
    before, cpu, began = memory(pids, "VmRSS"), cpu_s(pids), time.monotonic()
    headers = {"Content-Type": "application/json"}
    answer = client.post(f"/v1/{path}", content=body, headers=headers)
    size = len(body) / MB
    return {
        "status": answer.status_code,
        "s": time.monotonic() - began,
        "cpu_s_per_mb": (cpu_s(pids) - cpu) / size,
        "memory_per_mb": (memory(pids, "VmHWM") - before) / size,
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another src folder")
    parser.add_argument("--mb", type=int, default=15)
    parser.add_argument("--only", default="", help="bodies with this in their name")
    asked = parser.parse_args()
    sides = {"here": SOURCES} | ({"against": asked.against} if asked.against else {})
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        shutil.copytree(SOURCES / "paceline/models/bundled", model)
        tokenizer = json.loads((model / "tokenizer.json").read_text())
        tokenizer["normalizer"] = {"type": "NFKC"}
        (model / "tokenizer.json").write_text(json.dumps(tokenizer))
        for side, source in sides.items():
            results[side] = measured(source, model, asked.mb * MB, asked.only)
            print(f"{side}: {source}")
            for name, row in results[side].items():
                print(
                    f"  {name:24}" + "".join(f"  {key} {value:.3f}" for key, value in row.items())
                )
    print(json.dumps({"mb": asked.mb, "sides": results}))


if __name__ == "__main__":
    main()
