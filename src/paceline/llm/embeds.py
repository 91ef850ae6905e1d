"""Embeds: rows that callers bring in place of embeddings, read and checked."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import RequestError
from paceline.core.request.input_rows import InputRows

Rows = Tensor | np.ndarray  # [num_tokens, hidden]  floats


@dataclass(frozen=True, slots=True, eq=False)
class Embeds:
    """Rows for neighbouring tokens of a prompt, in place of what the embedding returns for their
    ids (in models that scale it: scaled)."""

    start: int  # position of the first
    rows: Rows
    media_hash: str | None = None  # equal ones share KV; None: of the rows' bytes


def as_embeds(value: object) -> tuple[Embeds, ...]:
    """What a prompt brings as prompt_embeds: rows of all its tokens, or several Embeds.  Raises
    RequestError."""
    if isinstance(value, Rows):
        return (Embeds(0, value),)
    if isinstance(value, Embeds):
        return (value,)
    if isinstance(value, Sequence) and value and all(isinstance(each, Embeds) for each in value):
        return tuple(value)
    raise _error("a tensor [num_tokens, hidden], or Embeds", type(value).__name__)


def read_embeds(
    embeds: Sequence[Embeds], *, num_tokens: int, hidden_size: int, dtype: torch.dtype
) -> tuple[InputRows, ...]:
    """Ascending, in the model's dtype, in memory of their own.  Raises RequestError."""
    found: list[InputRows] = []
    for each in sorted(embeds, key=lambda one: one.start):
        rows = torch.as_tensor(each.rows)
        if rows.dim() != 2 or rows.shape[1] != hidden_size or not rows.is_floating_point():
            got = f"{str(rows.dtype).removeprefix('torch.')} {list(rows.shape)}"
            raise _error(f"floats [num_tokens, {hidden_size}]", got)
        low, stop = found[-1].stop if found else 0, each.start + rows.shape[0]
        if each.start < low or not each.start < stop <= num_tokens:
            expected = f"rows of tokens {low} to {num_tokens - 1}, none of them twice"
            raise _error(expected, f"{rows.shape[0]} rows from token {each.start} on")
        held = rows.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()
        name = each.media_hash if each.media_hash is not None else _hash_of(held)
        found.append(
            InputRows(start=each.start, num_tokens=held.shape[0], media_hash=name, rows=held)
        )
    return tuple(found)


def _hash_of(rows: Tensor) -> str:
    return hashlib.blake2b(rows.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _error(expected: str, got: str) -> RequestError:
    remedy = "bring a row for each placeholder of prompt_token_ids, with Embeds(start, rows)"
    return RequestError.about("prompt_embeds", expected=expected, got=got, remedy=remedy)
