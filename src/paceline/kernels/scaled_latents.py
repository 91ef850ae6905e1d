"""Latents in float8: the format of a row, its definition and its CPU path.

A token's row is its latent as codes of e4m3 with one scale, and what turns as it is computed, which
has another spread and a few columns alone:

    scale  = the least power of two with  max |latent| <= 448 scale, at least 2 ** -22
    codes  = e4m3(latent / scale)          448: the largest e4m3 number
    latent ~ codes * scale

Powers of two lose nothing in a product, so a row that is read back is exact in bfloat16, and all
that was rounded was rounded once, where it was written.  (FlashMLA's 656 bytes a row round scales
of 128 columns up to powers of two likewise; e4m3 spans 17 of them, so one scale for all columns
loses nothing more but beside numbers 2 ** 12 times as large.)
"""

from typing import NamedTuple

import torch
from torch import Tensor

from paceline.kernels.write_kv import E4M3_MAX

CODE = torch.float8_e4m3fn
SMALLEST = 2.0**-14  # largest number of a row: of a smaller one the scale is this one's


class ScaledLatents(NamedTuple):
    """What is cached of rows beside codes."""

    turned: Tensor  # [num_pages, page_size, 1, rope_dim]  the model's dtype
    scales: Tensor  # [num_pages, page_size, 1, 1]  float32


def latent_scales(latents: Tensor) -> Tensor:
    """[..., rank] -> [..., 1] float32: the scale of each row, of numbers that are not NaN."""
    magnitudes = latents.float().abs().nan_to_num()  # of inf the largest number, whose scale it has
    largest = magnitudes.amax(-1, keepdim=True).clamp(min=SMALLEST)
    # 448 is 1.75 * 2 ** 8: a larger fraction than 0.75, 0x600000 of 23 bits, carries.
    exponents = (largest.view(torch.int32) + 0x1FFFFF) >> 23
    return ((exponents - 8) << 23).view(torch.float32)


def quantise_latents(latents: Tensor) -> tuple[Tensor, Tensor]:
    """[..., rank] -> codes [..., rank] float8_e4m3fn, scales [..., 1] float32."""
    scales = latent_scales(latents)
    return (latents.float() / scales).clamp_(-E4M3_MAX, E4M3_MAX).to(CODE), scales


def latents_of(codes: Tensor, scales: Tensor) -> Tensor:
    """codes [..., rank], scales [..., 1] -> [..., rank] float32."""
    return codes.float() * scales


def write_latents(
    rows: Tensor, codes: Tensor, beside: ScaledLatents, out_cache_loc: Tensor
) -> None:
    """The definition, and the CPU's path: row t to slot out_cache_loc[t].

    rows: [tokens, 1, rank + rope_dim]; codes: [num_pages, page_size, 1, rank] float8_e4m3fn;
    out_cache_loc: [tokens] int64.  Mutates codes and `beside`.
    """
    rank, page_size = codes.shape[3], codes.shape[1]
    made, scales = quantise_latents(rows[..., :rank])
    place = (out_cache_loc // page_size, out_cache_loc % page_size)
    # torch writes float8 by index only as bytes
    codes.view(torch.uint8).index_put_(place, made.view(torch.uint8))
    beside.turned.index_put_(place, rows[..., rank:])
    beside.scales.index_put_(place, scales)
