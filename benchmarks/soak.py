"""A server among rude clients for minutes: no wrong text, nothing lost, flat memory, no long gap.

    python benchmarks/soak.py --minutes 20 [-- Qwen/Qwen3-8B --dtype float32]

Greedy texts of some prompts are taken one by one from the calm server.  Then, side by side: streams
and whole answers, whose texts must be these; clients that leave in the middle, read slowly, send
half a body, or bodies of megabytes; bursts that overfill the queue; and one steady stream, whose
gaps are measured, beside how late the client itself wakes.  Behind that nothing may run or wait,
no page may be owned, and as many requests as the server has places for must be taken at once.
Exits 1 when a check fails; the last line is JSON.  Arguments behind -- are those of `paceline
serve`; give a model a dtype without ties.
"""

import argparse
import asyncio
import json
import os
import random
import re
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from paceline.bench.serve.client import AnswerError, Client, Place
from paceline.bench.serve.load import answer_text
from paceline.bench.serve.own_server import own_server
from paceline.core.progress import Progress
from paceline.plan.machine import versions

SEED = 5
ROWS, QUEUE = 8, 56
PLACES = ROWS + QUEUE
OPEN = PLACES - PLACES // 32  # of these, for a client that has some already (decision 067)
BUNDLED = ("bundled", "--dtype", "float32", "--max-model-len", "1024")
SERVED = ("--max-num-seqs", str(ROWS), "--max-queued-requests", str(QUEUE))
PROMPTS = (
    *(f"def {name}(n):\n    return " for name in ("fibonacci", "factorial", "square", "even")),
    *("x = 1\n" * count + f"y = {count}" for count in (3, 40, 60)),
    "import os\nimport sys\n\n\nclass Reader:\n    def read(self, path):\n",
)
TOKENS = (1, 7, 24, 48)  # of answers
BIG = 1 << 22  # characters of a big body
BEAT_S = 0.02  # between two looks at this program's own loop
POLITE = {"400", "413"}  # what a body that cannot be served is answered with
FULL = "503"  # the queue
Ask = tuple[str, int]  # prompt, tokens


