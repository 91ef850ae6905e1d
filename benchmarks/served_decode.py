"""How much of an engine's decode rate is left when it is served: streams over HTTP against
`LLM.generate` of the same prompts, in turns, and how much later the first token comes.

python benchmarks/served_decode.py --streams 32 --tokens 128 --rounds 3
python benchmarks/served_decode.py --against ../before/src   # a server of another checkout, too
python benchmarks/served_decode.py --streams 64 --options \\
    '{"model": "llama-3.1-8b", "load_format": "dummy", "mem_fraction_static": 0.4}'

Each side is a process that loads the model with the same options; the client is another, which
reads its streams and looks at little.  Rounds take turns, one side at a time, and who begins takes
turns too.  Prompts differ from round to round, so that no prefix is found.  The rate of the decode
counts from a stream's first token to its last, in the mean of the streams; the wave's from the
first token of all to the last of all, and so what it took until all streams were there.  The first
token is timed twice: of all streams at once, the median, and of requests one by one.  Where the
system tells the time of threads, the CPU time of the engine's is compared, too, which other work on
the machine disturbs least.  The last line is one JSON document.
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
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

OURS = str(Path(__file__).parent.parent / "src")
SHAPES = Path(OURS, "paceline", "models", "shapes")
PROMPT_TOKENS = 16
ALONE = 7  # requests without company, one behind the other, each turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What a side did in one round."""

    tok_s: float  # of the decode, streams in their mean
    wave_tok_s: float  # from the first token of all to the last
    first_s: float  # to the first token, the median of the streams
    alone_s: float  # to the first token of a request that has no company, the median of ALONE
    cpu_s: (
        float | None
    )  # of the engine's thread, beside its streams; None: the system does not tell


def prompts_of(turn: int, streams: int) -> list[list[int]]:
    """[streams][PROMPT_TOKENS] ids, other ones each turn."""
    return [
        [5 + (7 * turn + 31 * stream + place) % 4000 for place in range(PROMPT_TOKENS)]
        for stream in range(streams)
    ]


def cpu_s(pid: int) -> float | None:
    """CPU time of a process's first thread."""
    try:
        told = Path(f"/proc/{pid}/task/{pid}/schedstat").read_text()
    except OSError:
        return None
    return int(told.split()[0]) * 1e-9


def spent(began: float | None, ended: float | None) -> float | None:
    return None if began is None or ended is None else ended - began


class Direct:
    """`LLM.generate` in a process of its own, which this program is, with --direct."""

    name = "LLM.generate"

    def __init__(self, options: argparse.Namespace) -> None:
        command = [sys.executable, __file__, "--direct", "--options", json.dumps(options.options)]
        command += ["--streams", str(options.streams), "--tokens", str(options.tokens)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env(OURS)
        )
        self._read()

    def run(self, turn: int) -> Result:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{turn}\n")
        self._process.stdin.flush()
        return Result(**json.loads(self._read()))

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
    once = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    with LLM(**options.options, max_num_seqs=options.streams) as llm:
        print("ready", flush=True)
        for line in sys.stdin:
            every = prompts_of(int(line), options.streams + ALONE)
            prompts, alone = every[: options.streams], every[options.streams :]
            cpu_began = cpu_s(os.getpid())
            outputs = llm.generate(prompts, params, use_tqdm=False)
            cpu = spent(cpu_began, cpu_s(os.getpid()))
            metrics = [output.metrics for output in outputs]
            first = min(each.ttft_s for each in metrics)
            wave_s = max(each.latency_s for each in metrics) - first
            decodes = [each.latency_s - each.ttft_s for each in metrics]
            waits = []
            for each in alone:
                began = time.perf_counter()
                llm.generate([each], once, use_tqdm=False)
                waits.append(time.perf_counter() - began)
            found = {
                "tok_s": options.streams * (options.tokens - 1) / statistics.fmean(decodes),
                "wave_tok_s": options.streams * (options.tokens - 1) / wave_s,
                "first_s": statistics.median(each.ttft_s for each in metrics),
                "alone_s": statistics.median(waits),
                "cpu_s": cpu,
            }
            print(json.dumps(found), flush=True)


