"""The parse score: how many completions of held-out function headers are Python.

A prompt is a header without its newline (`def name(args):`): newline and indentation are one
token, and the model has to write it.  It is completed greedily; what stands after the last complete
line is cut off, and header and rest must parse together.  Imports nothing outside the standard
library, so any engine can be scored.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterable
from pathlib import Path

HEADERS = Path(__file__).parent / "headers.json"
NUM_NEW_TOKENS = 64


def read_headers(path: Path = HEADERS) -> list[dict[str, str]]:
    """`header` and `path` (the file it was taken from) of every header, in the order scored."""
    return json.loads(path.read_text())


def cut_at_last_line(completion: str, *, ended: bool) -> str:
    """All of a completion which the model ended, else what stands before the last newline."""
    return completion if ended else completion[: completion.rfind("\n") + 1]


def parses(header: str, body: str) -> bool:
    """An empty body does not count, although an empty rest of a one-line function would parse."""
    if not body.strip():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(header + body)
    except (SyntaxError, ValueError):
        return False
    return True


def parse_report(
    headers: Iterable[dict[str, str]], completions: Iterable[tuple[str, bool]]
) -> list[dict[str, object]]:
    """One entry per header: its file, the kept text and whether it parses.

    completions: (text without the end-of-text mark, whether the model ended it), one per header.
    """
    report = []
    for item, (text, ended) in zip(headers, completions, strict=True):
        body = cut_at_last_line(text, ended=ended)
        report.append({**item, "body": body, "parses": parses(item["header"], body)})
    return report
