"""mask_tokens: forbid, row by row, the tokens whose bit is 0.

The bits lie as in xgrammar (python/xgrammar/matcher.py, `allocate_token_bitmask`: int32 [batch,
ceil(vocab / 32)]) and in llguidance (python/llguidance/numpy.py): token t is bit t % 32 of word
t // 32, the lowest bit first.

Worked example: a vocabulary of 40, a row that allows tokens 0, 3, 31, 32 and 39:

    words   [0b1000...01001, 0b10000001]   that is [-2147483639, 129]
    the row's logits stay at 0, 3, 31, 32 and 39 and are -inf at all others

Only rows with a mask are touched.  In these a number that is not finite becomes NaN, wherever it
is: a mask hides no broken row, and the samplers take the -inf of such a row for what it is.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op, host_array

BITS = 32  # of a word
NO_MASK = -1
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Masks(NamedTuple):
    """Which tokens each row of logits may take."""

    ids: Tensor  # [num_rows]  int32  row of `words`; NO_MASK: every token
    words: Tensor  # [num_masks, ceil(vocab / 32)]  int32  bit t % 32 of word t // 32: token t


def require_logits(
    logits: Tensor, *, remedy: str = "pass what the language-model head returned"
) -> None:
    """Raise KernelArgumentError for what no sampler takes as logits."""
    if logits.ndim != 2 or logits.dtype not in _DTYPES or logits.stride(1) != 1:
        reject(
            "logits",
            expected="float32, bfloat16 or float16 [num_rows, vocab], contiguous rows",
            got=logits,
            remedy=remedy,
        )


def num_words(vocab_size: int) -> int:
    """int32 words of a mask."""
    return -(-vocab_size // BITS)


def mask_tokens_reference(logits: Tensor, masks: Masks) -> Tensor:
    """The definition: [num_rows, vocab], a new tensor.  Arguments as of `mask_tokens`."""
    tokens = torch.arange(logits.shape[1], device=logits.device)
    words = masks.words[masks.ids.clamp(min=0).long()][:, tokens // BITS]
    is_allowed = (words >> (tokens % BITS)) & 1 == 1
    kept = logits.masked_fill(~is_allowed, float("-inf"))
    kept = kept.masked_fill(~torch.isfinite(logits), float("nan"))
    return torch.where((masks.ids == NO_MASK)[:, None], logits, kept)


def rows_are_finite(logits: Tensor, masks: Masks | None) -> Tensor:
    """[num_rows] bool: whether a row holds neither NaN nor an infinity, those of its mask apart.

    logits: [num_rows, vocab], floating, behind `mask_tokens` where there are masks.
    """
    # One pass: a NaN or an infinity stays one in the sum, which no real logits can overflow.
    sums = logits.float().sum(-1)
    if masks is None:
        return torch.isfinite(sums)
    return torch.isfinite(sums) | ((masks.ids != NO_MASK) & ~torch.isnan(sums))


def bind_rows_are_finite(mask_ids: Tensor | None, finite: Tensor) -> Callable[[Tensor], None]:
    """What writes `rows_are_finite` of logits [num_rows, vocab] float32 to `finite`, on a CPU.

    mask_ids: [num_rows] int32, of masks; finite: [num_rows] bool.
    """
    sums = torch.empty(finite.shape)
    host_sums, is_finite = host_array(sums), host_array(finite)
    ids = None if mask_ids is None else host_array(mask_ids)

    def note(logits: Tensor) -> None:
        torch.sum(logits, -1, out=sums)
        np.isfinite(host_sums, out=is_finite)
        if ids is not None:
            np.logical_or(is_finite, (ids != NO_MASK) & ~np.isnan(host_sums), out=is_finite)

    return note


def _bind_mask_tokens(logits: Tensor, ids: Tensor, words: Tensor) -> Run:
    host_ids = host_array(ids)
    nan, forbidden = float("nan"), float("-inf")
    shifts = torch.arange(BITS, dtype=torch.int32)
    vocab = logits.shape[1]

    def run() -> None:
        for n in (host_ids != NO_MASK).nonzero()[0].tolist():
            row, mask = logits[n], words[int(host_ids[n])]
            bits = torch.bitwise_right_shift(mask[:, None], shifts).bitwise_and_(1)
            is_finite = torch.isfinite(row)
            row.masked_fill_(bits.flatten()[:vocab] == 0, forbidden)
            row.masked_fill_(~is_finite, nan)

    return run


def _mask_tokens_cuda(logits: Tensor, ids: Tensor, words: Tensor) -> None:
    from paceline.kernels._triton.mask_tokens import launch_mask_tokens

    launch_mask_tokens(logits, Masks(ids, words))


_MASK_TOKENS = define_op(
    "mask_tokens(Tensor(a!) logits, Tensor ids, Tensor words) -> ()",
    bind=_bind_mask_tokens,
    cuda=_mask_tokens_cuda,
)


def mask_tokens(logits: Tensor, masks: Masks) -> None:
    """-inf where a row's mask has no bit; NaN where such a row is not finite.  In place.

    logits: [num_rows, vocab] float32, bfloat16 or float16, the last dimension contiguous; masks: of
    each row; bits behind the vocabulary say nothing.  Mutates logits alone.  Graph-safe: the grid
    depends on shapes only.  Raises KernelArgumentError.
    """
    ids, words = masks
    require_logits(logits, remedy="pass a copy of what the language-model head returned")
    rows, vocab = logits.shape
    if ids.shape != (rows,) or ids.dtype != torch.int32 or not ids.is_contiguous():
        remedy = "give each row the index of its mask, or NO_MASK"
        reject("masks.ids", expected=f"int32 [{rows}], contiguous", got=ids, remedy=remedy)
    width = num_words(vocab)
    is_shaped = words.ndim == 2 and words.shape[1] == width and words.is_contiguous()
    if not is_shaped or words.dtype != torch.int32:
        remedy = "pack 32 tokens to a word, the lowest bit first"
        expected = f"int32 [num_masks, {width}], contiguous"
        reject("masks.words", expected=expected, got=words, remedy=remedy)
    _MASK_TOKENS(logits, ids, words)
