"""packed_linear: x W^T + b with W in codes, which no kernel writes to memory as numbers.

For the few tokens of a decode step the time of a product is that of reading its weight once, and a
packed weight is a half or a quarter of the plain one.  Words become numbers in registers, by their
bits, and go from there to the matrix unit; each group's part of the sum is scaled in float32, so
that a number is rounded nowhere (docs/decisions/103-codes-as-the-matrix-unit-reads-them.md).  One
token's product with codes of 4 bits or fp8 is taken without the matrix unit; for 4 bits x becomes
integers of 16 bits, with a power of two for 32 of them (docs/decisions/123-one-token-without.md).
"""

from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from paceline.kernels._check import reject, require_triton
from paceline.kernels.act_and_mul import act_and_mul_reference, check_activation
from paceline.kernels.custom_op import define_op
from paceline.kernels.packed_weight import (
    CHUNK,
    FP8,
    INT4,
    PackedWeight,
    Packing,
    unpack_reference,
    words_of,
)
from paceline.kernels.skinny_linear import column_splits, require_bias, require_counters
from paceline.kernels.stand_in import device_type

MAX_TOKENS = 64
_MANY_TOKENS = 256  # beyond MAX_TOKENS: more take less time with a weight of numbers
_CHOICE = (
    f"on a GPU steps of up to {MAX_TOKENS} tokens multiply with codes (packed_linear); of fp8 with "
    "codes for activations rows are rounded to fp8, where the GPU and the weight's sizes allow, "
    "from 33 tokens on where each row has a scale (skinny_scaled_linear, scaled_linear), and in "
    "larger steps where each block has; of 4 bits with a "
    f"bfloat16 scale for 128 columns up to {_MANY_TOKENS} tokens multiply with codes; others "
    "multiply with numbers made of codes (unpack_weight), as a CPU always does; experts multiply "
    "with codes at any number of tokens (packed_experts)"
)
_UNPACKED = (
    "every step multiplies with numbers made of codes (unpack_weight): packed_linear has none for "
)
_DTYPES = (torch.bfloat16, torch.float16)
_MOST_COLUMNS = 32768  # a row of words is held in registers
_ENOUGH_PROGRAMS = (256, 384)  # of split products: for more tokens, for 5 to 16
_ENOUGH_WIDE = 96  # of those of many tokens, of which a multiprocessor holds one
_ONE_WAVE = 4224  # rows that programs of 8 hold at once; up to three times as many are cut in 4
_MOST_SPLITS = 8
_MOST_OF_TWO = 264  # programs, where a multiprocessor holds two of four stages, or three of three
_MOST_CHUNKS_OF_ONE = 32  # of a row whose one token is multiplied without the matrix unit
_WHOLE = 4  # chunks of a slice that are all on their way at once


def how_multiplied(dtype: str) -> str:
    """What runs the products of a model in `dtype`."""
    return _CHOICE if getattr(torch, dtype) in _DTYPES else f"{_UNPACKED}{dtype}"


class PackedTile(NamedTuple):
    """What one program computes.  For few tokens: slices of its weight's rows, as rows of the
    matrix unit.  See kernels/_triton/packed_few.py."""

    tokens: int  # a power of two; times slices at least 16, or 1: without the matrix unit
    rows: int  # of the matrix unit
    slices: int  # of a row's chunks; 0: the kernel for more tokens, which takes them in turns
    step: int  # chunks that a slice has on their way
    warps: int
    stages: int  # of chunks on their way, for more tokens


def packed_linear_reference(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing, activation: str | None
) -> Tensor:
    """The definition, in float32, rounded once, and once more by an activation.  x: [tokens,
    columns]; bias: [rows]; with an activation rows are those of gates, then of ups."""
    product = x.float() @ unpack_reference(weight, packing, x.shape[1]).T
    if bias is not None:
        product = product + bias.float()
    product = product.to(x.dtype)
    return product if activation is None else act_and_mul_reference(product, activation)


def fits_packed(x: Tensor, packing: Packing) -> bool:
    """Whether `packed_linear` takes these rows and is the faster way; shapes and dtypes only."""
    return (
        device_type(x.device) == "cuda"
        and 0 < x.shape[0] <= (_MANY_TOKENS if _gains_of_many(packing, x.dtype) else MAX_TOKENS)
        and x.dtype in _DTYPES
        and x.shape[1] <= _MOST_COLUMNS
        and x.stride(1) == 1
    )


def packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    packing: Packing,
    *,
    activation: str | None = None,
    counters: Tensor | None = None,
) -> Tensor:
    """x W^T + b, and with `activation` act(gate) * up of it.

    x: bfloat16 or float16 [tokens, columns], contiguous rows, 1 to 64 tokens, or 256 with one scale
    for a row, or one of x's dtype for 128 columns; weight: of as
    many columns, contiguous; bias: [rows] of x's dtype, or None; counters: the layer's own
    `arrival_counters`; without them the columns are never split.  Mutates counters, which are 0
    again when the kernel ends.  Returns [tokens, rows], or half the rows with an activation.
    Deterministic.  Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    if activation is not None:
        check_activation("activation", activation)
    parts = 1 if activation is None else 2
    _check(x, weight, bias, packing, parts)
    (tokens, columns), rows = x.shape, weight.words.shape[0]
    chunks = -(-columns // CHUNK)
    tile = _tile(tokens, rows, chunks, packing.kind)
    if tokens == 1 and _fits_one(x, packing, chunks):
        tile = _tile_of_one(packing.kind, chunks)
    out = torch.empty((tokens, rows // parts), dtype=x.dtype, device=x.device)
    features = tile.rows // max(1, tile.slices)  # of one program
    is_many = tokens > MAX_TOKENS
    if tile.slices > 0 or is_many:
        features //= parts
    tiles = -(-out.shape[1] // features) * -(-tokens // tile.tokens)
    splits = 1
    can_split = activation is None and tile.slices <= 1 and tile.tokens > 1
    if counters is not None and is_many:  # a partial tile of rows may be one too many
        can_split = can_split and tiles <= counters.numel()
    if counters is not None and can_split:
        enough = _ENOUGH_WIDE if is_many else _ENOUGH_PROGRAMS[tile.slices]
        splits = column_splits(tiles, chunks // tile.step, enough=enough, most=_MOST_SPLITS)
        require_counters(counters, tiles, device=x.device)
    if tile.tokens == MAX_TOKENS and splits > 1 and tiles * splits > _MOST_OF_TWO:
        tile = tile._replace(stages=3)
    partial = None
    if splits > 1:
        size = splits * tiles * features * tile.tokens
        partial = torch.empty(size, dtype=torch.float32, device=x.device)
    group = packing.group or columns
    scaled = (*weight, packing.kind, group)
    _PACKED_LINEAR(x, *scaled, bias, activation, tile, splits, out, partial, counters)
    return out


def _tile(tokens: int, rows: int, chunks: int, kind: str) -> PackedTile:
    """Of a weight with so many rows, of so many chunks each."""
    if tokens <= 2 and not _ONE_WAVE < rows <= 3 * _ONE_WAVE:
        # Where programs are many, their slices are on their way as a whole.
        is_whole = rows > _ONE_WAVE and chunks == 8 * _WHOLE
        return PackedTile(2, 64, 8, _WHOLE if is_whole else 2, 4, 1)
    if tokens <= (2 if kind == INT4 else 4):  # of 4 bits 3 or 4 would take longer than 8
        return PackedTile(4, 64, 4, 2, 4, 1)
    if tokens <= 16:
        return PackedTile(16, 64, 1, 2, 4, 1)
    if tokens <= MAX_TOKENS:
        return PackedTile(1 << (tokens - 1).bit_length(), 64, 0, 1, 4, 4)
    return PackedTile(128, 256, 0, 1, 8, 3)


def _fits_one(x: Tensor, packing: Packing, chunks: int) -> bool:
    """Whether one token's numbers can be read in pairs, and multiplied without the matrix unit in
    less time."""
    return (
        chunks <= _MOST_CHUNKS_OF_ONE
        and packing.kind in (INT4, FP8)
        and packing.group in (None, CHUNK)
        and not packing.has_zeros
        and x.shape[1] % 2 == 0
        and x.storage_offset() % 2 == 0
    )


def _tile_of_one(kind: str, chunks: int) -> PackedTile:
    """Of a product of one token: threads have 16 bytes of each row, and all of it at once."""
    per_warp = 128 // words_of(kind)
    step = max(per_warp, 1 << (chunks - 1).bit_length())
    return PackedTile(1, 8, 1, step, step // per_warp, 1)


def _gains_of_many(packing: Packing, dtype: torch.dtype) -> bool:
    """Whether products of many tokens were measured to be faster so."""
    is_plain = packing.kind == INT4 and packing.group == CHUNK and not packing.has_zeros
    return is_plain and packing.scale_dtype == dtype == torch.bfloat16


def _most_tokens(packing: Packing, columns: int, *, dtype: torch.dtype) -> int:
    """Of a product.  Of many a scale is multiplied into its numbers, which rounds it unless it is
    of their dtype."""
    has_groups = packing.group is not None and packing.group < columns
    if has_groups and (packing.group != CHUNK or packing.scale_dtype != dtype):
        return MAX_TOKENS
    return _MANY_TOKENS


def _check(
    x: Tensor, weight: PackedWeight, bias: Tensor | None, packing: Packing, parts: int
) -> None:
    most = MAX_TOKENS
    if x.dim() == 2:
        most = _most_tokens(packing, x.shape[1], dtype=x.dtype)
    if x.dim() != 2 or x.dtype not in _DTYPES or not 0 < x.shape[0] <= most:
        _reject_x(x, f"bfloat16 or float16 [1..{most}, columns]")
    columns = x.shape[1]
    if columns > _MOST_COLUMNS or x.stride(1) != 1:
        _reject_x(x, f"contiguous rows of at most {_MOST_COLUMNS} columns")
    rows = weight.words.shape[0]
    require_packed(weight, packing, columns, device=x.device)
    if rows % parts:
        reject(
            "weight.words",
            expected="as many gate rows as up rows",
            got=weight.words,
            remedy="pack both, gate rows first",
        )
    require_bias(bias, rows, x.dtype)


def require_packed(
    weight: PackedWeight, packing: Packing, columns: int, *, device: torch.device
) -> None:
    """Raise KernelArgumentError for tensors that are none of `packing` with so many columns."""
    rows = weight.words.shape[0]
    table = (rows, packing.num_groups(columns))
    expected = {
        "words": (torch.int32, (rows, packing.num_words(columns))),
        "scale": (packing.scale_dtype, table),
        "zero": (torch.uint8, table) if packing.has_zeros else None,
    }
    for name, wanted in expected.items():
        got = getattr(weight, name)
        fits = (got is None) == (wanted is None)
        if got is not None and wanted is not None:
            fits = (got.dtype, tuple(got.shape)) == wanted and got.is_contiguous()
            fits = fits and got.device == device
        if not fits:
            said = "None" if wanted is None else f"{wanted[0]} {list(wanted[1])} on {device}"
            reject(
                f"weight.{name}",
                expected=f"{said}, as of {packing}",
                got=got,
                remedy="pack it with packed_weight.pack_codes",
            )


def _reject_x(x: Tensor, expected: str) -> NoReturn:
    reject("x", expected=expected, got=x, remedy="use kernels.unpack_weight and kernels.linear")


def _launch(
    x: Tensor,
    words: Tensor,
    scale: Tensor,
    zero: Tensor | None,
    kind: str,
    group: int,
    bias: Tensor | None,
    activation: str | None,
    tile: list[int],
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    require_triton("packed_linear", otherwise="use kernels.unpack_weight and kernels.linear")
    from paceline.kernels._triton.packed_linear import launch_packed_linear

    launch_packed_linear(
        x,
        PackedWeight(words, scale, zero),
        bias,
        activation,
        kind=kind,
        group=group,
        tile=PackedTile(*tile),
        splits=splits,
        out=out,
        partial=partial,
        counters=counters,
    )


_PACKED_LINEAR = define_op(
    "packed_linear(Tensor x, Tensor words, Tensor scale, Tensor? zero, str kind, int group, "
    "Tensor? bias, str? activation, int[] tile, int splits, Tensor(a!) out, Tensor(b!)? partial, "
    "Tensor(c!)? counters) -> ()",
    cpu=_launch,
    cuda=_launch,
)
