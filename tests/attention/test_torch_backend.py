"""The torch backend equals a walk over the keys in float64, and the comparison is sharp."""

import math
from dataclasses import replace

import pytest
import torch
from attention_cases import PARENTS, Built, Case, build, walk, wrong_meanings
from torch import Tensor

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Limits, Part
from paceline.core.modes import MaskKind

# Of outputs that are sums of up to 23 values of size 50: rounding of sums and of weights.
TOLERANCE = {torch.float32: 2e-4, torch.float16: 0.15, torch.bfloat16: 0.7}
LSE_TOLERANCE = 2e-5
PAGE_SIZES = (1, 3, 16)
PAGES_AND_WINDOWS = [  # no window; then one below, at and above the page size
    (size, window)
    for size in PAGE_SIZES
    for window in (None, size - 1, size, size + 1)
    if window != 0
]
TREE_EXTENDS = (5, 2, 5)


def run(built: Built) -> tuple[Tensor, Tensor | None]:
    """(out, lse) of the live tokens."""
    backend = TorchBackend()
    plan = backend.plan(built.view, backend.make_buffers(limits(built)))
    nothing = torch.full((), float("nan"))  # fresh k and v: this backend reads the pool alone
    out, lse = backend.forward(built.q, nothing, nothing, built.layer, plan, built.case.part)
    assert out.shape == (built.q.shape[0], built.case.heads, built.case.v_head_dim)
    assert out.dtype is built.case.dtype
    return out[: built.num_live].double(), None if lse is None else lse[: built.num_live].double()


def limits(built: Built) -> Limits:
    """The least a backend must allocate for this one step."""
    case, view = built.case, built.view
    return Limits(
        device=torch.device("cpu"),
        dtype=case.dtype,
        kv_dtype=built.layer.k_cache.dtype,
        layers=(built.layer.spec,),
        max_reqs=view.padded_reqs,
        max_tokens=view.padded_tokens,
        max_pages=tuple(group.page_table.shape[1] for group in view.groups),
        windows=(case.window,),
        num_heads=case.heads,
        num_kv_heads=built.layer.spec.num_kv_heads,
        head_dim=built.layer.spec.head_dim,
        v_head_dim=case.v_head_dim,
        page_size=case.page_size,
    )


def difference(out: Tensor, wanted: Tensor) -> float:
    """The largest difference of an element; NaN counts as infinite."""
    found = (out - wanted).abs().max().item()
    return math.inf if math.isnan(found) else found


def check(case: Case) -> None:
    """The backend against the walk; then against every wrong meaning, which must be told apart."""
    built = build(case)
    out, lse = run(built)
    tolerance = TOLERANCE[case.dtype]
    wanted, wanted_lse = walk(built)
    assert difference(out, wanted) < tolerance
    if lse is not None:
        assert difference(lse.exp(), wanted_lse.exp()) < LSE_TOLERANCE * wanted_lse.exp().max()
        assert torch.equal(lse.isinf(), wanted_lse.isinf())
    for name, (wrong, _) in wrong_meanings(built).items():
        assert difference(out, wrong) > 2 * tolerance, f"{name} passes for the right answer"


def extends_for(mask: MaskKind) -> tuple[int, ...]:
    return TREE_EXTENDS if mask is MaskKind.TREE else (1, 2, 5)


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize(("page_size", "window"), PAGES_AND_WINDOWS)
@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE, MaskKind.FULL])
def test_masks_windows_and_caps_at_every_page_size(
    mask: MaskKind, page_size: int, window: int | None, soft_cap: float | None
) -> None:
    check(
        Case(
            mask=mask,
            page_size=page_size,
            window=window,
            soft_cap=soft_cap,
            extend_lens=extends_for(mask),
        )
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("is_permuted", [True, False], ids=["permuted", "neighbours"])
@pytest.mark.parametrize("v_head_dim", [8, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(3, 3), (4, 2), (7, 1), (14, 2), (6, 1)])
def test_head_groups_value_dims_dtypes_and_page_order(
    heads: int, kv_heads: int, v_head_dim: int, is_permuted: bool, dtype: torch.dtype
) -> None:
    check(
        Case(
            heads=heads,
            kv_heads=kv_heads,
            v_head_dim=v_head_dim,
            is_permuted=is_permuted,
            dtype=dtype,
        )
    )


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("extends", [(1, 1, 1), (1, 2, 5), (5, 5, 5)], ids=str)
@pytest.mark.parametrize(
    ("is_fp8", "has_sinks"), [(True, False), (False, True), (True, True)], ids=str
)
def test_sinks_and_quantised_caches(
    is_fp8: bool,
    has_sinks: bool,
    extends: tuple[int, ...],
    window: int | None,
    soft_cap: float | None,
) -> None:
    case = Case(
        is_fp8=is_fp8,
        has_sinks=has_sinks,
        extend_lens=extends,
        window=window,
        soft_cap=soft_cap,
        heads=6,
    )
    check(case)
    check(replace(case, part=Part.PREFIX))
    check(replace(case, prefix_lens=(0,), extend_lens=(4,)))
    check(replace(case, prefix_lens=(11,), extend_lens=(1,), is_permuted=False))


@pytest.mark.parametrize("window", [2, 3, 4, 5, 6])
def test_windows_around_the_length_of_a_prompt_from_its_start(window: int) -> None:
    check(Case(prefix_lens=(0, 0, 0), extend_lens=(4, 5, 3), window=window))


@pytest.mark.parametrize("is_permuted", [True, False], ids=["permuted", "neighbours"])
@pytest.mark.parametrize("extend", [1, 2, 5])
@pytest.mark.parametrize("prefixes", [(0, 0, 0), (3, 1, 16), (15, 17, 2)], ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE])
def test_uniform_extends_behind_any_prefix(
    mask: MaskKind, page_size: int, prefixes: tuple[int, ...], extend: int, is_permuted: bool
) -> None:
    case = Case(
        mask=mask,
        page_size=page_size,
        prefix_lens=prefixes,
        extend_lens=(extend,) * 3,
        is_permuted=is_permuted,
    )
    if mask is MaskKind.TREE and extend < len(PARENTS):
        case = replace(case, mask=MaskKind.CAUSAL)  # the tree's first two nodes are a chain
    check(case)


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("extends", [(1, 1, 1), (1, 2, 5), (5, 5, 5)], ids=str)
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_prefix_alone_with_its_lse(
    page_size: int, extends: tuple[int, ...], window: int | None, soft_cap: float | None
) -> None:
    """A request without a prefix gives 0 and −inf: nothing to merge."""
    case = Case(
        part=Part.PREFIX,
        page_size=page_size,
        extend_lens=extends,
        window=window,
        soft_cap=soft_cap,
    )
    check(case)
    out, lse = run(build(case))
    assert lse is not None
    assert not out[: extends[0]].any()
    assert (lse[: extends[0]] == -math.inf).all()


