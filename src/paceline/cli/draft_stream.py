"""Streamed text that shows which tokens a drafter proposed."""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import click


def print_drafted(stream: Any, tokenizer: Any, *, has_colour: bool) -> Any:
    """Print the text as it comes: accepted drafts in green, or in brackets where there is no
    colour.  Returns the last snapshot.
    """
    painter, snapshot = None, None
    for snapshot in stream:
        if painter is None:
            painter = Painter(tokenizer, snapshot.prompt_token_ids, has_colour=has_colour)
        click.echo(painter.paint(snapshot), nl=False, color=has_colour)
    click.echo()
    return snapshot


class Painter:
    """Follows the snapshots of one completion, token by token."""

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int], *, has_colour: bool) -> None:
        from paceline.text.detokenize import Detokenizer

        self._text = Detokenizer(tokenizer, prompt_ids)
        self._has_colour = has_colour
        self._num_shown = 0  # tokens

    def paint(self, snapshot: Any) -> str:
        """What has come since the last snapshot."""
        completion = snapshot.outputs[0]
        end = len(completion.token_ids)
        if isinstance(completion.stop_reason, int):
            end -= 1  # the token that stopped it is no part of the text
        pieces = [
            (is_drafted, self._text.push([token]).text)
            for token, is_drafted in zip(
                completion.token_ids[self._num_shown : end],
                completion.is_drafted[self._num_shown : end],
                strict=True,
            )
        ]
        self._num_shown = max(self._num_shown, end)
        if snapshot.finished:
            pieces.append((False, self._text.flush().text))
        return "".join(
            self._marked("".join(text for _, text in run), is_drafted)
            for is_drafted, run in groupby(pieces, key=lambda piece: piece[0])
        )

    def _marked(self, text: str, is_drafted: bool) -> str:
        if not (is_drafted and text):
            return text
        return click.style(text, fg="green") if self._has_colour else f"[{text}]"


def draft_line(metrics: Any) -> str:
    """What speculation did for a request, for people."""
    if not metrics.rounds:
        return "no rounds: nobody drafted; see --speculative-algorithm"
    return str(metrics.acceptance)
