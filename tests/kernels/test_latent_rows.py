"""latent_rows: the operation and its Triton kernel against norm, layout, rotation and write."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.latent_rows import (
    LatentNorm,
    LatentSlots,
    latent_rows,
    latent_rows_reference,
)
from paceline.kernels.rope import Rope
from paceline.kernels.scaled_latents import ScaledLatents, latent_scales

RANK, ROPE, HEADS, TOKENS, PAGE = 24, 8, 5, 4, 2
Run = Callable[..., Tensor]


def run_triton(
    turning: Tensor,
    row: Tensor,
    queries: Tensor,
    *,
    norm: LatentNorm,
    rope: Rope,
    pairs: bool,
    into: LatentSlots,
) -> Tensor:
    from paceline.kernels._triton.latent_rows import launch_latent_rows

    rows = torch.full((len(row), 1, row.shape[1]), float("nan"), dtype=row.dtype)
    turn = (rope.cos_sin, rope.positions)
    cache, loc, beside = into
    places = (cache, loc, *(beside or (None, None)))
    launch_latent_rows(turning, row, queries, *norm, *turn, pairs, *places, rows, block_heads=2)
    return rows


RUNS = pytest.mark.parametrize("run", [latent_rows, run_triton], ids=["op", "triton"])


@dataclass(frozen=True, eq=False)
class Data:
    """Operands of one launch; `pool` has another layer's pages beside those that are written."""

    turning: Tensor  # [TOKENS, HEADS, ROPE]  of wider heads
    row: Tensor  # [TOKENS, RANK + ROPE]
    queries: Tensor  # [TOKENS, HEADS, RANK + ROPE]
    norm: LatentNorm
    rope: Rope
    into: LatentSlots
    pool: Tensor  # [pages, layers, PAGE, 1, RANK + ROPE]

    def launch(self, run: Run, *, pairs: bool) -> Tensor:
        return run(
            self.turning,
            self.row,
            self.queries,
            norm=self.norm,
            rope=self.rope,
            pairs=pairs,
            into=self.into,
        )


def make(dtype: torch.dtype = torch.bfloat16, *, rope_dim: int = ROPE) -> Data:
    """The same data each time anew."""
    generator = torch.Generator().manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    pool = torch.full((4, 2, PAGE, 1, RANK + rope_dim), 9.0, dtype=dtype)
    angles = torch.rand(64, rope_dim // 2, generator=generator) * 6.0
    return Data(
        turning=noise(TOKENS, HEADS, 16 + rope_dim)[..., 16:],
        row=noise(TOKENS, RANK + rope_dim),
        queries=torch.full((TOKENS, HEADS, RANK + rope_dim), 7.0, dtype=dtype),
        norm=LatentNorm(noise(RANK), 1e-6),
        rope=Rope(torch.cat((angles.cos(), angles.sin()), 1), torch.tensor([5, 0, 63, 5])),
        into=LatentSlots(pool[:, 1], torch.tensor([6, 1, 3, 0])),
        pool=pool,
    )


@RUNS
@pytest.mark.parametrize("pairs", [True, False], ids=["pairs", "halves"])
@pytest.mark.parametrize(
    ("dtype", "rope_dim"),
    [(torch.float32, ROPE), (torch.bfloat16, ROPE), (torch.bfloat16, 6)],  # 3: no power of two
    ids=str,
)
def test_rows_are_normalised_laid_out_rotated_and_written(
    run: Run, pairs: bool, dtype: torch.dtype, rope_dim: int
) -> None:
    mine, theirs = (make(dtype, rope_dim=rope_dim) for _ in "mt")
    rows, wanted = mine.launch(run, pairs=pairs), theirs.launch(latent_rows_reference, pairs=pairs)
    # A sum in another order: a factor, and then a product, may round to its neighbour.
    bound = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 1e-6}
    torch.testing.assert_close(rows, wanted, **bound)
    torch.testing.assert_close(mine.queries, theirs.queries, **bound)
    torch.testing.assert_close(mine.pool, theirs.pool, **bound)


@RUNS
def test_latents_in_float8_are_what_the_format_says(run: Run) -> None:
    """Of rows whose largest number is 448 / 256 times a power of two, just above it, 0 and NaN."""
    data = make()
    pages = data.into.cache.shape[:2]
    row = data.row.clone()
    row[:, :RANK] = 1.0
    row[:, 0] = torch.tensor([1.75, 1.7578125, 0.0, float("nan")])
    row[2, :RANK] = 0.0
    codes = torch.zeros(*pages, 1, RANK, dtype=torch.float8_e4m3fn)
    turned, scales = (torch.full((*pages, 1, n), 9.0) for n in (ROPE, 1))
    beside = ScaledLatents(turned.bfloat16(), scales)
    into = LatentSlots(codes, data.into.loc, beside)
    norm = LatentNorm(torch.ones(RANK).bfloat16(), 1e-6)
    rows = replace(data, row=row, into=into, norm=norm).launch(run, pairs=True)
    loc = data.into.loc
    held, beside_held = codes.flatten(0, 1)[loc], scales.flatten(0, 1)[loc].double()
    latents, largest = rows[..., :RANK].double(), rows[..., :RANK].abs().amax(-1, keepdim=True)
    wanted = torch.exp2(torch.ceil(torch.log2(largest.double().clamp(min=2.0**-14) / 448)))
    assert torch.equal(beside_held[:3], wanted[:3])
    assert torch.equal(held[:3].double(), (latents / wanted)[:3].to(codes.dtype).double())
    if run is latent_rows:  # the interpreter's cast knows no NaN
        assert held[3].float().isnan().all()
    assert torch.equal(beside.turned.flatten(0, 1)[loc], rows[..., RANK:])
    others = torch.ones(len(codes.flatten(0, 1)), dtype=torch.bool).index_fill_(0, loc, False)
    assert (scales.flatten(0, 1)[others] == 9.0).all()
    assert (beside.turned.flatten(0, 1)[others] == 9.0).all()


