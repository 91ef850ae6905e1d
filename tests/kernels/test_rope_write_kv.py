"""rope_write_kv: the op and its Triton kernel against the composition of its parts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from absent_gpu import run_compiling
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.rope import RopeConfig
from paceline.kernels.rope import Rope
from paceline.kernels.rope_write_kv import (
    HeadNorms,
    KVSlots,
    rope_write_kv,
    rope_write_kv_reference,
)

Run = Callable[..., None]


def run_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    *,
    into: KVSlots | None,
    rope: Rope | None,
    norms: HeadNorms | None,
    block_tokens: int | None = None,
) -> None:
    from paceline.kernels._triton.rope_write_kv import launch_rope_write_kv

    weights = norms or (None, None, 0.0, False)
    turned = (None, None, 0, ()) if rope is None else (*rope[:3], rope.flat_columns)
    places = into or (None,) * len(KVSlots._fields)
    launch_rope_write_kv(
        q, k, v, *turned, *weights, *places, block_tokens=block_tokens, block_heads=2
    )


run_together = partial(run_triton, block_tokens=5)  # all of a case in a program
RUNS = pytest.mark.parametrize(
    "run", [rope_write_kv, run_triton, run_together], ids=["op", "triton", "together"]
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """3 heads of q and 2 of k and v in 5 tokens of a fused row."""

    dim: int = 16
    v_dim: int = 16
    rotary_dim: int = 16  # 0: no rotation
    is_at_end: bool = False  # the last dimensions turn
    axes: RopeConfig | None = None  # of positions; None: one
    norms: str = "none"  # or "plain", "unit-offset"
    page_size: int = 2
    is_interleaved: bool = False  # pages of two layers lie side by side
    is_fp8: bool = False
    # Numbers that e4m3 holds, and no rotation to speak of: Triton's interpreter loses the carry
    # where a mantissa rounds up to the next power of two, and NaN.  The GPU gate has both.
    is_on_grid: bool = False
    dtype: torch.dtype = torch.float32


CASES = {
    "plain": Case(),
    "bfloat16": Case(dtype=torch.bfloat16),
    "partial": Case(dim=24, rotary_dim=8, v_dim=8, page_size=3, is_interleaved=True),
    "norms": Case(norms="plain", dtype=torch.bfloat16),
    "norms-partial-unit-offset": Case(dim=24, rotary_dim=16, norms="unit-offset"),
    "at-end": Case(dim=24, rotary_dim=8, v_dim=8, page_size=3, is_at_end=True),
    "norms-at-end": Case(dim=24, rotary_dim=8, norms="unit-offset", is_at_end=True),
    "axes": Case(axes=RopeConfig(sections=(2, 3, 3))),
    "axes-interleaved": Case(axes=RopeConfig(sections=(4, 2, 2), interleaved=True)),
    "axes-at-end": Case(
        dim=24, rotary_dim=8, axes=RopeConfig(sections=(1, 3)), is_at_end=True, norms="plain"
    ),
    "no-rotation": Case(rotary_dim=0, v_dim=24),
    "norms-no-rotation": Case(rotary_dim=0, norms="plain"),
    "fp8": Case(is_fp8=True, is_on_grid=True, dtype=torch.bfloat16),
    "fp8-partial-interleaved": Case(
        rotary_dim=8, is_fp8=True, is_on_grid=True, is_interleaved=True
    ),
}


@dataclass(frozen=True, eq=False)
class Data:
    """Operands of one launch; `row` and `pools` are what it may write."""

    row: Tensor  # [5, 3 Q + 2 K + 2 V heads, ...] flat
    pools: tuple[Tensor, Tensor]
    q: Tensor
    k: Tensor
    v: Tensor
    into: KVSlots
    rope: Rope | None
    norms: HeadNorms | None

    def launch(self, run: Run) -> None:
        run(self.q, self.k, self.v, into=self.into, rope=self.rope, norms=self.norms)


def make(case: Case) -> Data:
    """The same data for the same case, each time anew."""
    random = torch.Generator().manual_seed(case.dim)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(case.dtype)

    dim, v_dim, tokens = case.dim, case.v_dim, 5
    row = noise(tokens, 5 * dim + 2 * v_dim)
    positions = torch.tensor([3, 0, 63, 3, 17])
    columns: tuple[range, ...] = ()
    if case.axes is not None:
        columns = case.axes.axis_columns
        more = torch.randint(0, 64, (5, len(columns)), generator=random)
        more[:, 0], positions = positions, more.T
    scales = (torch.tensor([0.003]), torch.tensor([0.7])) if case.is_fp8 else (None, None)
    if case.is_on_grid:
        row = (row.float() * 100).to(torch.float8_e4m3fn).to(case.dtype) * 4
        row[:, 3 * dim], row[:, -1] = 2000.0, -2000.0  # of k and v: past the end
        positions.zero_()
        scales = (torch.tensor([4.0]), torch.tensor([4.0]))
    parts = row.split((3 * dim, 2 * dim, 2 * v_dim), dim=1)
    q, k, v = (x.unflatten(1, (-1, d)) for x, d in zip(parts, (dim, dim, v_dim), strict=True))
    layers = 2 if case.is_interleaved else 1
    cache_dtype = torch.float8_e4m3fn if case.is_fp8 else case.dtype
    shape = (4, layers, case.page_size, 2)
    pools = tuple(torch.full((*shape, d), 9.0).to(cache_dtype) for d in (dim, v_dim))
    slots = torch.randperm(4 * case.page_size, generator=random)[:tokens]
    weights = noise(dim), noise(dim)
    is_offset = case.norms == "unit-offset"
    start = dim - case.rotary_dim if case.is_at_end else 0
    return Data(
        row=row,
        pools=pools,
        q=q,
        k=k,
        v=v,
        into=KVSlots(pools[0][:, -1], pools[1][:, -1], slots, *scales),
        rope=Rope(table(case.rotary_dim), positions, start, columns) if case.rotary_dim else None,
        norms=None if case.norms == "none" else HeadNorms(*weights, 1e-5, is_offset),
    )


def table(rotary_dim: int) -> Tensor:
    """[64, rotary_dim] float32 cosines then sines, base 100."""
    frequencies = 100.0 ** (-torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    angles = torch.arange(64, dtype=torch.float32)[:, None] * frequencies
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def assert_close(mine: Tensor, wanted: Tensor, *, atol: float) -> None:
    """Equal up to one rounding, or `atol`."""
    eps = torch.finfo(wanted.dtype).eps if wanted.dtype is not torch.float8_e4m3fn else 0.0
    torch.testing.assert_close(mine.float(), wanted.float(), rtol=eps, atol=atol)


@RUNS
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_fused_is_norm_then_rotation_then_write(run: Run, case: Case) -> None:
    mine, wanted, before = make(case), make(case), make(case)
    mine.launch(run)
    wanted.launch(rope_write_kv_reference)
    atol = 3e-7
    if case.norms != "none":  # sums in another order, so that a factor may round to its neighbour
        atol = 2 * torch.finfo(case.dtype).eps * wanted.row.abs().max().item()
    assert_close(mine.row, wanted.row, atol=atol)
    for found, expected in zip(mine.pools, wanted.pools, strict=True):
        assert_close(found, expected, atol=atol)
    assert not torch.equal(wanted.pools[0].float(), before.pools[0].float())


@RUNS
def test_only_what_is_named_is_written(run: Run) -> None:
    case = Case(dim=24, rotary_dim=8, is_interleaved=True)
    data, before = make(case), make(case)
    data.launch(run)
    assert torch.equal(data.v, before.v)
    assert torch.equal(data.q[..., 8:], before.q[..., 8:])
    assert torch.equal(data.k[..., 8:], before.k[..., 8:])
    for pool, x in zip(data.pools, (data.k, data.v), strict=True):
        assert (pool[:, 0] == 9.0).all()  # the other layer
        flat = pool[:, 1].flatten(0, 1)
        others = torch.ones(len(flat), dtype=torch.bool).index_fill_(0, data.into.loc, False)
        assert (flat[others] == 9.0).all()
        assert torch.equal(flat[data.into.loc], x)


def test_an_fp8_cache_is_within_half_a_step_of_the_scaled_value() -> None:
    data = make(Case(is_fp8=True, dtype=torch.bfloat16))
    data.launch(rope_write_kv)
    for cache, x, scale in (
        (data.into.k_cache, data.k, data.into.k_scale),
        (data.into.v_cache, data.v, data.into.v_scale),
    ):
        stored = cache.float().flatten(0, 1)[data.into.loc]
        # e4m3 has 3 bits behind the point; its smallest step is 2^-9; 448 is the largest number.
        bound = (x.float() / scale).clamp(-448, 448)
        step = torch.maximum(bound.abs() * 2.0**-4, torch.tensor(2.0**-10))
        assert ((stored - bound).abs() <= step * 1.001).all()
    assert (data.into.k_cache.float().abs() == 448.0).any()  # clamped, not NaN


def test_fp8_keeps_nan() -> None:
    data = make(Case(is_fp8=True))
    data.v[2, 1, 3] = float("nan")
    data.launch(rope_write_kv)
    written = data.into.v_cache.float().flatten(0, 1)[data.into.loc]
    assert written.isnan().nonzero().tolist() == [[2, 1, 3]]


@RUNS
def test_tokens_that_share_the_padding_slot_leave_one_of_their_values(run: Run) -> None:
    data = make(Case())
    data.into.loc.copy_(torch.tensor([0, 5, 0, 0, 3]))
    data.launch(run)
    assert any(torch.equal(data.pools[0][0, 0, 0], data.k[token]) for token in (0, 2, 3))
    assert torch.equal(data.pools[1][2, 0, 1], data.v[1])
    assert torch.equal(data.pools[1][1, 0, 1], data.v[4])


@RUNS
def test_a_fused_row_and_separate_tensors_give_the_same(run: Run) -> None:
    fused, apart = make(Case()), make(Case())
    apart = replace(apart, q=apart.q.clone(), k=apart.k.clone(), v=apart.v.clone())
    fused.launch(run)
    apart.launch(run)
    assert torch.equal(fused.q, apart.q)
    assert torch.equal(fused.k, apart.k)
    assert torch.equal(fused.pools[0], apart.pools[0])


@RUNS
def test_where_v_is_in_k_one_row_is_written(run: Run) -> None:
    both, alone = make(Case()), make(Case())
    both.launch(run)
    alone = replace(alone, into=alone.into._replace(v_cache=None))
    run(alone.q, alone.k, None, into=alone.into, rope=alone.rope, norms=None)
    assert torch.equal(alone.q, both.q)
    assert torch.equal(alone.pools[0], both.pools[0])
    assert (alone.pools[1] == 9.0).all()


@RUNS
@pytest.mark.parametrize("name", ["plain", "norms", "norms-at-end", "axes-interleaved", "bfloat16"])
def test_without_slots_q_and_k_change_alike_and_nothing_is_written(run: Run, name: str) -> None:
    written, alone = make(CASES[name]), make(CASES[name])
    v = alone.v.clone()
    written.launch(run)
    run(alone.q, alone.k, None, into=None, rope=alone.rope, norms=alone.norms)
    assert torch.equal(alone.q, written.q)
    assert torch.equal(alone.k, written.k)
    assert torch.equal(alone.v, v)
    assert all((pool == 9.0).all() for pool in alone.pools)


def test_bad_argument_is_named_with_what_was_expected() -> None:
    good = make(Case(norms="plain"))
    assert good.rope is not None
    assert good.norms is not None
    into, rope, norms = good.into, good.rope, good.norms
    fp8 = into.k_cache.to(torch.float8_e4m3fn)
    wrong: list[tuple[str, dict[str, object]]] = [
        (r"q must be \[tokens, heads, dim\]", {"q": good.q.flatten(1)}),
        (r"k must be torch.float32 \[5, 2, 16\]", {"k": good.k[:3]}),
        (r"v must be torch.float32 \[5, 2, 16\]", {"v": good.v[:, :1]}),
        (r"v must be torch.float32 \[5, 2, 16\]", {"v": good.v.double()}),
        (r"cos_sin must be contiguous float32 \[max_pos", {"rope": Rope(table(18), rope[1])}),
        (r"positions must be int64 \[5\]", {"rope": Rope(rope[0], rope[1].int())}),
        (
            r"positions must be int64 \[5\] or \[2, 5\], got int64 \[3, 5\]",
            {"rope": Rope(rope[0], rope[1].repeat(3, 1), 0, (range(4), range(4, 8)))},
        ),
        (
            "rope.axis_columns must be each of 8 pairs of dimensions on some axis, and no other",
            {"rope": Rope(rope[0], rope[1].repeat(2, 1), 0, (range(4), range(4, 7)))},
        ),
        ("rope.start must be 0 or 0, the last 16 dim", {"rope": rope._replace(start=4)}),
        (r"norms.k must be torch.float32 \[16\]", {"norms": norms._replace(k=norms.k[:8])}),
        (r"loc must be int64 \[5\]", {"into": into._replace(loc=into.loc[:2])}),
        (r"k_cache must be torch.float32 \[num_pages", {"into": into._replace(k_cache=fp8)}),
        (
            r"v_cache must be torch.float8_e4m3fn \[num_pages",
            {"into": into._replace(v_scale=torch.ones(1))},
        ),
        ("v_cache must be given with v, and None without it, got float32", {"v": None}),
        (r"v must be None without slots to write to, got float32 \[5, 2, 16\]", {"into": None}),
        ("v_cache must be given with v, .* got None", {"into": into._replace(v_cache=None)}),
        (
            r"k_scale must be float32 \[1\]",
            {"into": into._replace(k_cache=fp8, k_scale=torch.ones(2))},
        ),
    ]
    for text, change in wrong:
        operands = {"q": good.q, "k": good.k, "v": good.v, "into": into, "rope": rope}
        with pytest.raises(KernelArgumentError, match=text):
            rope_write_kv(**(operands | {"norms": norms} | change))


def test_many_tokens_are_two_to_a_program_where_these_divide_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from paceline.kernels._triton import rope_write_kv as kernel

    grids: list[tuple[int, ...]] = []
    monkeypatch.setattr(kernel, "launch", lambda _, grid, *args, **asked: grids.append(grid))
    for tokens in (1, 2046, 2048, 2049):
        x = torch.zeros(tokens, 1, 2)
        run_triton(
            x, x, None, into=None, rope=Rope(table(2), torch.zeros(tokens).long()), norms=None
        )
    assert [grid[0] for grid in grids] == [1, 2046, 1024, 2049]


SCRIPT = """
from test_rope_write_kv import CASES, make, run_together

for name in ("norms", "fp8"):
    with launch.compile_only():
        make(CASES[name]).launch(run_together)
        print(len(launch._SEEN.get()))
"""


def test_a_compiler_takes_several_tokens_of_a_program(tmp_path: Path) -> None:
    """What has one type in front of a branch and another in it, the interpreter takes too."""
    assert run_compiling(SCRIPT, tmp_path).split() == ["1", "1"]