def test_a_row_whose_window_ends_before_the_step_sees_no_prefix() -> None:
    case = Case(part=Part.PREFIX, prefix_lens=(9,), extend_lens=(5,), window=3)
    out, lse = run(build(case))
    assert lse is not None
    assert lse.isinf().any(1).tolist() == [False, False, True, True, True]
    assert not out[2:].any()
    assert torch.equal(out.isnan(), torch.zeros_like(out, dtype=torch.bool))


def test_the_prefix_has_an_lse_and_the_whole_needs_none() -> None:
    assert run(build(Case(part=Part.PREFIX)))[1] is not None
    assert TorchBackend.capabilities.returns_lse


def test_prefix_and_step_merge_into_the_whole() -> None:
    """Cascade: out = (e^a x + e^b y) / (e^a + e^b), with the step's own part from the walk."""
    built = build(Case(mask=MaskKind.TREE, extend_lens=TREE_EXTENDS))
    prefix_out, prefix_lse = run(replace(built, case=replace(built.case, part=Part.PREFIX)))
    assert prefix_lse is not None
    step_parts = []
    for request in built.requests:
        alone = replace(
            built,
            requests=(
                replace(
                    request,
                    prefix=0,
                    keys=request.keys[request.prefix :],
                    values=request.values[request.prefix :],
                ),
            ),
        )
        step_parts.append(walk(alone))
    step_out, step_lse = (torch.cat(part) for part in zip(*step_parts, strict=True))
    weight = torch.exp(prefix_lse - torch.logaddexp(prefix_lse, step_lse)).unsqueeze(-1)
    merged = weight * prefix_out + (1 - weight) * step_out
    assert difference(merged, walk(built)[0]) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("extend", [1, 2, 5])
@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
def test_padded_rows_do_not_change_live_rows(extend: int, soft_cap: float | None) -> None:
    """Padded rows read page 0, which holds NaN here; nobody sees what they get."""
    case = Case(extend_lens=(extend,) * 3, soft_cap=soft_cap)
    alone, _ = run(build(case))
    padded, _ = run(build(replace(case, padded_reqs=4)))
    assert torch.equal(alone, padded)


@pytest.mark.parametrize("soft_cap", [None, 0.5], ids=["plain", "capped"])
@pytest.mark.parametrize("extends", [(1, 1, 1), (2, 2, 2)], ids=str)
@pytest.mark.parametrize("what", ["k", "v"])
def test_numbers_that_are_not_finite_stay_visible(
    what: str, extends: tuple[int, ...], soft_cap: float | None
) -> None:
    """A NaN a row reads must reach the sampler, which fails the request by name."""
    built = build(Case(extend_lens=extends, soft_cap=soft_cap))
    first = extends[0]  # the second request's first row
    page = built.view.groups[0].page_table[1, 0]
    cache = built.layer.k_cache if what == "k" else built.layer.v_cache
    cache[page, 0] = float("nan")
    out, _ = run(built)
    assert out[first].isnan().all()
    neighbours = torch.cat((out[:first], out[2 * first :]))
    assert neighbours.isfinite().all()


def test_the_data_are_sharp_about_the_place_of_a_key() -> None:
    """Two neighbouring keys exchanged change what a row sees: the walk is no set of values."""
    built = build(Case(window=4))
    right, _ = walk(built)
    shifted, _ = walk(built, change=lambda keys: [max(0, key - 1) for key in keys])
    assert difference(right, shifted) > 1.0
