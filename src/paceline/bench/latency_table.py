"""The document of `paceline bench latency` as people read it."""

from collections.abc import Mapping
from typing import Any

from paceline.engine.acceptance import drafter_words


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    rows = [
        f"{document['model']} on {document['device']['name']}",
        f"boot {document['boot_s']:.2f} s, first token {_seconds(document['first_token_s'])} "
        f"after process start, kernel cache {document['kernel_cache']}",
        f"attention {document['attention']['name']} ({document['attention']['why']})",
        *_speculation_rows(document),
        f"{'batch':>6}{'input':>8}{'output':>8}{'ttft ms':>12}{'decode tok/s':>16}{'spread':>9}",
    ]
    rows += [
        f"{r['batch_size']:>6}{r['input_len']:>8}{r['output_len']:>8}"
        f"{r['ttft_ms']:>12.2f}{r['decode_tok_s']:>16.1f}{r['spread']:>9.1%}"
        for r in document["results"]
    ]
    return "\n".join(rows)


def _speculation_rows(document: Mapping[str, Any]) -> list[str]:
    """Who drafts, and how many tokens a round gave; nothing where nobody does."""
    plan = document["speculation"]
    if plan is None:
        return []
    means = [result["mean_tokens_per_round"] for result in document["results"]]
    forced = plan["forced_tokens_per_round"]
    word = "" if forced is None else f"; FORCED to {forced:g} tokens per round, the texts are wrong"
    per_round = ", ".join("-" if mean is None else f"{mean:.2f}" for mean in means)
    return [f"speculation {drafter_words(plan)}: {per_round} tokens per round{word}"]


def _seconds(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.2f} s"
