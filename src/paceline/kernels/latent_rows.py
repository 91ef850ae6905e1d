"""latent_rows: everything between the projections of latent attention and attention itself, but for
the products of its heads, in one launch.

What of a token's row is a latent is normalised; what turns, of queries and of the row, is laid out
as halves and rotated; the row goes into the paged pool.  Each part is defined in its own file
(`rms_norm`, `rope`, `write_kv`, `scaled_latents`) and rounds as if it ran alone.
"""

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from paceline.kernels._check import reject
from paceline.kernels.custom_op import Run, define_op
from paceline.kernels.rms_norm import bind_rms_norm, rms_norm_reference
from paceline.kernels.rope import Rope, bind_rope, rope_reference
from paceline.kernels.scaled_latents import CODE, ScaledLatents, write_latents
from paceline.kernels.write_kv import bind_write_kv, write_kv_reference


class LatentNorm(NamedTuple):
    """The RMS norm over a row's latent."""

    weight: Tensor  # [rank]
    eps: float


class LatentSlots(NamedTuple):
    """Where the rows of a step go."""

    cache: Tensor  # [num_pages, page_size, 1, rank + rope_dim]; with `beside` codes
    # [num_pages, page_size, 1, rank] float8_e4m3fn
    loc: Tensor  # [tokens]  int64  slots (trusted: they are on the device)
    beside: ScaledLatents | None = None  # of latents in float8


def latent_rows_reference(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    *,
    norm: LatentNorm,
    rope: Rope,
    pairs: bool,
    into: LatentSlots,
) -> Tensor:
    """The definition; arguments, result and mutation as `latent_rows`."""
    rank = norm.weight.shape[0]
    start = queries.shape[2] - turning.shape[2]
    latent = rms_norm_reference(row[:, :rank], norm.weight, norm.eps)
    queries[..., start:] = rope_reference(_halves(turning, pairs), rope.cos_sin, rope.positions)
    turned = rope_reference(_halves(row[:, None, rank:], pairs), rope.cos_sin, rope.positions)
    rows = torch.cat((latent.unsqueeze(1), turned), dim=2)
    if into.beside is None:
        write_kv_reference(rows, into.cache, into.loc, None)
    else:
        write_latents(rows, into.cache, into.beside, into.loc)
    return rows


def _halves(turning: Tensor, pairs: bool) -> Tensor:
    """[..., rope_dim] of pairs the first numbers, then the second; of halves as they are."""
    return turning.unflatten(-1, (-1, 2)).mT.flatten(-2) if pairs else turning


def _bind_latent_rows(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    weight: Tensor,
    eps: float,
    cos_sin: Tensor,
    positions: Tensor,
    pairs: bool,
    cache: Tensor,
    loc: Tensor,
    turned: Tensor | None,
    row_scales: Tensor | None,
    rows: Tensor,
) -> Run:
    rank = weight.shape[0]
    of_queries, own = queries[..., -turning.shape[2] :], rows[..., rank:]
    parts = [bind_rms_norm(row[:, :rank], weight, eps, False, False, rows[:, 0, :rank])]
    parts += bind_rope(of_queries, own, cos_sin, positions, 0)
    if turned is None or row_scales is None:
        parts.append(bind_write_kv(rows, cache, loc, None))
    else:
        parts.append(partial(write_latents, rows, cache, ScaledLatents(turned, row_scales), loc))
    copies = [
        _laid_out(each, made, pairs)
        for each, made in ((turning, of_queries), (row[:, None, rank:], own))
    ]

    def run() -> None:
        for made, found in copies:
            made.copy_(found)
        for part in parts:
            part()

    return run


def _laid_out(turning: Tensor, made: Tensor, pairs: bool) -> tuple[Tensor, Tensor]:
    """Views: what is written of made [tokens, heads, rope_dim], and what of `turning` it gets."""
    if not pairs:
        return made, turning
    return made.unflatten(2, (2, -1)), turning.unflatten(2, (-1, 2)).mT


