"""Sinks, quantised caches, every mask, and split queries in the Triton kernels."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case, reference, worst_error
from paged_runs import CPU, DECODE, RAGGED, assert_matches, run_decode, run_extend, workspace_of
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import decode_splits
from paceline.kernels.paged_attention.splits import extend_splits

MHA = Shape(num_kv_heads=2, page_size=1)
FP8 = torch.float8_e4m3fn
FEATURES = {
    "sinks": Shape(num_heads=4, num_kv_heads=2, sinks=True),
    "sinks-window-capped": Shape(num_heads=5, page_size=5, window=20, soft_cap=3.0, sinks=True),
    "fp8": Shape(v_head_dim=80, kv_dtype=FP8),
    "fp8-bf16-capped-sinks": Shape(
        num_heads=4, num_kv_heads=2, soft_cap=3.0, sinks=True, dtype=torch.bfloat16, kv_dtype=FP8
    ),
}


@pytest.mark.parametrize("run", [run_decode, run_extend], ids=["decode", "extend"])
@pytest.mark.parametrize("name", FEATURES)
def test_sinks_and_scales_match_reference_and_count(
    name: str, run: Callable[[PagedCase], tuple[Tensor, Tensor]]
) -> None:
    case = make_case(DECODE if run is run_decode else RAGGED, FEATURES[name], seed=22)
    assert_matches(case, run(case))
    changes = {"sinks": case.sinks, "k_scale": case.k_scale, "v_scale": case.v_scale}
    for field, value in changes.items():
        if value is not None:
            wrong, _ = reference(replace(case, **{field: value + 0.5}))
            assert worst_error(case, wrong) > 1.0


def test_prefix_alone_ignores_sinks_and_reads_scales() -> None:
    shape = replace(FEATURES["fp8"], sinks=True)
    case = make_case(RAGGED, shape, seed=23)
    assert_matches(case, run_extend(case, prefix_only=True), prefix_only=True)


def test_a_request_without_keys_gives_zeros_beside_its_sink() -> None:
    case = make_case(DECODE, FEATURES["sinks"], seed=24)
    out, lse = run_decode(case, kv_lens=torch.tensor([97, 0, 43], dtype=torch.int32))
    assert out[1].eq(0).all()
    assert lse[1].isneginf().all()


TREES = BatchSpec(prefix_lens=(45, 0, 17), extend_lens=(6, 21, 1))


@pytest.mark.parametrize("prefix_only", [False, True], ids=["all", "prefix"])
@pytest.mark.parametrize("window", [None, 3, 20, Chunk(48)], ids=str)
@pytest.mark.parametrize("mask", [MaskKind.TREE, MaskKind.FULL, MaskKind.BLOCK])
def test_other_masks_than_causal_match_reference_and_no_other_mask(
    mask: MaskKind, window: Lookback | None, prefix_only: bool
) -> None:
    shape = Shape(num_heads=3, window=window)
    case = make_case(TREES, shape, seed=25, mask=mask)
    out, lse = run_extend(case, prefix_only=prefix_only)
    assert worst_error(case, out, prefix_only=prefix_only) <= 1.0
    expected_lse = reference(case, prefix_only=prefix_only)[1]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    other = MaskKind.FULL if mask is MaskKind.TREE else MaskKind.CAUSAL
    wrong, _ = reference(
        replace(case, mask=other, tree_mask=None, visible_end=None), prefix_only=prefix_only
    )
    if window is not None or not prefix_only:
        is_same = prefix_only and mask is not MaskKind.TREE  # the step's rows count positions alike
        assert (worst_error(case, wrong, prefix_only=prefix_only) > 1.0) != is_same


@pytest.mark.parametrize("extend", [64, 65])
def test_a_tree_of_more_rows_than_a_number_has_bits_is_masked_too(extend: int) -> None:
    batch = BatchSpec(prefix_lens=(5,), extend_lens=(extend,))
    case = make_case(batch, Shape(num_heads=1, head_dim=16), seed=31, mask=MaskKind.TREE)
    out, _ = run_extend(case)
    assert worst_error(case, out) <= 1.0
    wrong, _ = reference(replace(case, mask=MaskKind.CAUSAL, tree_mask=None))
    assert worst_error(case, wrong) > 1.0


VERIFY = BatchSpec(prefix_lens=(150, 0, 33), extend_lens=(3, 3, 2))


@pytest.mark.parametrize("prefix_only", [False, True], ids=["all", "prefix"])
@pytest.mark.parametrize(("window", "splits"), [(None, 3), (100, 2)])
@pytest.mark.parametrize("mask", list(MaskKind))
def test_few_queries_split_their_keys(
    mask: MaskKind, window: int | None, splits: int, prefix_only: bool
) -> None:
    """153 keys, or a window of 100, in parts of 64."""
    shape = replace(FEATURES["sinks"], num_heads=5, num_kv_heads=1, window=window)
    case = make_case(VERIFY, shape, seed=28, mask=mask)
    workspace = workspace_of(case, 64)
    out, lse = run_extend(case, prefix_only=prefix_only, workspace=workspace)
    assert worst_error(case, out, prefix_only=prefix_only) <= 1.0
    expected_lse = reference(case, prefix_only=prefix_only)[1]
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    assert not workspace.finished.any()
    parts = workspace.partial_lse[: 3 * splits].view(3, splits, 5)
    assert not parts[0].isnan().any()


def test_many_queries_do_not_split_their_keys() -> None:
    case = make_case(RAGGED, MHA, seed=29)
    workspace = workspace_of(case, 3)
    assert_matches(case, run_extend(case, workspace=workspace))
    assert workspace.partial_lse.isnan().all()


def test_a_split_is_worth_its_keys_and_fits_the_workspace() -> None:
    case = make_case(VERIFY, MHA, seed=30)
    workspace = workspace_of(case, 64)
    few = partial(
        extend_splits, num_reqs=1, num_kv_heads=1, group=1, dtype=torch.float32, workspace=workspace
    )
    assert few(4, max_rows=4, max_keys=4096) == 8
    assert few(4, max_rows=4, max_keys=130) == 3
    assert few(20, max_rows=20, max_keys=4096) == 4
    narrow = replace(workspace, partial_lse=workspace.partial_lse[:24])
    assert few(8, max_rows=8, max_keys=4096, workspace=narrow) == 3
    assert few(2000, max_rows=2000, max_keys=4096) == 1
    assert decode_splits(1, 1, max_keys=64, device=CPU) == 1


BAD_MASKS = {
    "no tree": (MaskKind.TREE, None, r"tree_mask must be bool \[28, >= 21\].*got None"),
    "narrow": (MaskKind.TREE, (28, 20), r"tree_mask must be bool \[28, >= 21\]"),
    "unasked": (MaskKind.FULL, (28, 24), "tree_mask must be None, for a full mask"),
}


@pytest.mark.parametrize("name", BAD_MASKS)
def test_a_mask_that_cannot_be_read_is_named(name: str) -> None:
    mask, shape, text = BAD_MASKS[name]
    tree_mask = None if shape is None else torch.ones(shape, dtype=torch.bool)
    case = make_case(TREES, MHA, seed=26)
    with pytest.raises(KernelArgumentError, match=text):
        run_extend(replace(case, mask=mask, tree_mask=tree_mask))


@pytest.mark.parametrize(
    "scale", [None, torch.ones(2), torch.ones(1).double()], ids=["none", "two", "double"]
)
def test_an_fp8_cache_needs_its_scales(scale: Tensor | None) -> None:
    case = make_case(DECODE, FEATURES["fp8"], seed=27)
    with pytest.raises(KernelArgumentError, match=r"v_scale must be float32 \[1\], for a cache of"):
        run_decode(replace(case, v_scale=scale))
