"""Rotary position tables.

Frequencies: RoFormer (Su et al. 2021), theta^(-2i/d).  `linear` divides them by the factor (Chen et
al. 2023, position interpolation).  `llama3`, `yarn` and `longrope` are explained at their
functions.  Angles are float32 products of position and frequency, as in the code the checkpoints
were trained with.
"""

import math

import torch
from torch import Tensor

from paceline.core.errors import ModelError
from paceline.core.model.rope import RopeConfig, RopeKind, yarn_mscale


def rope_table(
    rope: RopeConfig,
    *,
    rotary_dim: int,
    max_positions: int,
    context_len: int,
    device: torch.device,
) -> Tensor:
    """cos_sin [max_positions, rotary_dim] float32: the cosine half, then the sine half.

    `context_len` is the context limit that is served, see `rope_frequencies`.  Raises ModelError
    for sections that are not those of `rotary_dim`.
    """
    if rope.sections and 2 * sum(rope.sections) != rotary_dim:
        raise ModelError.about(
            "rope sections",
            expected=f"{rotary_dim // 2} in all, half the dimensions that turn",
            got=list(rope.sections),
            remedy="take the checkpoint's config.json as it was released",
        )
    frequencies = rope_frequencies(rope, rotary_dim, context_len=context_len).to(device)
    positions = torch.empty(max_positions, device=device, dtype=torch.float32)
    torch.arange(max_positions, out=positions)
    angles = torch.empty(max_positions, rotary_dim // 2, device=device, dtype=torch.float32)
    torch.mul(positions[:, None], frequencies, out=angles)
    table = torch.empty(max_positions, rotary_dim, device=device, dtype=torch.float32)
    cos, sin = table.chunk(2, dim=-1)
    factor = rope_attention_factor(rope)
    torch.cos(angles, out=cos).mul_(factor)
    torch.sin(angles, out=sin).mul_(factor)
    return table


def rope_frequencies(rope: RopeConfig, rotary_dim: int, *, context_len: int) -> Tensor:
    """[rotary_dim / 2] float32 radians per position, fastest first, on the CPU.

    One set for every position of every request; only longrope's depends on `context_len`.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    plain = 1.0 / rope.theta**exponents
    match rope.kind:
        case RopeKind.DEFAULT:
            return plain
        case RopeKind.LINEAR:
            return plain / rope.factor
        case RopeKind.LLAMA3:
            return _llama3(plain, rope)
        case RopeKind.YARN:
            return _yarn(plain, rope, rotary_dim)
        case RopeKind.LONGROPE:
            return 1.0 / (_longrope_factors(rope, context_len) * rope.theta**exponents)


def rope_attention_factor(rope: RopeConfig) -> float:
    """What cos and sin are multiplied by: 1, yarn's 0.1 ln(factor) + 1 (YaRN, section 3.4), or
    longrope's sqrt(1 + ln(factor) / ln(trained context)) (LongRoPE, Ding et al. 2024).

    With mscale and mscale_all_dim (DeepSeek-V2) yarn's is the ratio of the two.
    """
    if rope.kind not in (RopeKind.YARN, RopeKind.LONGROPE):
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.kind is RopeKind.LONGROPE:
        assert rope.original_max_position is not None, "longrope without its trained context"
        stretch = math.log(max(rope.factor, 1.0)) / math.log(rope.original_max_position)
        return math.sqrt(1.0 + stretch)
    if rope.mscale and rope.mscale_all_dim:
        every = yarn_mscale(rope.factor, rope.mscale_all_dim)
        return yarn_mscale(rope.factor, rope.mscale) / every
    return yarn_mscale(rope.factor, 1.0)


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Llama 3.1 (meta-llama/llama-models, models/llama3/model.py, apply_scaling).

    Let `turns` be the rotations within the original context.  Above high_freq_factor a frequency
    stays, below low_freq_factor it is divided by the factor, between them it is interpolated
    linearly in `turns`; where both are one (Llama 4) nothing lies between.
    """
    assert rope.original_max_position is not None, "llama3 rope without its original context"
    turns = rope.original_max_position * plain / (2 * math.pi)
    spread = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / spread).clamp(0.0, 1.0)
    return keep * plain + (1.0 - keep) * plain / rope.factor


def _yarn(plain: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """YaRN (Peng et al. 2023), section 3.2, "NTK-by-parts".

    Dimensions that turn more than beta_fast times within the original context stay, those that turn
    less than beta_slow times are divided by the factor, with a linear ramp over the dimension index
    between.  The dimension that turns r times is d ln(L / 2 pi r) / (2 ln theta).
    """
    assert rope.original_max_position is not None, "yarn rope without its original context"
    context = rope.original_max_position

    def dimension(turns: float) -> float:
        return rotary_dim * math.log(context / (2 * math.pi * turns)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    width = high - low if high != low else 1e-3
    index = torch.arange(rotary_dim // 2, dtype=torch.float32)
    interpolate = ((index - low) / width).clamp(0.0, 1.0)
    return interpolate * plain / rope.factor + (1.0 - interpolate) * plain


def _longrope_factors(rope: RopeConfig, context_len: int) -> Tensor:
    """LongRoPE (Ding et al. 2024): each frequency is divided by a factor of its own, searched for.

    Checkpoints bring two sets, one for the trained context and one for beyond.  The context limit
    decides, for all positions at once: a cached key then never depends on a request's length.
    """
    assert rope.short_context is not None, "longrope without its trained context"
    is_long = context_len > rope.short_context
    return torch.tensor(rope.long_factors if is_long else rope.short_factors)
