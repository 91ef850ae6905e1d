"""Launcher of packed_linear's Triton kernels; see kernels/packed_linear.py for the definition."""

from torch import Tensor

from paceline.kernels._triton.launch import launch, overlap_options
from paceline.kernels._triton.packed_few import packed_few_kernel
from paceline.kernels._triton.packed_many import packed_many_kernel
from paceline.kernels._triton.packed_more import packed_more_kernel
from paceline.kernels._triton.packed_one import packed_one_kernel
from paceline.kernels._triton.runtime import cdiv, interpreted, require_runnable
from paceline.kernels.packed_linear import MAX_TOKENS, PackedTile
from paceline.kernels.packed_weight import CHUNK, FP8, PackedWeight, words_of

_FEW_CHUNKS = 2  # on their way


def launch_packed_linear(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    *,
    kind: str,
    group: int,
    tile: PackedTile,
    splits: int,
    out: Tensor,
    partial: Tensor | None,
    counters: Tensor | None,
) -> None:
    """One kernel; arguments as checked by kernels/packed_linear.py."""
    require_runnable("x of packed_linear", x, packed_more_kernel, otherwise="use unpack_weight")
    (tokens, columns), out_features = x.shape, out.shape[1]
    parts = 1 if activation is None else 2
    chunks = cdiv(columns, CHUNK)
    operands = (x, *weight, bias, out, partial, counters, x.stride(0), tokens)
    sizes = (out_features, columns, weight.words.shape[1], weight.scale.shape[1])
    constants = {
        "ACTIVATION": activation,
        "KIND": kind,
        "GROUP": 0 if group >= columns else group,
        "WORDS": words_of(kind),
        "SPLITS": splits,
        "TOKENS": tile.tokens,
        "ROWS": tile.rows,
        "INTERPRETED": interpreted(packed_more_kernel),
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
    if tile.tokens == 1:
        _launch_one(x, weight, bias, activation, kind=kind, tile=tile, out=out)
    elif tokens > MAX_TOKENS:
        token_tiles = cdiv(tokens, tile.tokens)
        launch(
            packed_many_kernel,
            (cdiv(out_features, tile.rows // parts) * token_tiles, splits),
            *operands,
            token_tiles,
            *sizes,
            chunks // splits,
            **constants,
            MASKED=columns % CHUNK != 0,
            **overlap_options(x.device, packed_many_kernel),
        )
    elif tile.slices > 0:
        features = tile.rows // tile.slices // parts
        steps = cdiv(chunks, splits * tile.slices * tile.step)
        is_whole = splits * tile.slices * steps * tile.step * CHUNK == columns
        launch(
            packed_few_kernel,
            (cdiv(out_features, features), splits),
            *operands,
            *sizes,
            steps,
            **constants,
            SLICES=tile.slices,
            STEP=tile.step,
            IS_AHEAD=_reads_ahead(weight, kind, group < columns, tile),
            MASKED=not is_whole or out_features % features != 0,
            **overlap_options(x.device, packed_few_kernel),
        )
    else:
        launch(
            packed_more_kernel,
            (cdiv(out_features, tile.rows), splits),
            *operands,
            *sizes,
            chunks // splits,
            **constants,
            **overlap_options(x.device, packed_more_kernel),
        )


def _launch_one(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    activation: str | None,
    *,
    kind: str,
    tile: PackedTile,
    out: Tensor,
) -> None:
    columns, out_features = x.shape[1], out.shape[1]
    features = tile.rows // (1 if activation is None else 2)
    is_whole = columns == tile.step * CHUNK and out_features % features == 0
    launch(
        packed_one_kernel,
        (cdiv(out_features, features),),
        x,
        weight.words,
        weight.scale,
        bias,
        out,
        out_features,
        columns,
        weight.words.shape[1],
        weight.scale.shape[1],
        ACTIVATION=activation,
        IS_FP8=kind == FP8,
        HAS_GROUPS=weight.scale.shape[1] > 1,
        ROWS=tile.rows,
        CHUNKS=tile.step,
        MASKED=not is_whole,
        INTERPRETED=interpreted(packed_one_kernel),
        num_warps=tile.warps,
        num_stages=1,
        **overlap_options(x.device, packed_one_kernel),
    )


def _reads_ahead(weight: PackedWeight, kind: str, has_groups: bool, tile: PackedTile) -> bool:
    """Whether few tokens' scales are read a step ahead.  With a few chunks of fp8 and scales of
    groups, registers would be left for three programs of a multiprocessor in place of four, which
    costs more than it gains, and with zeros it was not measured."""
    is_tight = kind == FP8 and has_groups and tile.step == _FEW_CHUNKS
    return weight.zero is None and not is_tight