def _latent_rows_cuda(*arguments: Any) -> None:
    from paceline.kernels._triton.latent_rows import launch_latent_rows

    launch_latent_rows(*arguments)


_LATENT_ROWS = define_op(
    "latent_rows(Tensor turning, Tensor row, Tensor(a!) queries, Tensor weight, float eps, "
    "Tensor cos_sin, Tensor positions, bool pairs, Tensor(b!) cache, Tensor loc, "
    "Tensor(d!)? turned, Tensor(e!)? row_scales, Tensor(c!) rows) -> ()",
    bind=_bind_latent_rows,
    cuda=_latent_rows_cuda,
)


def latent_rows(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    *,
    norm: LatentNorm,
    rope: Rope,
    pairs: bool,
    into: LatentSlots,
) -> Tensor:
    """Lay out and rotate what turns, normalise latents, and write a step's rows to their slots.

    turning: [tokens, heads, rope_dim] of the queries; row: [tokens, rank + rope_dim] as projected;
    queries: [tokens, heads, at least rope_dim], whose last rope_dim columns are written; all of one
    dtype, rows may be strided.  rope: over rope_dim alone; pairs: numbers that turn against each
    other are stored side by side.  Returns the rows, [tokens, 1, rank + rope_dim], before codes are
    made of them.  Mutates queries and the cache.  Tokens that share a slot (padding) leave any one
    of their rows.  Graph-safe: the grid depends on shapes only.  Raises KernelArgumentError.
    """
    _check(turning, row, queries, norm=norm, rope=rope, into=into)
    rows = torch.empty((row.shape[0], 1, row.shape[1]), dtype=row.dtype, device=row.device)
    cache, loc, beside = into
    held = (cache, loc, *(beside or (None, None)))
    _LATENT_ROWS(turning, row, queries, *norm, rope.cos_sin, rope.positions, pairs, *held, rows)
    return rows


def _check(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    *,
    norm: LatentNorm,
    rope: Rope,
    into: LatentSlots,
) -> None:
    if turning.dim() != 3 or turning.stride(2) != 1 or turning.shape[2] % 2:
        reject(
            "turning",
            expected="[tokens, heads, rope_dim] with a contiguous, even last dimension",
            got=turning,
            remedy="view the projected queries as heads first",
        )
    tokens, heads, rope_dim = turning.shape
    rank = norm.weight.shape[0]
    width, device, dtype = rank + rope_dim, turning.device, turning.dtype
    columns = max(rope_dim, queries.shape[-1])
    wanted: tuple[tuple[str, Tensor, tuple[int, ...], torch.dtype], ...] = (
        ("row", row, (tokens, width), dtype),
        ("queries", queries, (tokens, heads, columns), dtype),
        ("norm.weight", norm.weight, (rank,), dtype),
        ("rope.cos_sin", rope.cos_sin, (rope.cos_sin.shape[0], rope_dim), torch.float32),
        ("rope.positions", rope.positions, (tokens,), torch.int64),
        ("into.loc", into.loc, (tokens,), torch.int64),
    )
    pages = into.cache.shape[:2]
    if into.beside is None:
        wanted += (("into.cache", into.cache, (*pages, 1, width), dtype),)
    else:
        wanted += (
            ("into.cache", into.cache, (*pages, 1, rank), CODE),
            ("into.beside.turned", into.beside.turned, (*pages, 1, rope_dim), dtype),
            ("into.beside.scales", into.beside.scales, (*pages, 1, 1), torch.float32),
        )
    for name, tensor, shape, kind in wanted:
        is_whole = tensor.shape == shape and tensor.stride(-1) == 1
        if not is_whole or tensor.dtype != kind or tensor.device != device:
            reject(
                name,
                expected=f"{kind} {list(shape)} on {device} with a contiguous last dimension",
                got=tensor,
                remedy="take queries and row from one step, and the pool in the model's dtype, or "
                "codes with what lies beside them",
            )
