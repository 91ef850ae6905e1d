"""The correctness gate of benchmarks/kernels.py: every compiled kernel against its reference.

Caches, workspaces and outputs start as NaN, pages are permuted (tests/kernels/paged_cases.py).
Limits are those of the CPU tests; float32 attention gets eight of them, for the hardware's
approximate exp2, which still is a thousand times below what one lost key costs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from paged_cases import (
    BatchSpec,
    PagedCase,
    Shape,
    first_key_dropped,
    make_case,
    reference,
    worst_error,
)
from torch import Tensor

from paceline.kernels.act_and_mul import ACTIVATIONS, act_and_mul, act_and_mul_reference
from paceline.kernels.paged_attention import decode_workspace, paged_decode, paged_extend
from paceline.kernels.rms_norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_reference,
)
from paceline.kernels.rope import rope_inplace, rope_reference
from paceline.kernels.write_kv import write_kv, write_kv_reference


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
# heads, kv_heads, head_dim, v_head_dim, page_size, window, soft_cap, dtype
LAYOUTS = [
    (32, 8, 128, 128, 16, None, None, B),
    (32, 8, 128, 128, 1, None, None, B),
    (32, 8, 128, 128, 64, None, None, H),
    (32, 8, 128, 128, 16, None, None, F),
    (12, 12, 64, 64, 16, None, None, B),
    (12, 12, 64, 64, 16, None, None, F),
    (28, 4, 128, 128, 16, None, None, B),
    (16, 8, 256, 256, 16, 100, None, B),
    (8, 4, 256, 256, 16, None, 50.0, F),
    (32, 32, 80, 80, 16, None, None, B),
    (8, 2, 80, 80, 7, 17, None, F),
    (8, 1, 96, 96, 16, 16, None, H),
    (71, 1, 64, 64, 16, None, None, B),
    (16, 4, 128, 64, 16, 15, 30.0, B),
    (16, 4, 64, 128, 16, 1, None, F),
]
DECODE = BatchSpec(prefix_lens=(0, 1, 62, 63, 64, 299, 1000, 15), extend_lens=(1,) * 8)
MANY = BatchSpec(prefix_lens=tuple(range(0, 210, 3)), extend_lens=(1,) * 70)
LONG = BatchSpec(prefix_lens=(20011, 5, 4095), extend_lens=(1, 1, 1))
RAGGED = BatchSpec(prefix_lens=(0, 300, 17, 0, 64, 5), extend_lens=(129, 1, 64, 40, 33, 7))
VERIFY = BatchSpec(prefix_lens=(200, 3, 0, 77), extend_lens=(4, 4, 4, 4))


def attention_cases(quick: bool) -> Iterator[tuple[str, BatchSpec, Shape]]:
    """(op, batch, shape) of every attention check."""
    shapes = [
        Shape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=v_dim,
            page_size=page_size,
            window=window,
            soft_cap=soft_cap,
            dtype=dtype,
        )
        for heads, kv_heads, dim, v_dim, page_size, window, soft_cap, dtype in LAYOUTS
    ]
    for shape in shapes[:1] if quick else shapes:
        yield "paged_decode", DECODE, shape
        yield "paged_extend", RAGGED, shape
    yield "paged_extend", VERIFY, shapes[0]
    if not quick:
        yield "paged_decode", MANY, shapes[0]
        yield "paged_decode", LONG, shapes[0]


def run_attention(op: str, case: PagedCase) -> tuple[Tensor, Tensor]:
    """(out, lse) of one launch on NaN-filled outputs."""
    outputs = case.empty_outputs()
    prepare_attention(op, case, outputs)()
    return outputs


def prepare_attention(
    op: str, case: PagedCase, outputs: tuple[Tensor, Tensor]
) -> Callable[[], None]:
    """A launch that can be repeated or captured."""
    shape = case.shape
    options = {"scale": case.scale, "window": shape.window, "soft_cap": shape.soft_cap}
    options |= {"out": outputs[0], "lse": outputs[1]}
    caches = (case.q, case.k_cache, case.v_cache, case.page_table)
    if op == "paged_extend":
        longest = int(case.extend_lens.max())
        lens = (case.prefix_lens, case.kv_lens, case.cu_seqlens_q)
        return lambda: paged_extend(*caches, *lens, max_extend_len=longest, **options)
    partial_out, partial_lse = decode_workspace(
        case.q.shape[0],
        shape.num_heads,
        shape.num_kv_heads,
        v_head_dim=shape.v_head_dim,
        device=case.q.device,
    )
    options |= {
        "partial_out": partial_out.fill_(float("nan")),
        "partial_lse": partial_lse.fill_(float("nan")),
    }
    return lambda: paged_decode(*caches, case.kv_lens, **options)


def check_attention(device: str, quick: bool) -> Iterator[tuple[str, Failure | None]]:
    """One (op, failure or None) per attention case."""
    for seed, (op, batch, shape) in enumerate(attention_cases(quick)):
        case = make_case(batch, shape, seed=seed, device=device)
        limit = 8.0 if shape.dtype == F else 1.0
        out, lse = run_attention(op, case)
        error = worst_error(case, out)
        lse_error = (lse - reference(case)[1]).abs().max().item()
        label = f"{op} {batch} {shape}"
        failure = None
        if not error <= limit or not lse_error <= 1e-4:
            failure = Failure(
                label, f"error {error:.3g} of {limit} limits, lse off {lse_error:.3g}"
            )
        elif shape.dtype == F and worst_error(case, first_key_dropped(case)) <= limit:
            failure = Failure(label, "a reference that drops the first key passes too")
        yield op, failure


def check_replay(device: str) -> Iterator[tuple[str, Failure | None]]:
    """A captured decode follows the lengths that the device holds when it is replayed."""
    shape = next(attention_cases(True))[2]
    case = make_case(DECODE, shape, seed=99, device=device)
    outputs = case.empty_outputs()
    launch = prepare_attention("paged_decode", case, outputs)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    case.prefix_lens.sub_(1).clamp_(min=0)
    case.kv_lens.copy_(case.prefix_lens + 1)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    error = worst_error(case, outputs[0])
    text = f"error {error:.3g} limits after replay with other lengths"
    yield "paged_decode", None if error <= 1.0 else Failure("replay", text)


def check_small_ops(device: str) -> Iterator[tuple[str, Failure | None]]:
    """One (op, failure or None) per op, dtype and variant."""
    for dtype in (B, H, F):
        yield from _check_norms(dtype, device)
        yield from _check_rope(dtype, device)
        x = (torch.randn(33, 2 * 1100, device=device) * 4.0).to(dtype)
        for kind in ACTIVATIONS:
            actual, wanted = act_and_mul(x, kind), act_and_mul_reference(x, kind)
            yield _compare("act_and_mul", f"{kind} {dtype}", actual, wanted, ulps=_ulps(dtype))
        yield from _check_write_kv(dtype, device)


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


def _check_rope(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Failure | None]]:
    for dim, rotary_dim in ((128, 128), (80, 80), (96, 48), (256, 256)):
        fused = torch.randn(33, 48, dim, device=device).to(dtype)
        positions = torch.randint(0, 500, (33,), device=device)
        table = rope_table(500, rotary_dim, device)
        wanted = fused.clone()
        wanted[:, :40] = rope_reference(fused[:, :40], table, positions)
        rope_inplace(fused[:, :32], fused[:, 32:40], table, positions)
        yield _compare("rope_inplace", f"{dim}/{rotary_dim} {dtype}", fused, wanted, ulps=1)


def _check_write_kv(dtype: torch.dtype, device: str) -> Iterator[tuple[str, Failure | None]]:
    for page_size, dim, v_dim in ((1, 128, 128), (16, 80, 96), (64, 256, 128)):
        k = torch.randn(33, 10, dim, device=device).to(dtype)[:, 1:9]
        v = torch.randn(33, 10, v_dim, device=device).to(dtype)[:, 1:9]
        loc = torch.randperm(40 * page_size, device=device)[:33]
        pools = [
            torch.full((40, 2, page_size, 8, width), 9.0, dtype=dtype, device=device)
            for width in (dim, v_dim)
        ]
        wanted = [pool.clone() for pool in pools]
        write_kv(k, v, pools[0][:, 1], pools[1][:, 1], loc)
        write_kv_reference(k, v, wanted[0][:, 1], wanted[1][:, 1], loc)
        label = f"page {page_size} {dtype}"
        yield _compare("write_kv", f"k {label}", pools[0], wanted[0], ulps=0)
        yield _compare("write_kv", f"v {label}", pools[1], wanted[1], ulps=0)


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