@RUNS
def test_what_turns_is_turned_as_two_numbers_of_a_plane(run: Run) -> None:
    """Each pair (a, b) is the complex number a + bi times that of its angle."""
    data = make(torch.float32)
    data.launch(run, pairs=True)
    cos, sin = data.rope.cos_sin[data.rope.positions].chunk(2, dim=1)
    turned = torch.view_as_complex(data.turning.unflatten(2, (-1, 2)).contiguous())
    turned = turned * torch.complex(cos, sin)[:, None]
    wanted = torch.cat((turned.real, turned.imag), dim=2)
    torch.testing.assert_close(data.queries[..., RANK:], wanted, rtol=1e-5, atol=1e-6)


@RUNS
@pytest.mark.parametrize("columns", [0, 16])
def test_queries_have_as_many_columns_before_as_they_like(run: Run, columns: int) -> None:
    """Expanded ones have none, beside tensors of their own."""
    data = make()
    narrow = replace(data, queries=torch.full_like(data.queries[..., : columns + ROPE], 7.0))
    narrow.launch(run, pairs=True)
    data.launch(run, pairs=True)
    assert torch.equal(narrow.queries[..., columns:], data.queries[..., RANK:])
    assert (narrow.queries[..., :columns] == 7.0).all()


@RUNS
def test_only_what_is_named_is_written(run: Run) -> None:
    data, before = make(), make()
    rows = data.launch(run, pairs=True)
    assert torch.equal(data.queries[..., :RANK], before.queries[..., :RANK])
    assert torch.equal(data.turning, before.turning)
    assert torch.equal(data.row, before.row)
    assert (data.pool[:, 0] == 9.0).all()
    flat = data.pool[:, 1].flatten(0, 1)
    assert torch.equal(flat[data.into.loc], rows)
    others = torch.ones(len(flat), dtype=torch.bool).index_fill_(0, data.into.loc, False)
    assert (flat[others] == 9.0).all()


@RUNS
@pytest.mark.parametrize("tokens", [0, 1])
def test_a_step_may_have_no_tokens_or_one(run: Run, tokens: int) -> None:
    data, whole = make(), make()
    few = replace(
        data,
        turning=data.turning[:tokens],
        row=data.row[:tokens],
        queries=data.queries[:tokens],
        rope=data.rope._replace(positions=data.rope.positions[:tokens]),
        into=data.into._replace(loc=data.into.loc[:tokens]),
    )
    assert torch.equal(few.launch(run, pairs=True), whole.launch(run, pairs=True)[:tokens])
    others = torch.ones(data.pool[:, 1].flatten(0, 1).shape[0], dtype=torch.bool)
    others[data.into.loc[:tokens]] = False
    assert (data.pool[:, 1].flatten(0, 1)[others] == 9.0).all()
    assert (data.pool[:, 0] == 9.0).all()


def test_bad_operands_are_named() -> None:
    good = make()
    norm, rope, into = good.norm, good.rope, good.into
    wrong: list[tuple[str, dict[str, Any]]] = [
        (r"turning must be \[tokens, heads, rope_dim\]", {"turning": good.turning.flatten(1)}),
        (r"turning must be .* even last dimension", {"turning": good.turning[..., 1:]}),
        (r"row must be torch.bfloat16 \[4, 32\]", {"row": good.row[:3]}),
        (r"queries must be torch.bfloat16 \[4, 5, 32\]", {"queries": good.queries.float()}),
        (
            r"norm.weight must be torch.bfloat16 \[24\]",
            {"norm": norm._replace(weight=norm[0].float())},
        ),
        (
            r"rope.cos_sin must be torch.float32 \[64, 8\]",
            {"rope": rope._replace(cos_sin=rope[0][:, :6])},
        ),
        (
            r"rope.positions must be torch.int64 \[4\]",
            {"rope": rope._replace(positions=rope[1].int())},
        ),
        (
            r"into.cache must be torch.bfloat16 \[4, 2, 1, 32\]",
            {"into": into._replace(cache=into.cache.half())},
        ),
        (r"into.loc must be torch.int64 \[4\]", {"into": into._replace(loc=into.loc[:2])}),
    ]
    for text, change in wrong:
        operands = {"turning": good.turning, "row": good.row, "queries": good.queries}
        operands |= {"norm": norm, "rope": rope, "into": into, "pairs": True} | change
        with pytest.raises(KernelArgumentError, match=text):
            latent_rows(**operands)


def test_a_scale_is_the_least_power_of_two_that_holds_the_largest_number() -> None:
    most = torch.tensor([448.0, 3.5, torch.inf])
    above = most.nextafter(torch.tensor(torch.inf))
    assert latent_scales(most.unsqueeze(1)).flatten().tolist() == [1.0, 2.0**-7, 2.0**120]
    assert latent_scales(above.unsqueeze(1)).flatten().tolist() == [2.0, 2.0**-6, 2.0**120]
