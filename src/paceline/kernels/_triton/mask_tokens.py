"""Triton kernel of mask_tokens; see kernels/mask_tokens.py for the definition."""

import triton
import triton.language as tl
from torch import Tensor

from paceline.kernels._triton.launch import launch, let_next_start, overlap_options, wait_for_inputs
from paceline.kernels._triton.runtime import cdiv
from paceline.kernels.mask_tokens import BITS, Masks

_BLOCK_WORDS = 64  # of a program: 2048 tokens
_BITS = tl.constexpr(BITS)


@triton.jit
def _mask_tokens_kernel(
    logits_ptr,  # [num_rows, vocab]
    ids_ptr,  # [num_rows] int32, -1: no mask
    words_ptr,  # [num_masks, words] int32
    stride_logits_row,
    stride_words_row,
    vocab,
    BLOCK_VOCAB: tl.constexpr,
    OVERLAPPED: tl.constexpr,
):
    wait_for_inputs(OVERLAPPED)
    let_next_start(OVERLAPPED)
    n = tl.program_id(1).to(tl.int64)
    mask = tl.load(ids_ptr + n).to(tl.int64)
    if mask >= 0:
        tokens = tl.program_id(0) * BLOCK_VOCAB + tl.arange(0, BLOCK_VOCAB)
        is_token = tokens < vocab
        word = tl.load(
            words_ptr + mask * stride_words_row + tokens // _BITS, mask=is_token, other=0
        )
        is_allowed = (word >> (tokens % _BITS)) & 1 != 0
        row_ptr = logits_ptr + n * stride_logits_row
        logits = tl.load(row_ptr + tokens, mask=is_token, other=0.0)
        is_finite = tl.abs(logits.to(tl.float32)) < float("inf")  # false for NaN
        kept = tl.where(is_allowed, logits.to(tl.float32), float("-inf"))
        kept = tl.where(is_finite, kept, float("nan"))
        tl.store(row_ptr + tokens, kept.to(logits.dtype), mask=is_token)


def launch_mask_tokens(logits: Tensor, masks: Masks, *, block_words: int = _BLOCK_WORDS) -> None:
    """One program per row and block of the vocabulary; those of unmasked rows leave at once."""
    rows, vocab = logits.shape
    if rows == 0:
        return
    block = block_words * BITS
    launch(
        _mask_tokens_kernel,
        (cdiv(vocab, block), rows),
        logits,
        masks.ids,
        masks.words,
        logits.stride(0),
        masks.words.stride(0),
        vocab,
        BLOCK_VOCAB=block,
        num_warps=min(max(block // 512, 1), 8),
        **overlap_options(logits.device, _mask_tokens_kernel),
    )
