"""Tensors that callers bring, read and checked: rows in place of embeddings, and what an encoder
reads."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from paceline.core.errors import RequestError
from paceline.core.model.config import ModelConfig
from paceline.core.request.input_rows import EncoderInput, InputRows

ENCODER_INPUT = "encoder_input"  # a prompt's key

Rows = Tensor | np.ndarray  # [num_tokens, hidden]  floats
_UNREADABLE = (TypeError, ValueError)  # of torch: arrays of objects, or of negative strides


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
        floats = f"floats [num_tokens, {hidden_size}]"
        try:
            rows = torch.as_tensor(each.rows)
        except _UNREADABLE as error:
            raise _error(floats, str(error)) from error
        if rows.dim() != 2 or rows.shape[1] != hidden_size or not rows.is_floating_point():
            raise _error(floats, _shown(rows))
        low, stop = found[-1].stop if found else 0, each.start + rows.shape[0]
        if each.start < low or not each.start < stop <= num_tokens:
            expected = f"rows of tokens {low} to {num_tokens - 1}, none of them twice"
            raise _error(expected, f"{rows.shape[0]} rows from token {each.start} on")
        held = _held(rows, dtype)
        name = each.media_hash if each.media_hash is not None else _hash_of(held)
        found.append(
            InputRows(start=each.start, num_tokens=held.shape[0], media_hash=name, rows=held)
        )
    return tuple(found)


def read_encoder_input(
    value: object, config: ModelConfig, *, dtype: torch.dtype
) -> EncoderInput | None:
    """What the model's encoder shall read of a prompt, in the model's dtype, in memory of its own;
    None: nothing.

    value: a tensor of floats of `ModelConfig.encoder_input`'s shape, or None.  Raises RequestError
    where it is another, or missing, or the model takes none.
    """
    wanted = config.encoder_input
    if value is None and (wanted is None or not wanted.is_needed):
        return None
    if wanted is None:
        raise RequestError.about(
            ENCODER_INPUT,
            expected=f"left out: layers of {config.model_type} read no encoder",
            got=type(value).__name__,
            remedy="leave it out, or load a model with cross attention",
        )
    most = config.max_encoder_len * wanted.frames_per_row
    sizes = (wanted.width, f"0 to {most}")
    floats = "floats [{}, {}]".format(*(sizes if wanted.width_first else reversed(sizes)))
    remedy = "pass it beside the prompt, for one request, without a batch dimension"
    if not isinstance(value, Rows):
        got = "nothing" if value is None else type(value).__name__
        raise RequestError.about(ENCODER_INPUT, expected=floats, got=got, remedy=remedy)
    try:
        given = torch.as_tensor(value)
    except _UNREADABLE as error:
        raise RequestError.about(
            ENCODER_INPUT, expected=floats, got=str(error), remedy=remedy
        ) from error
    frames = given.shape[1 if wanted.width_first else 0] if given.dim() == 2 else 0
    fits = given.shape == wanted.shape(frames) and frames <= most and given.is_floating_point()
    if not fits:
        raise RequestError.about(ENCODER_INPUT, expected=floats, got=_shown(given), remedy=remedy)
    held = _held(given, dtype)
    return EncoderInput(num_rows=wanted.rows(frames), media_hash=_hash_of(held), data=held)


def _shown(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _held(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """On the host, in memory of its own."""
    return tensor.detach().to(device="cpu", dtype=dtype, copy=True).contiguous()


def _hash_of(rows: Tensor) -> str:
    return hashlib.blake2b(rows.view(torch.uint8).numpy().data, digest_size=16).hexdigest()


def _error(expected: str, got: str) -> RequestError:
    remedy = "bring a row for each placeholder of prompt_token_ids, with Embeds(start, rows)"
    return RequestError.about("prompt_embeds", expected=expected, got=got, remedy=remedy)
