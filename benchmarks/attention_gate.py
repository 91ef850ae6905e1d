"""The correctness gate of the attention kernels: each against its reference, on poisoned memory.

Caches, workspaces and outputs start as NaN, pages are permuted (tests/kernels/paged_cases.py).
Limits are those of the CPU tests; float32 attention gets eight of them, for the hardware's
approximate exp2, which still is a thousand times below what one lost key costs.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial

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

from kernels_gate import Failure
from paceline.core.model.lookback import Chunk
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import paged_decode, paged_extend, split_workspace

B, H, F = torch.bfloat16, torch.float16, torch.float32
FP8 = torch.float8_e4m3fn
# heads, kv_heads, head_dim, v_head_dim, page_size, window (or chunks), soft_cap, dtype, cache
# dtype, sinks
LAYOUTS = [
    (32, 8, 128, 128, 16, None, None, B, None, False),
    (32, 8, 128, 128, 1, None, None, B, None, False),
    (32, 8, 128, 128, 64, None, None, H, None, False),
    (32, 8, 128, 128, 16, None, None, F, None, False),
    (12, 12, 64, 64, 16, None, None, F, None, False),
    (16, 8, 256, 256, 16, 100, None, B, None, False),
    (8, 4, 256, 256, 16, None, 50.0, F, None, False),
    (8, 2, 80, 80, 7, 17, None, F, None, False),
    (71, 1, 64, 64, 16, None, None, B, None, False),
    (16, 4, 128, 64, 16, 15, 30.0, B, None, False),
    (16, 4, 64, 128, 16, 1, None, F, None, False),
    (64, 8, 64, 64, 16, 128, None, B, None, True),
    (64, 8, 64, 64, 16, None, None, H, None, True),
    (8, 4, 64, 64, 16, None, 30.0, F, None, True),
    (32, 8, 128, 128, 16, None, None, B, FP8, False),
    (28, 4, 128, 128, 64, 100, None, H, FP8, False),
    (16, 8, 256, 256, 5, None, 50.0, B, FP8, True),
    (8, 2, 80, 80, 16, None, None, F, FP8, True),
    (40, 8, 128, 128, 16, Chunk(256), None, B, None, False),
    (8, 2, 64, 64, 16, Chunk(100), None, F, None, False),
]
HEAD_DIMS, GROUPS, PAGE_SIZES = (64, 80, 96, 128, 256), (1, 2, 4, 5, 7, 8, 12, 16), (1, 5, 16, 64)
DECODE = BatchSpec(prefix_lens=(0, 1, 62, 63, 64, 299, 1000, 15), extend_lens=(1,) * 8)
MANY = BatchSpec(prefix_lens=tuple(range(0, 210, 3)), extend_lens=(1,) * 70)
LONG = BatchSpec(prefix_lens=(20011, 5, 4095), extend_lens=(1, 1, 1))
RAGGED = BatchSpec(prefix_lens=(0, 300, 17, 0, 64, 5), extend_lens=(129, 1, 64, 40, 33, 7))
VERIFY = BatchSpec(prefix_lens=(200, 3, 0, 77), extend_lens=(4, 4, 4, 4))
TREES = BatchSpec(prefix_lens=(200, 3, 0, 77), extend_lens=(31, 31, 31, 31))


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One launch to compare with the definition."""

    op: str
    batch: BatchSpec
    shape: Shape = field(default_factory=lambda: layouts()[0])
    mask: MaskKind = MaskKind.CAUSAL


def layouts() -> list[Shape]:
    """Windows, soft caps, sinks, value dims, dtypes and cache formats."""
    return [
        Shape(
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            v_head_dim=v_dim,
            page_size=page_size,
            window=window,
            soft_cap=soft_cap,
            dtype=dtype,
            kv_dtype=kv_dtype,
            sinks=sinks,
        )
        for (
            heads, kv_heads, dim, v_dim, page_size, window, soft_cap, dtype, kv_dtype, sinks,
        ) in LAYOUTS
    ]  # fmt: skip


