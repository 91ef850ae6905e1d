"""Greedy choice: the most likely token of each row, and whether all its logits are finite.

The GPU's kernel reads the logits once, in the dtype the model left them in: one pass finds the best
of each block of the vocabulary, so that a single row fills the chip, and a second the best block.
On a CPU numpy's argmax is one pass of vector instructions; torch's looks at token after token.
"""

import torch
from torch import Tensor

from paceline.kernels.custom_op import Run, define_op, host_array
from paceline.kernels.mask_tokens import (
    Masks,
    bind_rows_are_finite,
    require_logits,
    rows_are_finite,
)

BLOCK_VOCAB = 2048  # tokens of a program: 63 of them for a row of 128,000


def greedy_reference(logits: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
    """The definition: (token_ids, finite) as `greedy`."""
    logits = logits.float()
    finite = rows_are_finite(logits, masks)
    return logits.argmax(-1).masked_fill(~finite, 0), finite


def _bind_greedy(logits: Tensor, mask_ids: Tensor | None, token_ids: Tensor, finite: Tensor) -> Run:
    note_finite = bind_rows_are_finite(mask_ids, finite)
    chosen, is_finite = host_array(token_ids), host_array(finite)
    given = host_array(logits) if logits.dtype == torch.float32 else None

    def run() -> None:
        wide = logits.float()
        note_finite(wide)
        values = host_array(wide) if given is None else given
        values.argmax(-1, out=chosen)
        chosen[~is_finite] = 0

    return run


def _greedy_cuda(
    logits: Tensor, mask_ids: Tensor | None, token_ids: Tensor, finite: Tensor
) -> None:
    from paceline.kernels._triton.greedy import launch_greedy

    launch_greedy(logits, token_ids, finite, mask_ids=mask_ids)


def _scratch(logits: Tensor, *_: Tensor | None) -> tuple[int, ...]:
    """The best of each block, and which token it is."""
    rows, vocab = logits.shape
    blocks = rows * -(-vocab // BLOCK_VOCAB)
    return 4 * blocks, 4 * blocks


_GREEDY = define_op(
    "greedy(Tensor logits, Tensor? mask_ids, Tensor(a!) token_ids, Tensor(b!) finite) -> ()",
    bind=_bind_greedy,
    cuda=_greedy_cuda,
    scratch=_scratch,
)


def greedy(logits: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row: (token_ids [rows] int64, finite [rows] bool).

    logits: [rows, vocab] float32, bfloat16 or float16, the last dimension contiguous.  A row that
    holds NaN or an infinity gets token 0 and finite False; masks: of logits behind `mask_tokens`,
    where the -inf of a row that has one is none.  Mutates nothing.  Graph-safe: the grid depends on
    shapes only.  Raises KernelArgumentError.
    """
    require_logits(logits)
    num_rows = logits.shape[:1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _GREEDY(logits, None if masks is None else masks.ids, token_ids, finite)
    return token_ids, finite
