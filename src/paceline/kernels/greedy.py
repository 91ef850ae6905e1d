"""Greedy choice: the most likely token of each row, and whether all its logits are finite.

The kernel reads the logits once, in the dtype the model left them in: one pass finds the best of
each block of the vocabulary, so that a single row fills the chip, and a second the best block.
"""

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import define_op
from paceline.kernels.mask_tokens import Masks, rows_are_finite
from paceline.kernels.stand_in import device_type

BLOCK_VOCAB = 2048  # tokens of a program: 63 of them for a row of 128,000
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def greedy_reference(logits: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
    """The definition, and the CPU's path: (token_ids, finite) as `greedy`."""
    logits = logits.float()
    finite = rows_are_finite(logits, masks)
    return logits.argmax(-1).masked_fill(~finite, 0), finite


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
    cpu=None,
    cuda=_greedy_cuda,
    scratch=_scratch,
)


def greedy(logits: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
    """The first of the largest logits of each row: (token_ids [rows] int64, finite [rows] bool).

    logits: [rows, vocab] float32, bfloat16 or float16, the last dimension contiguous.  A row that
    holds NaN or an infinity gets token 0 and finite False; masks: of logits behind `mask_tokens`,
    where the -inf of a row that has one is none.  Mutates nothing.  On a CPU these are
    torch's operators, which a recorded graph replays on fixed storages.  Graph-safe: the grid
    depends on shapes only.  Raises KernelArgumentError.
    """
    if logits.ndim != 2 or logits.dtype not in _DTYPES or logits.stride(1) != 1:
        reject(
            "logits",
            expected="float32, bfloat16 or float16 [num_rows, vocab], contiguous rows",
            got=logits,
            remedy="pass what the language-model head returned",
        )
    if device_type(logits.device) == "cpu":
        return greedy_reference(logits, masks)
    num_rows = logits.shape[:1]
    token_ids = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    finite = torch.empty(num_rows, dtype=torch.bool, device=logits.device)
    _GREEDY(logits, None if masks is None else masks.ids, token_ids, finite)
    return token_ids, finite