class Served:
    """`paceline serve` of a checkout, and a client of streams."""

    def __init__(self, name: str, source: str, options: argparse.Namespace) -> None:
        self.name = name
        self._streams, self._tokens = options.streams, options.tokens
        command = [sys.executable, "-u", "-m", "paceline", "serve", "--port", "0"]
        command += [*flags(options.options), "--max-num-seqs", str(options.streams)]
        command += ["--served-model-name", "served"]
        self._process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=env(source)
        )
        assert self._process.stderr is not None
        for line in self._process.stderr:
            found = re.search(r"^serving \S+ on (http://\S+)/v1", line)
            if found:
                self._where = (urlsplit(found[1]).hostname, urlsplit(found[1]).port)
                self._engine = self._find_engine()
                return
            print(line, end="", file=sys.stderr)
        raise RuntimeError("the server did not start")

    def run(self, turn: int) -> Result:
        every = prompts_of(turn, self._streams + ALONE)
        prompts, alone = every[: self._streams], every[self._streams :]
        cpu_began = cpu_s(self._engine)
        streams = self._stream(prompts, self._tokens)
        cpu = spent(cpu_began, cpu_s(self._engine))
        waits = [self._stream([each], 1)[0][0] for each in alone]
        wave_s = max(last for _, last in streams) - min(first for first, _ in streams)
        decoded = self._streams * (self._tokens - 1)
        return Result(
            tok_s=decoded / statistics.fmean(last - first for first, last in streams),
            wave_tok_s=decoded / wave_s,
            first_s=statistics.median(first for first, _ in streams),
            alone_s=statistics.median(waits),
            cpu_s=cpu,
        )

    def _stream(self, prompts: list[list[int]], num_tokens: int) -> list[tuple[float, float]]:
        """Of each stream, seconds to its first token and to its last."""
        began = time.perf_counter()
        ends = [self._asked(ids, num_tokens) for ids in prompts]
        firsts, lasts = dict[socket.socket, float](), dict[socket.socket, float]()
        counts = dict.fromkeys(ends, 0)
        watched = selectors.DefaultSelector()
        for end in ends:
            watched.register(end, selectors.EVENT_READ)
        tails = dict.fromkeys(ends, b"")
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
                    lasts[end] = now
                    watched.unregister(end)
                    end.close()
        tokens = [int(re.findall(rb'"completion_tokens":(\d+)', tails[each])[-1]) for each in ends]
        assert tokens == [num_tokens] * len(ends), tokens
        return [(firsts[end] - began, lasts[end] - began) for end in ends]

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()

    def _find_engine(self) -> int:
        """The process of the engine, which HTTP's has started."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words = (folder / "cmdline").read_text()
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            except OSError:  # it has ended
                continue
            if parent == str(self._process.pid) and "engine_main" in words:
                return int(folder.name)
        raise RuntimeError("the server has no engine")

    def _asked(self, ids: list[int], num_tokens: int) -> socket.socket:
        body = {"model": "served", "prompt": ids, "max_tokens": num_tokens, "temperature": 0}
        body |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        end = socket.create_connection(self._where)
        end.sendall(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        return end


def env(source: str) -> dict[str, str]:
    others = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": f"{source}:{others}" if others else source}


def flags(options: dict[str, Any]) -> list[str]:
    """Engine options as `paceline serve` takes them; values that are no switches."""
    words = [str(options["model"])] if "model" in options else []
    for name, value in options.items():
        if name != "model":
            words += [f"--{name.replace('_', '-')}", str(value)]
    return words


def with_words(model: str, folder: Path) -> str:
    """A shape in `folder`, beside a tokenizer of as many words: without one, streams have no text.
    Another model as it is."""
    config = SHAPES / f"{model}.json"
    if not config.is_file():
        return model
    document = json.loads(config.read_text())
    (folder / "config.json").write_text(json.dumps(document))
    vocab = {f"word{number}": number for number in range(document["vocab_size"])}
    tokenizer = {"version": "1.0", "added_tokens": [], "normalizer": None, "post_processor": None}
    tokenizer |= {"pre_tokenizer": {"type": "Whitespace"}, "decoder": None}
    tokenizer["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": "word0"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return str(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--options", type=json.loads, default={"threads": 1}, help="of the engine, in JSON"
    )
    parser.add_argument("--against", default=None, help="src of another checkout")
    parser.add_argument("--direct", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.direct:
        direct(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        asked = dict(options.options)
        if "model" in asked:
            options.options = asked | {"model": with_words(asked["model"], Path(folder))}
        found = compared(options)
    settings = {name: getattr(options, name) for name in ("streams", "tokens", "rounds")}
    load = os.getloadavg()
    cores = os.cpu_count()
    document = {"cores": cores, "load_average": load, "options": asked, **settings, "sides": found}
    print(json.dumps(document))


def compared(options: argparse.Namespace) -> dict[str, Any]:
    """Every side's figures, which it prints, too."""
    sides: list[Direct | Served] = []
    found: dict[str, list[Result]] = {}
    try:
        sides += [Direct(options), Served("served", OURS, options)]
        if options.against:
            sides.append(Served("served before", str(Path(options.against).resolve()), options))
        found = {side.name: [] for side in sides}
        for turn in range(options.rounds + 1):
            for side in sides if turn % 2 else reversed(sides):
                result = side.run(turn)
                if turn:  # the first warms up
                    found[side.name].append(result)
    finally:
        for side in sides:
            side.close()
    base = found["LLM.generate"]
    rows: dict[str, Any] = {}
    heads = f"{'first':>10} {'alone':>10}"
    print(f"{'':14} {'tokens/s':>9} {'of generate':>12} {'by CPU time':>12} {heads}")
    for name, results in found.items():
        pairs = list(zip(results, base, strict=True))
        by_cpu = [one.cpu_s / each.cpu_s for each, one in pairs if each.cpu_s and one.cpu_s]
        row = {
            "tok_s": statistics.median(each.tok_s for each in results),
            "share": statistics.median(each.tok_s / one.tok_s for each, one in pairs),
            "wave_tok_s": statistics.median(each.wave_tok_s for each in results),
            "share_by_cpu": statistics.median(by_cpu) if by_cpu else None,
            "first_ms": 1e3 * statistics.median(each.first_s for each in results),
            "alone_ms": 1e3 * statistics.median(each.alone_s for each in results),
            "later_alone_ms": 1e3 * statistics.median(e.alone_s - one.alone_s for e, one in pairs),
            "rates": [each.tok_s for each in results],
        }
        rows[name] = row
        cpu = "" if row["share_by_cpu"] is None else f"{row['share_by_cpu']:.3f}"
        times = f"{row['first_ms']:7.1f} ms {row['alone_ms']:7.1f} ms"
        print(f"{name:14} {row['tok_s']:9.0f} {row['share']:12.3f} {cpu:>12} {times}")
    return rows


if __name__ == "__main__":
    main()
