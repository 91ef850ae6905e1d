"""round_rows: rows of x as fp8 codes with scales, for products with weights of fp8 codes.

    s[t, g] = max(max over k in g of |x[t, k]| / 448, 1e-12),  code[t, k] = e4m3(x[t, k] / s[t, g])

with one group for a row (dynamic scales of tokens), or one for 128 columns (those of DeepSeek-V3's
blocks, inference/kernel.py of DeepSeek-V3).  Codes lie in the order of a packed weight's columns,
which stay within their chunk: what multiplies two such rows need not know it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_weight import CHUNK, pack_codes

CODE = torch.float8_e4m3fn
MOST_COLUMNS = 32768  # a row is held in registers
_MOST = torch.finfo(CODE).max
_LEAST_SCALE = 1e-12
_UNIT = 4  # of rows: libraries multiply no other numbers of them with scales of groups


class RoundedRows(NamedTuple):
    """Rows behind those of x hold what nobody wrote."""

    codes: Tensor  # [rows, padded columns]  e4m3, in the order of a packed weight
    scale: Tensor  # [groups, rows]  float32


def round_rows_reference(x: Tensor, group: int | None) -> tuple[Tensor, Tensor]:
    """The definition: (codes [tokens, columns] in x's order, scale [tokens, groups] float32).

    group: 128 columns, or None: all."""
    tokens, columns = x.shape
    size = group or columns
    padded = torch.nn.functional.pad(x.float(), (0, -columns % size)).view(tokens, -1, size)
    scale = (padded.abs().amax(2) / _MOST).clamp(min=_LEAST_SCALE)
    codes = (padded / scale.unsqueeze(2)).clamp(-_MOST, _MOST).to(CODE)
    return codes.flatten(1)[:, :columns], scale


def fits_rounded(x: Tensor) -> bool:
    """Whether `round_rows` takes these rows."""
    return x.dtype == torch.bfloat16 and x.shape[1] <= MOST_COLUMNS and x.stride(1) == 1


def round_rows(x: Tensor, group: int | None) -> RoundedRows:
    """x: bfloat16 [tokens, columns], contiguous rows of at most 32768; group: 128 columns, or None:
    all.  Columns behind the last are 0.  Mutates nothing.  Graph-safe: the grid depends on shapes
    only.  Raises KernelArgumentError."""
    if x.dim() != 2 or not fits_rounded(x):
        reject(
            "x",
            expected=f"bfloat16 [tokens, columns], contiguous rows of at most {MOST_COLUMNS}",
            got=x,
            remedy="use kernels.unpack_weight and kernels.linear",
        )
    assert group in (None, CHUNK), group
    tokens, columns = x.shape
    chunks, rows = -(-columns // CHUNK), -(-tokens // _UNIT) * _UNIT
    groups = 1 if group is None else chunks
    codes = torch.empty((rows, chunks * CHUNK), dtype=CODE, device=x.device)
    scale = torch.empty((groups, rows), dtype=torch.float32, device=x.device)
    _ROUND_ROWS(x, codes.view(torch.uint8), scale)
    return RoundedRows(codes, scale)


def _round_cpu(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    tokens = x.shape[0]
    rounded, scales = round_rows_reference(x, None if scale.shape[0] == 1 else CHUNK)
    words = pack_codes(rounded.view(torch.uint8), 8)
    codes[:tokens] = words.view(torch.uint8)
    scale[:, :tokens] = scales.T


def _round_cuda(x: Tensor, codes: Tensor, scale: Tensor) -> None:
    require_triton("round_rows", otherwise="use kernels.unpack_weight and kernels.linear")
    from paceline.kernels._triton.round_rows import launch_round_rows

    launch_round_rows(x, codes, scale)


_ROUND_ROWS = define_op(
    "round_rows(Tensor x, Tensor(a!) codes, Tensor(b!) scale) -> ()",
    cpu=_round_cpu,
    cuda=_round_cuda,
)
