"""The correctness gate of the small kernels: each compiled kernel against its reference.

Limits are those of the CPU tests.  attention_gate.py does the same for attention.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from paceline.kernels.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference
from paceline.kernels.eagle_input import HalfNorms, eagle_input, eagle_input_reference
from paceline.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import (
    HeadNorms,
    KVSlots,
    rope_write_kv,
    rope_write_kv_reference,
)


@dataclass(frozen=True, slots=True)
class Failure:
    """One check that did not hold."""

    label: str
    text: str


def rope_table(max_position: int, rotary_dim: int, device: str) -> Tensor:
    """[max_position, rotary_dim] float32 cosines then sines, base 10000."""
    frequencies = 10000.0 ** (-torch.arange(0, rotary_dim, 2, device=device) / rotary_dim)
    angles = torch.arange(max_position, device=device)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


B, H, F = torch.bfloat16, torch.float16, torch.float32


def check_small_ops(device: str) -> Iterator[tuple[str, Failure | None]]:
    """One (op, failure or None) per op, dtype and variant."""
    for dtype in (B, H, F):
        yield from _check_norms(dtype, device)
        yield from _check_eagle_input(dtype, device)
        x = (torch.randn(33, 2 * 1100, device=device) * 4.0).to(dtype)
        for kind in ACTIVATIONS:
            actual, wanted = act_and_mul(x, kind), act_and_mul_reference(x, kind)
            yield _compare("act_and_mul", f"{kind} {dtype}", actual, wanted, ulps=_ulps(dtype))
        for shape in ROPE_WRITE_SHAPES:
            yield from _check_rope_write_kv(RopeWrite(*shape, dtype=dtype), device)


def _check_norms(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Failure | None]]:
    for rows, dim in ((33, 4096), (5, 72), (7, 8192)):
        x = (torch.randn(rows, dim, device=device) * 3.0).to(dtype)
        weight = torch.randn(dim, device=device).to(dtype)
        residual = torch.randn(rows, dim, device=device).to(dtype)
        for unit_offset in (False, True):
            label = f"[{rows}, {dim}] {dtype} unit_offset={unit_offset}"
            wanted = rms_norm_reference(x, weight, 1e-5, unit_offset=unit_offset)
            actual = rms_norm(x, weight, 1e-5, unit_offset=unit_offset)
            yield _compare("rms_norm", label, actual, wanted, ulps=_ulps(dtype))
            wanted, total = add_rms_norm_reference(
                x, residual, weight, 1e-5, unit_offset=unit_offset
            )
            summed = residual.clone()
            actual = add_rms_norm(x, summed, weight, 1e-5, unit_offset=unit_offset)
            yield _compare("add_rms_norm", label, actual, wanted, ulps=_ulps(dtype))
            yield _compare("add_rms_norm", f"residual {label}", summed, total, ulps=0)
    fused = torch.randn(33, 48, 128, device=device).to(dtype)
    weight = torch.randn(128, device=device).to(dtype)
    wanted = fused.clone()
    wanted[:, :32] = rms_norm_reference(fused[:, :32], weight, 1e-5)
    rms_norm(fused[:, :32], weight, 1e-5, out=fused[:, :32])
    yield _compare("rms_norm", f"per head, in place {dtype}", fused, wanted, ulps=_ulps(dtype))


def _check_eagle_input(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Failure | None]]:
    for rows, dim in ((33, 4096), (1, 72), (7, 8192)):
        ids = torch.randint(50, (rows,), device=device)
        table = (torch.randn(50, dim, device=device) * 3.0).to(dtype)
        features = torch.randn(rows, dim, device=device).to(dtype)
        weights = torch.randn(2, dim, device=device).to(dtype)
        norms = HalfNorms(weights[0], weights[1], 1e-5)
        wanted = eagle_input_reference(ids, table, features, norms)
        actual = eagle_input(ids, table, features, norms)
        yield _compare("eagle_input", f"[{rows}, {dim}] {dtype}", actual, wanted, ulps=_ulps(dtype))


@dataclass(frozen=True, slots=True)
class RopeWrite:
    """One check of rope_write_kv: 32 heads of q and 8 of k and v, 33 tokens, 40 pages."""

    dim: int
    v_dim: int
    rotary_dim: int  # 0: no rotation
    page_size: int
    is_fp8: bool
    norms: str | None  # "plain" or "unit-offset"
    dtype: torch.dtype


# dim, v_dim, rotary_dim, page_size, is_fp8, norms
ROPE_WRITE_SHAPES = [
    (128, 128, 128, 1, False, None),
    (80, 96, 80, 16, False, None),
    (96, 96, 48, 16, False, "plain"),
    (256, 128, 256, 64, False, "unit-offset"),
    (128, 128, 0, 16, False, "plain"),
    (128, 128, 0, 16, True, None),
    (128, 128, 128, 16, True, None),
    (96, 80, 64, 16, True, "plain"),
]


def _check_rope_write_kv(case: RopeWrite, device: str) -> Iterator[tuple[str, Failure | None]]:
    """Pages of two layers lie side by side; an fp8 pool also gets NaN and numbers past its end."""
    dims = {"q": (32, case.dim), "k": (8, case.dim), "v": (8, case.v_dim)}
    row = torch.randn(33, sum(heads * dim for heads, dim in dims.values()), device=device) * 3.0
    row = row.to(case.dtype)
    row[5, -7], row[6, -7], row[7, -7] = float("nan"), 3e4, -3e4
    cache_dtype = torch.float8_e4m3fn if case.is_fp8 else case.dtype
    pools = [
        torch.full((40, 2, case.page_size, 8, dim), 9.0, device=device).to(cache_dtype)
        for dim in (case.dim, case.v_dim)
    ]
    scales = [torch.tensor([x], device=device) if case.is_fp8 else None for x in (0.007, 0.9)]
    loc = torch.randperm(40 * case.page_size, device=device)[:33]
    table = rope_table(500, max(case.rotary_dim, 2), device)
    rope = Rope(table, torch.randint(0, 500, (33,), device=device)) if case.rotary_dim else None
    weights = [torch.randn(case.dim, device=device).to(case.dtype) for _ in range(2)]
    norms = HeadNorms(*weights, 1e-5, case.norms == "unit-offset") if case.norms else None

    def after(run: Callable[..., None]) -> tuple[Tensor, Tensor, Tensor]:
        fresh, k_pool, v_pool = row.clone(), pools[0].clone(), pools[1].clone()
        parts = fresh.split([heads * dim for heads, dim in dims.values()], dim=1)
        qkv = [part.unflatten(1, dims[name]) for name, part in zip("qkv", parts, strict=True)]
        run(*qkv, into=KVSlots(k_pool[:, 1], v_pool[:, 1], loc, *scales), rope=rope, norms=norms)
        return fresh, k_pool, v_pool

    names = ("row", "K pool", "V pool")
    for name, found, wanted in zip(
        names, after(rope_write_kv), after(rope_write_kv_reference), strict=True
    ):
        # A norm or a fused multiply-add may round to the neighbour, of e4m3 too; V is only copied.
        e4m3 = 0.125 if found.dtype is torch.float8_e4m3fn else 0.0
        share = max(e4m3, _ulps(case.dtype) * torch.finfo(case.dtype).eps)
        far = 2e-2 if case.dtype != F and case.norms else 4e-6
        is_copy = name == "V pool" or (rope is None and norms is None)
        limit = 0.0 if is_copy else wanted.float().abs().nan_to_num(0.0) * share + far
        error = (found.float() - wanted.float()).abs().nan_to_num(0.0)
        is_right = bool((error <= limit).all()) and torch.equal(
            found.float().isnan(), wanted.float().isnan()
        )
        text = f"{name} off by up to {error.max().item():.3g}"
        yield "rope_write_kv", None if is_right else Failure(f"rope_write_kv {case}", text)


def _ulps(dtype: torch.dtype) -> int:
    """Two roundings of a half-precision value; float32 also differs in exp and in sum order."""
    return 16 if dtype == F else 2


def _compare(
    op: str, label: str, actual: Tensor, wanted: Tensor, *, ulps: int
) -> tuple[str, Failure | None]:
    limit = ulps * torch.finfo(wanted.dtype).eps * wanted.float().abs() + (4e-6 if ulps else 0.0)
    error = (actual.float() - wanted.float()).abs()
    if bool((error <= limit).all()):
        return op, None
    return op, Failure(
        f"{op} {label}", f"off by up to {error.max().item():.3g}, {ulps} ulps allowed"
    )
