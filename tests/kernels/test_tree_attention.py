"""tree_attention, the op and its Triton kernel, against a walk over ancestors in float64."""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.tree_attention import tree_attention

NAN = float("nan")
CHAIN = (-1, 0, 1, 2, 3)
BRANCHES = (-1, 0, 0, 1, 1)
FOREST = (-1, -1, 0, 1, 2)  # two roots: a draft step below the token that is in the cache already


@dataclass(frozen=True, kw_only=True)
class Case:
    """A uniform step: one tree of as many nodes per request."""

    trees: tuple[tuple[int, ...], ...] = (BRANCHES, CHAIN, FOREST)
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    v_head_dim: int = 24
    soft_cap: float | None = None
    dtype: torch.dtype = torch.float32

    @property
    def extend_len(self) -> int:
        return len(self.trees[0])


@dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The step's own rows: slices of one fused projection per token."""

    case: Case
    q: Tensor  # [tokens, heads, head_dim]
    k: Tensor  # [tokens, kv_heads, head_dim]
    v: Tensor  # [tokens, kv_heads, v_head_dim]
    tree_mask: Tensor  # [tokens, extend_len + 3]  bool  True behind the extend


def ancestors(tree: tuple[int, ...], node: int) -> list[int]:
    """A node, its parent, and so on up to a root."""
    found = []
    while node >= 0:
        found.append(node)
        node = tree[node]
    return found


def make(case: Case, seed: int = 0) -> Rows:
    """Values as large as the tree, so that a node too few or too many changes a row by O(1)."""
    random = torch.Generator().manual_seed(seed)
    tokens, extend = len(case.trees) * case.extend_len, case.extend_len
    shapes = ((case.heads, case.head_dim), (case.kv_heads, case.head_dim))
    shapes += ((case.kv_heads, case.v_head_dim),)
    sizes = [heads * dim for heads, dim in shapes]
    fused = torch.randn(tokens, sum(sizes), generator=random)
    fused[:, sizes[0] + sizes[1] :] *= 2.0 * extend
    pieces = fused.to(case.dtype).split(sizes, dim=1)
    q, k, v = (piece.view(tokens, *shape) for piece, shape in zip(pieces, shapes, strict=True))
    mask = torch.ones(tokens, extend + 3, dtype=torch.bool)
    for request, tree in enumerate(case.trees):
        for node in range(extend):
            seen = ancestors(tree, node)
            mask[request * extend + node, :extend] = torch.tensor(
                [other in seen for other in range(extend)]
            )
    return Rows(case=case, q=q, k=k, v=v, tree_mask=mask)