def head_layouts() -> list[Shape]:
    """Every head dim with every group size; page sizes take turns, so that each meets every dim."""
    return [
        Shape(
            num_heads=2 * group,
            num_kv_heads=2,
            head_dim=dim,
            v_head_dim=dim,
            page_size=PAGE_SIZES[(row + column) % len(PAGE_SIZES)],
            dtype=(B, H)[column % 2],
        )
        for row, dim in enumerate(HEAD_DIMS)
        for column, group in enumerate(GROUPS)
    ]


def checks(quick: bool) -> Iterator[Check]:
    """Every attention check; quick ones take one layout."""
    for shape in layouts()[:1] if quick else layouts() + head_layouts():
        yield Check(op="paged_decode", batch=DECODE, shape=shape)
        yield Check(op="paged_extend", batch=RAGGED, shape=shape)
    yield Check(op="paged_extend", batch=VERIFY)
    yield Check(op="paged_extend", batch=TREES, mask=MaskKind.TREE)
    if quick:
        return
    yield Check(op="paged_decode", batch=MANY)
    yield Check(op="paged_decode", batch=LONG)
    windowed = [shape for shape in layouts() if shape.window is not None]
    yield Check(op="paged_decode", batch=MANY, shape=windowed[-1])
    for shape in (layouts()[0], *windowed):
        yield Check(op="paged_extend", batch=TREES, shape=shape, mask=MaskKind.TREE)
        yield Check(op="paged_extend", batch=RAGGED, shape=shape, mask=MaskKind.TREE)
        yield Check(op="paged_extend", batch=RAGGED, shape=shape, mask=MaskKind.FULL)


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
    call = case.call()._replace(out=outputs[0], lse=outputs[1])
    workspace = split_workspace(
        case.q.shape[0],
        [(shape.num_heads, shape.num_kv_heads)],
        v_head_dim=shape.v_head_dim,
        device=case.q.device,
    )
    workspace.partial_out.fill_(float("nan"))
    workspace.partial_lse.fill_(float("nan"))
    return partial(paged_extend if op == "paged_extend" else paged_decode, call, workspace)


def check_attention(device: str, quick: bool) -> Iterator[tuple[str, Failure | None]]:
    """One (op, failure or None) per attention case."""
    for seed, check in enumerate(checks(quick)):
        shape = check.shape
        case = make_case(check.batch, shape, seed=seed, device=device, mask=check.mask)
        limit = 8.0 if shape.dtype == F else 1.0
        out, lse = run_attention(check.op, case)
        error = worst_error(case, out)
        lse_error = (lse - reference(case)[1]).abs().max().item()
        label = f"{check.op} {check.mask.value} {check.batch} {shape}"
        failure = None
        if not error <= limit or not lse_error <= 1e-4:
            failure = Failure(
                label, f"error {error:.3g} of {limit} limits, lse off {lse_error:.3g}"
            )
        elif _is_sharp(check) and worst_error(case, first_key_dropped(case)) <= limit:
            failure = Failure(label, "a reference that drops the first key passes too")
        yield check.op, failure


def _is_sharp(check: Check) -> bool:
    """Whether a lost key stands out: not in half precision, and in a tree none is lost."""
    return check.shape.dtype == F and check.mask is MaskKind.CAUSAL


def check_replay(device: str) -> Iterator[tuple[str, Failure | None]]:
    """A captured decode follows the lengths that the device holds, and repeats bit for bit."""
    case = make_case(DECODE, layouts()[0], seed=99, device=device)
    outputs = case.empty_outputs()
    launch = prepare_attention("paged_decode", case, outputs)
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    case.prefix_lens.sub_(1).clamp_(min=0)
    case.kv_lens.copy_(case.prefix_lens + 1)
    first: Tensor | None = None
    for repeat in range(20):
        for output in outputs:
            output.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        error = worst_error(case, outputs[0])
        text = f"error {error:.3g} limits after replay {repeat} with other lengths"
        yield "paged_decode", None if error <= 1.0 else Failure("replay", text)
        first = outputs[0].clone() if first is None else first
        same = torch.equal(first, outputs[0])
        yield "paged_decode", None if same else Failure("replay", f"replay {repeat} differs")
