"""How much of an engine's decode rate is left when it is served: streams over HTTP against
`LLM.generate` of the same prompts, in turns, and how much later the first token comes.

python benchmarks/served_decode.py --streams 32 --tokens 128 --rounds 3
python benchmarks/served_decode.py --against ../before/src   # a server of another checkout, too

Each side is a process that loads the bundled model with the same options; the client is another,
which reads its streams and looks at little.  Rounds take turns, one side at a time.  Prompts differ
from round to round, so that no prefix is found.  The last line is one JSON document.
"""

import argparse
import json
import os
import re
import selectors
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

OURS = str(Path(__file__).parent.parent / "src")
PROMPT_TOKENS = 16


def prompts_of(turn: int, streams: int) -> list[list[int]]:
    """[streams][PROMPT_TOKENS] ids, other ones each turn."""
    return [
        [5 + (7 * turn + 31 * stream + place) % 4000 for place in range(PROMPT_TOKENS)]
        for stream in range(streams)
    ]


class Direct:
    """`LLM.generate` in a process of its own, which this program is, with --direct."""

    name = "LLM.generate"

    def __init__(self, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--direct", "--threads", str(options.threads)]
        command += ["--streams", str(options.streams), "--tokens", str(options.tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env(OURS)
        )
        self._read()

    def run(self, turn: int) -> tuple[float, float]:
        """(tokens/s of the decode, median seconds to the first token)"""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        rate, first_s = json.loads(self._read())
        return rate, first_s

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


def direct(options: argparse.Namespace) -> None:
    """The other end of Direct."""
    from paceline import LLM, SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=options.tokens, ignore_eos=True)
    with LLM(threads=options.threads, max_num_seqs=options.streams) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            prompts = prompts_of(int(line), options.streams)
            outputs = llm.generate(prompts, params, use_tqdm=False)
            metrics = [output.metrics for output in outputs]
            begin = max(each.ttft_s for each in metrics)
            end = max(each.latency_s for each in metrics)
            rate = options.streams * (options.tokens - 1) / (end - min(e.ttft_s for e in metrics))
            assert begin < end
            print(json.dumps([rate, statistics.median(e.ttft_s for e in metrics)]), flush=True)


class Served:
    """`paceline serve` of a checkout, and a client of streams."""

    def __init__(self, name: str, source: str, options: argparse.Namespace) -> None:
        self.name = name
        self._streams, self._tokens = options.streams, options.tokens
        command = [sys.executable, "-u", "-m", "paceline", "serve", "--port", "0"]
        command += ["--threads", str(options.threads), "--max-num-seqs", str(options.streams)]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=env(source)
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"^serving \S+ on (http://\S+)/v1", line)
            if found:
                self._where = (urlsplit(found[1]).hostname, urlsplit(found[1]).port)
                return
        raise RuntimeError("the server did not start")

    def run(self, turn: int) -> tuple[float, float]:
        """(tokens/s of the decode, median seconds to the first token)"""
        began = time.perf_counter()
        ends = [self._asked(ids) for ids in prompts_of(turn, self._streams)]
        firsts, counts = dict[socket.socket, float](), dict.fromkeys(ends, 0)
        watched = selectors.DefaultSelector()
        for end in ends:
            watched.register(end, selectors.EVENT_READ)
        tails = dict.fromkeys(ends, b"")
        last = 0.0
        while watched.get_map():
            for key, _ in watched.select():
                end: socket.socket = key.fileobj  # type: ignore[assignment]
                data = end.recv(1 << 16)
                now = time.perf_counter()
                counts[end] += data.count(b"data: {")
                if counts[end] and end not in firsts:
                    firsts[end] = now
                tails[end] = (tails[end] + data)[-1000:]
                if b"[DONE]" in tails[end] or not data:
                    last = now
                    watched.unregister(end)
                    end.close()
        tokens = [int(re.findall(rb'"completion_tokens":(\d+)', tails[each])[-1]) for each in ends]
        assert tokens == [self._tokens] * len(ends), tokens
        rate = len(ends) * (self._tokens - 1) / (last - min(firsts.values()))
        return rate, statistics.median(firsts.values()) - began

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _asked(self, ids: list[int]) -> socket.socket:
        body = {"model": "bundled", "prompt": ids, "max_tokens": self._tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        end = socket.create_connection(self._where)
        end.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return end


def env(source: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": source}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--against", default=None, help="src of another checkout")
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        direct(options)
        return
    sides: list[Direct | Served] = [Direct(options), Served("served", OURS, options)]
    if options.against:
        sides.append(Served("served before", str(Path(options.against).resolve()), options))
    found: dict[str, list[tuple[float, float]]] = {side.name: [] for side in sides}
    try:
        for turn in range(options.rounds + 1):
            for side in sides:
                result = side.run(turn)
                if turn:  # the first warms up
                    found[side.name].append(result)
    finally:
        for side in sides:
            side.close()
    base = [rate for rate, _ in found["LLM.generate"]]
    rows = {}
    print(f"{'':14} {'tokens/s':>9} {'of generate':>12} {'first token':>12}")
    for name, results in found.items():
        rates = [rate for rate, _ in results]
        share = statistics.median(rate / one for rate, one in zip(rates, base, strict=True))
        first_ms = 1e3 * statistics.median(first for _, first in results)
        rows[name] = {"tok_s": statistics.median(rates), "share": share, "first_ms": first_ms}
        rows[name]["rates"] = rates  # type: ignore[assignment]
        print(f"{name:14} {rows[name]['tok_s']:9.0f} {share:12.3f} {first_ms:9.1f} ms")
    settings = {name: getattr(options, name) for name in ("streams", "tokens", "rounds", "threads")}
    print(json.dumps({"cores": os.cpu_count(), **settings, "sides": rows}))


if __name__ == "__main__":
    main()
