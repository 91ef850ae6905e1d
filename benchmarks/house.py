"""How big the house is: lines of code by room, and what a turn and a request touch of it.

    python benchmarks/house.py --against ../old/src

Lines are those with code: blank lines, comments and docstrings do not count.  A steady decode
turn, and one request from submit to end, are those of the bundled model on a CPU: files of ours
whose code ran, and calls within them.  The last line is JSON.
"""

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from sides import SOURCES, Side

SILENT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}
SILENT |= {tokenize.ENCODING, tokenize.ENDMARKER}
TOKENS = 48  # of the request
STEADY = 32  # turns before the one that is counted


def code_lines(source: str) -> int:
    """Lines with code in a module."""
    lines = {
        line
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type not in SILENT
        for line in range(token.start[0], token.end[0] + 1)
    }
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                lines -= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(lines)


def rooms(package: Path) -> dict[str, dict[str, int]]:
    """Files and lines of code by room."""
    files, lines = Counter[str](), Counter[str]()
    for path in package.rglob("*.py"):
        parts = path.relative_to(package).parts
        room = parts[0] if len(parts) > 1 else "(package)"
        files[room] += 1
        lines[room] += code_lines(path.read_text(encoding="utf-8"))
    return {room: {"files": files[room], "lines": lines[room]} for room in sorted(files)}


class Calls:
    """Calls within the package while it is entered, by file."""

    def __init__(self, package: str) -> None:
        self._package = package
        self.by_file = Counter[str]()

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(self._package):
            self.by_file[frame.f_code.co_filename] += 1

    def told(self) -> dict[str, int]:
        """How many files and calls."""
        return {"files": len(self.by_file), "calls": self.by_file.total()}


def serve() -> None:
    """The child: one document about the sources it runs over."""
    import paceline
    from paceline import LLM, SamplingParams

    package = Path(paceline.__file__).parent
    llm = LLM("bundled", threads=1, speculative_algorithm="off")
    params = SamplingParams(temperature=0.0, max_tokens=TOKENS, ignore_eos=True)
    prompt = "def add(a, b):\n"
    llm.generate([prompt], params, use_tqdm=False)  # records the graph
    with Calls(str(package)) as request:
        llm.generate([prompt], params, use_tqdm=False)
    llm.submit([prompt], params)
    step = llm.engine.step  # as `llm.requests.finish` calls it
    for _ in range(STEADY):
        step()
    with Calls(str(package)) as turn:
        step()
    found = {"turn": turn.told(), "request": request.told(), "rooms": rooms(package)}
    print(json.dumps(found), flush=True)


def table(found: dict[str, dict[str, Any]]) -> str:
    """Rooms by side, and what a turn and a request touch."""
    names = sorted({room for side in found.values() for room in side["rooms"]})
    rows = [f"{'room':<14}" + "".join(f"{name + ' files':>12}{'lines':>8}" for name in found)]
    none = {"files": 0, "lines": 0}
    for room in names:
        cells = [side["rooms"].get(room, none) for side in found.values()]
        rows.append(f"{room:<14}" + "".join(f"{c['files']:>12}{c['lines']:>8}" for c in cells))
    totals = [
        {key: sum(room[key] for room in side["rooms"].values()) for key in ("files", "lines")}
        for side in found.values()
    ]
    rows.append(f"{'all':<14}" + "".join(f"{c['files']:>12}{c['lines']:>8}" for c in totals))
    for what in ("turn", "request"):
        cells = [side[what] for side in found.values()]
        rows.append(f"{what:<14}" + "".join(f"{c['files']:>6} files{c['calls']:>8}" for c in cells))
    return "\n".join(rows)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--against", type=Path, help="the src folder of an older checkout")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        serve()
        return
    sources = {} if args.against is None else {"old": args.against}
    found = {}
    for name, folder in {**sources, "new": SOURCES}.items():
        side = Side(folder, [__file__, "--child"])
        found[name] = side.ready
        side.close()
    print(table(found))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
