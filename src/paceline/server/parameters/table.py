"""The table of parameters: what each endpoint does with every field, made from the types that read
bodies and the rules that refuse them.

GET /capabilities shows it behind what the model does, and docs/parameters.md, which `python -m
paceline.server.parameters.table` writes.
"""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.server.bodies.refusals import refusals_of
from paceline.server.bodies.wire import ChatRequest, CompletionRequest, StreamOptions
from paceline.server.messages.wire import (
    CountRequest,
    CustomTool,
    MessagesRequest,
    Text,
    Thinking,
    ToolResult,
    ToolUse,
)
from paceline.server.parameters.ignored import HEADER, ignored_of
from paceline.server.parameters.rules import rules_of
from paceline.server.responses.wire import ContentPart, Item, Reasoning, ResponsesRequest
from paceline.server.tokens.wire import DetokenizeRequest, TokenizeRequest
from paceline.server.tools.wire import Message
from paceline.server.vectors.wire import EmbeddingsRequest, RerankRequest, ScoreRequest

SERVED, ABSENT = "served", "unknown: 400"
ABOUT_THE_CALLER = {"metadata", "prompt_cache_key", "safety_identifier", "user"}
KINDS: Mapping[str, type[msgspec.Struct]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingsRequest,
    "/v1/rerank": RerankRequest,
    "/v1/score": ScoreRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
PARTS: Mapping[str, type[msgspec.Struct]] = {
    "stream_options": StreamOptions,
    "a message": Message,
    "a text block of /v1/messages": Text,
    "a thinking block of /v1/messages": Thinking,
    "a tool_use block of /v1/messages": ToolUse,
    "a tool_result block of /v1/messages": ToolResult,
    "a tool of /v1/messages": CustomTool,
    "an item of /v1/responses": Item,
    "a part of an item of /v1/responses": ContentPart,
    "reasoning of /v1/responses": Reasoning,
}


def answers_of(kind: type[msgspec.Struct]) -> dict[str, str]:
    """What is done with each field of `kind`, by name."""
    refused, ignored = refusals_of(kind), ignored_of(kind)
    found = {}
    for name in kind.__struct_fields__:
        if name in refused:
            allowed = " or ".join(map(json.dumps, (None, *refused[name].allowed)))
            found[name] = f"only {allowed}: {refused[name].remedy}"
        elif name in ignored:
            found[name] = f"ignored, and listed in {HEADER}: {ignored[name].why}"
        else:
            is_about = name in ABOUT_THE_CALLER
            found[name] = "taken, changes no answer" if is_about else SERVED
    return found


def rules() -> list[str]:
    """Between fields, in the words of a refusal."""
    kinds = [*KINDS.values(), *PARTS.values()]
    return list(dict.fromkeys(rule.told() for kind in kinds for rule in rules_of(kind)))


def capabilities() -> dict[str, Any]:
    """The body of GET /capabilities, but for what the model does."""
    return {
        "parameters": {path: answers_of(kind) for path, kind in KINDS.items()},
        "parts": {name: answers_of(kind) for name, kind in PARTS.items()},
        "rules": rules(),
    }


def page() -> str:
    """docs/parameters.md."""
    by_path = [answers_of(kind) for kind in KINDS.values()]
    names = sorted(set().union(*by_path))
    lines = [
        "# Parameters of requests",
        "",
        "Written by `python -m paceline.server.parameters.table` from the types that read bodies;",
        "a test fails when it is stale. `GET /capabilities` says the same, and in `ends` what the",
        "model does: `generate`, `score`, `pool`; `scores_pairs` tells whether what it pools are",
        "scores, which /v1/rerank and /v1/score ask for. null means left out; a field that is not",
        "here is a 400.",
        "",
        f"| field | {' | '.join(KINDS)} |",
        "|---|---|---|",
        *(_row(name, [each.get(name, ABSENT) for each in by_path]) for name in names),
    ]
    for part, kind in PARTS.items():
        lines += ["", f"## Of {part}", "", "| field | |", "|---|---|"]
        lines += [_row(name, [said]) for name, said in sorted(answers_of(kind).items())]
    lines += ["", "## Between fields", "", *(f"* {rule}" for rule in rules()), ""]
    return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"| `{name}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    print(page(), end="")