@dataclass(slots=True, kw_only=True)
class Tally:
    """What was sent and what was wrong."""

    seconds: float = 0.0
    sent: Counter[str] = field(default_factory=Counter)  # by kind of client
    compared: int = 0  # texts
    wrong_texts: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)  # answers nobody expected
    refused: int = 0  # because the queue was full
    largest_gap_s: float = 0.0  # of the steady stream
    gaps: int = 0
    largest_lag_s: float = 0.0  # of this program's own loop, which no server is to blame for
    leaked: dict[str, float] = field(default_factory=dict)  # what /metrics still shows at the end
    places: int = 0  # requests taken at once at the end
    rss_mib: list[float] = field(default_factory=list)  # of the server's processes, by the second

    @property
    def growth_mib(self) -> float:
        """From the middle to the last tenth, by medians."""
        size = len(self.rss_mib)
        if size < 10:
            return 0.0
        width = max(1, size // 10)
        begin = self.rss_mib[size // 2 : size // 2 + width]
        return median(self.rss_mib[-width:]) - median(begin)

    def faults(self, *, max_gap_s: float, max_growth_mib: float) -> list[str]:
        """What a run must not show."""
        found = [f"wrong text: {text}" for text in self.wrong_texts]
        found += [f"failed: {text}" for text in self.failed]
        found += [f"leaked: {name} is {value:g}" for name, value in self.leaked.items()]
        if self.places != OPEN:
            found.append(f"places: {self.places} of {OPEN} requests were taken at once")
        if not self.compared or not self.gaps:
            found.append(f"{self.compared} texts compared, {self.gaps} gaps: nothing was shown")
        if self.largest_gap_s > max_gap_s:
            found.append(f"gap: {self.largest_gap_s:.2f} s, at most {max_gap_s:g}")
        if self.growth_mib > max_growth_mib:
            found.append(f"memory: {self.growth_mib:.0f} MiB more, at most {max_growth_mib:g}")
        return found

    def to_json(self) -> dict[str, Any]:
        size = len(self.rss_mib)
        width = max(1, size // 10)
        return {
            "seconds": self.seconds,
            "sent": dict(sorted(self.sent.items())),
            "texts_compared": self.compared,
            "wrong_texts": len(self.wrong_texts),
            "failed": len(self.failed),
            "refused_by_full_queue": self.refused,
            "largest_gap_s": self.largest_gap_s,
            "gaps": self.gaps,
            "largest_lag_s": self.largest_lag_s,
            "leaked": self.leaked,
            "places_at_the_end": self.places,
            "rss_mib": {
                "first": self.rss_mib[0] if self.rss_mib else None,
                "most": max(self.rss_mib, default=None),
                "last": self.rss_mib[-1] if self.rss_mib else None,
                "growth": self.growth_mib,
                "by_tenth": [median(self.rss_mib[at : at + width]) for at in range(0, size, width)],
            },
        }


class Soak:
    """One run against one server; owns its tally."""

    def __init__(self, url: str, model: str, *, seconds: float) -> None:
        self.tally = Tally()
        self._place = Place.of(url)
        self._model = model
        self._seconds = seconds
        self._end = 0.0
        self._client = Client(self._place, api_key=None, timeout=600.0)
        self._texts: dict[Ask, str] = {}  # as the calm server gives them
        self._big_bodies: list[bytes] = []  # made before anything is timed

    async def run(self) -> None:
        """Raises AnswerError when the calm server does not answer."""
        began = time.monotonic()
        prompts: tuple[Any, ...] = ("many words " * (BIG // 11), [1] * (BIG // 3))
        self._big_bodies = [json.dumps(self._body((each, 1))).encode() for each in prompts]
        try:
            for prompt in PROMPTS:
                for tokens in TOKENS:
                    answer = await self._client.post("/completions", self._body((prompt, tokens)))
                    self._texts[prompt, tokens] = answer_text(answer)
            self._end = time.monotonic() + self._seconds
            kinds = {
                "whole": (self._whole, 3),
                "stream": (self._stream, 3),
                "chat": (self._chat, 1),
                "leaves": (self._leaves, 3),
                "slow reader": (self._reads_slowly, 2),
                "half a body": (self._half_a_body, 1),
                "big body": (self._big_body, 1),
                "large and valid": (self._large_and_valid, 1),
                "burst": (self._burst, 1),
                "steady": (self._steady, 1),
            }
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch())
                group.create_task(self._watch_itself())
                for kind, (act, count) in kinds.items():
                    for number in range(count):
                        source = random.Random(f"{SEED} {kind} {number}")
                        group.create_task(self._repeat(kind, act, source))
            await self._settle()
        finally:
            self.tally.seconds = time.monotonic() - began
            self._client.close()

    async def _repeat(
        self, kind: str, act: Callable[[random.Random], Awaitable[None]], source: random.Random
    ) -> None:
        while time.monotonic() < self._end:
            self.tally.sent[kind] += 1
            try:
                await act(source)
            except AnswerError as error:
                if error.kind == FULL and "queue_full" in str(error):
                    self.tally.refused += 1
                    await asyncio.sleep(0.1)
                else:
                    self.tally.failed.append(f"{kind}: {error.kind}: {error}")

    def _body(self, ask: Ask, **more: Any) -> dict[str, Any]:
        prompt, tokens = ask
        greedy = {"temperature": 0, "ignore_eos": True, "max_tokens": tokens}
        return {"model": self._model, "prompt": prompt, **greedy, **more}

    def _ask(self, source: random.Random) -> Ask:
        return source.choice(PROMPTS), source.choice(TOKENS)

    def _compare(self, ask: Ask, text: str, *, is_whole: bool = True) -> None:
        expected = self._texts[ask]
        self.tally.compared += 1
        if text != expected if is_whole else not expected.startswith(text):
            self.tally.wrong_texts.append(f"{ask[0][:20]!r} x {ask[1]}: {text!r}, not {expected!r}")

    async def _whole(self, source: random.Random) -> None:
        ask = self._ask(source)
        self._compare(ask, answer_text(await self._client.post("/completions", self._body(ask))))

    async def _stream(self, source: random.Random) -> None:
        ask = self._ask(source)
        self._compare(ask, await self._read(ask))

    async def _chat(self, source: random.Random) -> None:
        """Its text is nobody's here; its end is looked at."""
        body = self._body(self._ask(source), messages=[{"role": "user", "content": "hi"}])
        del body["prompt"]
        await self._client.post("/chat/completions", body)

    async def _leaves(self, source: random.Random) -> None:
        ask = (source.choice(PROMPTS), TOKENS[-1])
        self._compare(ask, await self._read(ask, most=source.randrange(1, 12)), is_whole=False)

    async def _reads_slowly(self, source: random.Random) -> None:
        ask = self._ask(source)
        self._compare(ask, await self._read(ask, pause_s=0.1 * source.random(), logprobs=5))

    async def _read(
        self, ask: Ask, *, most: int = 1 << 30, pause_s: float = 0.0, **more: Any
    ) -> str:
        """The text of a stream, of its first events."""
        said = ""
        body = self._body(ask, stream=True, **more)
        async with aclosing(self._client.stream("/completions", body)) as events:
            async for _, event in events:
                said += answer_text(event)
                most -= 1
                if not most:
                    break
                if pause_s:
                    await asyncio.sleep(pause_s)
        return said

    async def _half_a_body(self, source: random.Random) -> None:
        _, writer = await asyncio.open_connection(self._place.host, self._place.port)
        path, length = f"{self._place.path}/completions", source.choice((1_000, 1_000_000))
        writer.write(
            f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n".encode()
        )
        writer.write(b'{"model": "' + b"x" * (length // 2))
        await asyncio.sleep(source.random())
        writer.transport.abort()

    async def _big_body(self, source: random.Random) -> None:
        try:
            await self._client.post_encoded("/completions", source.choice(self._big_bodies))
        except AnswerError as error:
            if error.kind not in POLITE:
                raise
        else:
            self.tally.failed.append("big body: answered")
        await asyncio.sleep(source.random())

    async def _large_and_valid(self, source: random.Random) -> None:
        """Read in a process of its own (decision 066), and answered like any other."""
        ask = self._ask(source)
        answer = await self._client.post("/completions", self._body(ask, user="u" * 200_000))
        self._compare(ask, answer_text(answer))

    async def _burst(self, source: random.Random) -> None:
        asks = [(source.choice(PROMPTS), 7) for _ in range(PLACES)]
        answers = await self._at_once(asks)
        for ask, answer in zip(asks, answers, strict=True):
            if answer is not None:
                self._compare(ask, answer)
        await asyncio.sleep(3.0)

    async def _at_once(self, asks: Sequence[Ask]) -> list[str | None]:
        """Their texts; None of those that found the queue full."""

        async def one(ask: Ask) -> str | None:
            try:
                return answer_text(await self._client.post("/completions", self._body(ask)))
            except AnswerError as error:
                if error.kind != FULL:
                    raise
                self.tally.refused += 1
                return None

        return list(await asyncio.gather(*map(one, asks)))

    async def _steady(self, source: random.Random) -> None:
        """One stream behind another, and the gaps within."""
        body = self._body((PROMPTS[0], 400), stream=True)
        async with aclosing(self._client.stream("/completions", body)) as events:
            last = None
            async for now, _ in events:
                if last is not None:
                    self.tally.gaps += 1
                    self.tally.largest_gap_s = max(self.tally.largest_gap_s, now - last)
                last = now

    async def _watch(self) -> None:
        with Progress("soak", int(self._seconds), unit="s") as bar:
            while time.monotonic() < self._end:
                self.tally.rss_mib.append(rss_mib(os.getpid()))
                bar.note(f"{self.tally.compared} texts, {len(self.tally.wrong_texts)} wrong")
                bar.advance()
                await asyncio.sleep(1.0)

    async def _watch_itself(self) -> None:
        while time.monotonic() < self._end:
            due = time.monotonic() + BEAT_S
            await asyncio.sleep(BEAT_S)
            self.tally.largest_lag_s = max(self.tally.largest_lag_s, time.monotonic() - due)

    async def _settle(self) -> None:
        """Wait until nothing runs, as far as that comes; then see that all places are free."""
        shown = ("requests_running", "requests_waiting", "kv_cache_usage_ratio")
        for _ in range(300):
            page = await self._metrics()
            left = {name: page[name] for name in shown if page[name]}
            if not left:
                break
            await asyncio.sleep(0.1)
        self.tally.leaked = left | ({} if page["engine_up"] else {"engine_down": 1.0})
        answers = await self._at_once([(PROMPTS[0], 1)] * OPEN)
        self.tally.places = sum(answer is not None for answer in answers)

    async def _metrics(self) -> dict[str, float]:
        reader, writer = await asyncio.open_connection(self._place.host, self._place.port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        page = (await reader.read()).decode()
        writer.close()
        rows = re.findall(r"^paceline_(\w+) ([\d.e+-]+)$", page, re.MULTILINE)
        return {name: float(value) for name, value in rows}


def rss_mib(pid: int) -> float:
    """Resident memory of the processes below one."""
    parents: dict[int, list[int]] = {}
    pages: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        parents.setdefault(int(stat[1]), []).append(int(folder.name))
        pages[int(folder.name)] = int(stat[21])
    below, found = list(parents.get(pid, ())), 0
    while below:
        each = below.pop()
        found += pages[each]
        below += parents.get(each, ())
    return found * os.sysconf("SC_PAGE_SIZE") / 2**20


def soak(seconds: float, words: Sequence[str] = ()) -> Tally:
    """Start a server, soak it, end it."""
    words = tuple(words) or BUNDLED
    served = (*words, "--served-model-name", "soaked", *SERVED)
    with own_server(served) as url:
        run = Soak(url, "soaked", seconds=seconds)
        asyncio.run(run.run())
    return run.tally


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--max-gap", type=float, default=1.0, help="of the steady stream  [s]")
    parser.add_argument("--max-growth", type=float, default=64.0, help="of the server  [MiB]")
    parser.add_argument("words", nargs="*", help="behind --: arguments of paceline serve")
    args = parser.parse_args()
    tally = soak(60.0 * args.minutes, args.words)
    faults = tally.faults(max_gap_s=args.max_gap, max_growth_mib=args.max_growth)
    for text in faults:
        print(f"FAILED {text}")
    print(
        f"{sum(tally.sent.values())} acts in {tally.seconds:.0f} s, {tally.compared} texts "
        f"compared, {len(tally.wrong_texts)} wrong, {len(tally.failed)} failed, {tally.refused} "
        f"found the queue full; largest gap {tally.largest_gap_s:.2f} s, of the client itself "
        f"{tally.largest_lag_s:.2f} s, memory {tally.growth_mib:+.0f} MiB"
    )
    document = {
        "benchmark": "soak",
        "served": [*(args.words or BUNDLED), *SERVED],
        "load_average": os.getloadavg(),
        "cores": os.cpu_count(),
        "versions": versions(),
        "max_gap_s": args.max_gap,
        "max_growth_mib": args.max_growth,
        **tally.to_json(),
        "faults": faults,
    }
    print(json.dumps(document))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