def walk(rows: Rows, change: Callable[[list[int]], list[int]] = list) -> tuple[Tensor, Tensor]:
    """(out, lse) in float64, one ancestor at a time; `change` states a wrong set of them."""
    case = rows.case
    group, extend = case.heads // case.kv_heads, case.extend_len
    out = torch.zeros(rows.q.shape[0], case.heads, case.v_head_dim, dtype=torch.float64)
    lse = torch.full((rows.q.shape[0], case.heads), -math.inf, dtype=torch.float64)
    for token in range(rows.q.shape[0]):
        request, node = divmod(token, extend)
        seen = [request * extend + at for at in change(ancestors(case.trees[request], node))]
        for head in range(case.heads):
            total = 0.0
            for other in seen:
                score = (
                    0.3 * rows.q[token, head].double() @ rows.k[other, head // group].double()
                ).item()
                if case.soft_cap is not None:
                    score = case.soft_cap * math.tanh(score / case.soft_cap)
                total += math.exp(score)
                out[token, head] += math.exp(score) * rows.v[other, head // group].double()
            if seen:
                out[token, head] /= total
                lse[token, head] = math.log(total)
    return out, lse


def run_op(rows: Rows) -> tuple[Tensor, Tensor]:
    return _run(rows, tree_attention)


def run_triton(rows: Rows) -> tuple[Tensor, Tensor]:
    from paceline.kernels._triton.tree_attention import launch_tree_attention

    return _run(rows, launch_tree_attention)


def _run(rows: Rows, launch: Callable[..., None]) -> tuple[Tensor, Tensor]:
    case, tokens = rows.case, rows.q.shape[0]
    out = torch.full((tokens, case.heads, case.v_head_dim), NAN, dtype=case.dtype)
    lse = torch.full((tokens, case.heads), NAN)
    launch(
        rows.q,
        rows.k,
        rows.v,
        rows.tree_mask,
        extend_len=case.extend_len,
        scale=0.3,
        soft_cap=case.soft_cap,
        out=out,
        lse=lse,
    )
    return out, lse


Run = Callable[[Rows], tuple[Tensor, Tensor]]
both = pytest.mark.parametrize("run", [run_op, run_triton], ids=["op", "triton"])
LIMIT = {torch.float32: 1e-4, torch.float16: 0.05, torch.bfloat16: 0.4}


def error(out: Tensor, wanted: Tensor) -> float:
    """The largest difference of an element; NaN counts as infinite."""
    found = (out.double() - wanted).abs().max().item()
    return math.inf if math.isnan(found) else found


CASES = {
    "gqa": Case(),
    "mha-capped": Case(kv_heads=4, soft_cap=0.7),
    "mqa-odd-dims": Case(heads=3, kv_heads=1, head_dim=20, v_head_dim=5),
    "bf16": Case(dtype=torch.bfloat16),
    "fp16-capped": Case(dtype=torch.float16, soft_cap=2.0),
    "one-node": Case(trees=((-1,), (-1,))),
    "wide-keys": Case(heads=3, kv_heads=1, head_dim=288, v_head_dim=256),
    "wide-keys-bf16": Case(heads=3, kv_heads=1, head_dim=272, v_head_dim=24, dtype=torch.bfloat16),
}


@both
@pytest.mark.parametrize("name", CASES)
def test_each_row_sees_itself_and_its_ancestors(run: Run, name: str) -> None:
    rows = make(CASES[name])
    out, lse = run(rows)
    expected, expected_lse = walk(rows)
    limit = LIMIT[rows.case.dtype]
    assert error(out, expected) < limit
    assert error(lse, expected_lse) < 1e-5 if limit < 0.01 else 1e-2
    if rows.case.extend_len > 1:
        for wrong in (lambda seen: seen[:1], lambda seen: seen[-1:], lambda seen: [*seen, 2]):
            assert error(walk(rows, wrong)[0], expected) > 5 * limit


@both
def test_a_chain_in_place_of_a_tree_would_be_seen(run: Run) -> None:
    rows = make(Case(trees=(BRANCHES,)))
    chain = make(Case(trees=(CHAIN,)))
    out, _ = run(replace(rows, tree_mask=chain.tree_mask))
    assert error(out, walk(rows)[0]) > 1.0


def random_tree(size: int, seed: int) -> tuple[int, ...]:
    random = torch.Generator().manual_seed(seed)
    return (-1, *(int(torch.randint(node, (), generator=random)) for node in range(1, size)))


@both
@pytest.mark.parametrize("extend", [17, 64, 70])
def test_trees_beyond_one_tile(run: Run, extend: int) -> None:
    """Tiles hold 16 rows of float32 and at most 64 keys; two heads share a key."""
    case = Case(trees=(random_tree(extend, 1), random_tree(extend, 2)), heads=2, kv_heads=1)
    rows = make(case)
    out, lse = run(rows)
    expected, expected_lse = walk(rows)
    assert error(out, expected) < 1e-3
    assert error(lse, expected_lse) < 1e-5


@both
def test_requests_do_not_see_each_other(run: Run) -> None:
    rows = make(Case())
    alone, _ = run(rows)
    rows.k[5:10] = NAN
    rows.v[5:10] = NAN
    out, _ = run(rows)
    assert torch.equal(out[:5], alone[:5])
    assert torch.equal(out[10:], alone[10:])
    assert out[5:10].isnan().all()


@both
def test_a_row_that_sees_nothing_gives_zeros_and_no_lse(run: Run) -> None:
    rows = make(Case())
    rows.tree_mask[7, :5] = False
    out, lse = run(rows)
    assert out[7].eq(0).all()
    assert lse[7].isneginf().all()
    assert out.isfinite().all()


def test_a_step_without_rows_writes_nothing() -> None:
    rows = make(Case())
    empty = replace(rows, q=rows.q[:0], k=rows.k[:0], v=rows.v[:0], tree_mask=rows.tree_mask[:0])
    assert run_op(empty)[0].shape == (0, 4, 24)


def test_the_tile_table_fits_small_and_large_trees() -> None:
    from paceline.kernels._triton.tree_attention import tree_config

    small = tree_config(4, 4, head_dim=128, v_head_dim=128, dtype=torch.bfloat16)
    large = tree_config(64, 8, head_dim=256, v_head_dim=256, dtype=torch.bfloat16)
    wide = tree_config(64, 8, head_dim=64, v_head_dim=64, dtype=torch.float32)
    assert (small.block_rows, small.block_keys) == (16, 16)
    assert (large.block_rows, large.block_keys) == (64, 32)
    assert (wide.block_rows, wide.block_keys) == (16, 32)


def test_wide_keys_are_two_tiles_and_narrow_ones_one() -> None:
    from paceline.kernels._triton.tree_attention import column_tiles, tree_config

    tiles = {dim: column_tiles(dim) for dim in (80, 192, 256, 288, 512, 576)}
    one = {dim: (dim, 0) for dim in (80, 192, 256, 512)}
    assert tiles == one | {288: (256, 32), 576: (512, 64)}
    latent = tree_config(9, 16, head_dim=576, v_head_dim=512, dtype=torch.bfloat16)
    assert (latent.block_rows, latent.block_keys) == (16, 16)


BAD: dict[str, tuple[Callable[[Rows], Rows], str]] = {
    "not uniform": (
        lambda rows: replace(rows, q=rows.q[:-1]),
        r"q must be \[reqs \* 5, heads, head_dim\] with a contiguous last dimension, got float32 "
        r"\[14, 4, 16\]",
    ),
    "k dim": (
        lambda rows: replace(rows, k=rows.k[..., :-1]),
        r"k must be torch.float32 \[15, heads, 16\] on cpu",
    ),
    "v dtype": (
        lambda rows: replace(rows, v=rows.v.half()),
        r"v must be torch.float32 \[15, heads, dim\] on cpu .* got float16",
    ),
    "kv heads": (
        lambda rows: replace(rows, v=rows.v[:, :1]),
        "k must be of v's 1 KV heads, a divisor of q's 4",
    ),
    "narrow mask": (
        lambda rows: replace(rows, tree_mask=rows.tree_mask[:, :4]),
        r"tree_mask must be bool \[15, >= 5\] on cpu with contiguous rows, got bool \[15, 4\]",
    ),
    "mask of a smaller batch": (
        lambda rows: replace(rows, tree_mask=rows.tree_mask[:10]),
        r"tree_mask must be bool \[15, >= 5\]",
    ),
    "mask of bytes": (
        lambda rows: replace(rows, tree_mask=rows.tree_mask.byte()),
        r"tree_mask must be bool .* got uint8",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_an_argument_that_does_not_fit_is_named(name: str) -> None:
    change, text = BAD[name]
    with pytest.raises(KernelArgumentError, match=text):
        run_op(change(make(Case())))


@pytest.mark.parametrize(
    ("out", "lse", "text"),
    [
        (
            torch.zeros(15, 4, 16),
            torch.zeros(15, 4),
            r"out must be torch.float32 \[15, heads, 24\]",
        ),
        (torch.zeros(15, 3, 24), torch.zeros(15, 4), "out must be of 4 heads"),
        (torch.zeros(15, 4, 24), torch.zeros(4, 15).T, r"lse must be contiguous float32 \[15, 4\]"),
        (torch.zeros(15, 4, 24), torch.zeros(15, 4, device="meta"), r"\[15, 4\] on cpu, got"),
    ],
    ids=["dim", "heads", "lse", "lse elsewhere"],
)
def test_an_output_that_does_not_fit_is_named(out: Tensor, lse: Tensor, text: str) -> None:
    rows = make(Case())
    with pytest.raises(KernelArgumentError, match=text):
        tree_attention(
            rows.q,
            rows.k,
            rows.v,
            rows.tree_mask,
            extend_len=5,
            scale=0.3,
            soft_cap=None,
            out=out,
            lse=lse,
        )
