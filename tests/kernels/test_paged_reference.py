"""The paged definition against attention that others wrote: torch SDPA and transformers."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from paged_cases import BatchSpec, PagedCase, Shape, make_case, reference
from torch import Tensor
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward
from transformers.models.gpt_oss import modeling_gpt_oss

from paceline.core.errors import KernelArgumentError
from paceline.core.model.lookback import Chunk, Lookback
from paceline.core.modes import MaskKind
from paceline.kernels.paged_attention import (
    PagedCache,
    PagedCall,
    PagedRows,
    Weighing,
    paged_attention_reference,
    paged_extend,
)
from paceline.kernels.paged_attention.reference import visible_keys
from paceline.kernels.paged_attention_cpu import paged_attention_cpu

RAGGED = BatchSpec(prefix_lens=(0, 19, 33, 5), extend_lens=(7, 1, 4, 9))
SHAPES = [
    Shape(num_heads=4, num_kv_heads=4, head_dim=16, v_head_dim=16, page_size=1),
    Shape(num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=8, page_size=16),
    Shape(num_heads=7, num_kv_heads=1, head_dim=8, v_head_dim=16, page_size=64),
]


def heads_of(case: PagedCase, request: int) -> tuple[Tensor, Tensor, Tensor]:
    """Its q, k and v as [1, heads, rows, dim] float64, every head with keys of its own."""
    q = case.q[case.rows_of(request)].double()
    group = case.shape.num_heads // case.shape.num_kv_heads
    k, v = (rows.repeat_interleave(group, dim=1) for rows in case.contiguous(request))
    q, k, v = (rows.transpose(0, 1).unsqueeze(0) for rows in (q, k, v))
    return q, k, v


def sdpa(case: PagedCase, request: int, visible: Tensor) -> Tensor:
    """[extend, heads, v_head_dim] by torch, with an explicit mask."""
    out = F.scaled_dot_product_attention(
        *heads_of(case, request), attn_mask=visible, scale=case.scale
    )
    return out[0].transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("window", [None, 1, 5, 16, 40, Chunk(17)], ids=str)
def test_causal_windowed_rows_equal_sdpa(shape: Shape, window: Lookback | None) -> None:
    case = make_case(RAGGED, shape, seed=1)
    out, _ = reference(case, window=window)
    for request, prefix in enumerate(RAGGED.prefix_lens):
        extend = RAGGED.extend_lens[request]
        visible = torch.zeros(extend, prefix + extend, dtype=torch.bool)
        for i in range(extend):
            for j in range(prefix + extend):
                if isinstance(window, Chunk):
                    is_near = j // window.size == (prefix + i) // window.size
                else:
                    is_near = window is None or j > prefix + i - window
                visible[i, j] = j <= prefix + i and is_near
        expected = sdpa(case, request, visible)
        torch.testing.assert_close(out[case.rows_of(request)], expected, rtol=1e-10, atol=1e-12)


BLOCKS = {0: (2, 6), 2: (34, 37), 3: (5, 9)}  # request -> the block that begins and ends there


def with_blocks(case: PagedCase) -> tuple[PagedRows, list[Tensor]]:
    """The case's rows where a token sees its block whole, and what each request then sees: [extend,
    kv_len] bool, key by key."""
    ends: list[int] = []
    seen = []
    for request, (prefix, kv_len) in enumerate(
        zip(case.prefix_lens.tolist(), case.kv_lens.tolist(), strict=True)
    ):
        first, behind = BLOCKS.get(request, (0, 0))
        visible = torch.zeros(kv_len - prefix, kv_len, dtype=torch.bool)
        for p in range(prefix, kv_len):
            is_within = first <= p < behind
            ends.append(behind if is_within else p + 1)
            for j in range(kv_len):
                is_ahead_in_block = is_within and first <= j < behind
                visible[p - prefix, j] = j <= p or is_ahead_in_block
        seen.append(visible)
    visible_end = torch.tensor(ends, dtype=torch.int32)
    return case.rows._replace(mask=MaskKind.BLOCK, visible_end=visible_end), seen


@pytest.mark.parametrize("window", [None, 1, 3, 16])
@pytest.mark.parametrize("soft_cap", [None, 3.0], ids=["plain", "capped"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_token_sees_its_block_whole(
    shape: Shape, window: int | None, soft_cap: float | None
) -> None:
    """By the definition and by the CPU's operator; a window counts from the token."""
    case = make_case(RAGGED, shape, seed=14)
    rows, seen = with_blocks(case)
    weighing = Weighing(case.scale, window, soft_cap)
    wanted, wanted_lse = paged_attention_reference(case.q, case.cache, rows, weighing)
    out, lse = case.empty_outputs()
    cache = PagedCache(case.k_cache.contiguous(), case.v_cache.contiguous())
    paged_attention_cpu(PagedCall(case.q, cache, rows, weighing, out, lse))
    torch.testing.assert_close(out.double(), wanted, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-4, atol=1e-4)
    fused = torch.full_like(out, float("nan"))
    paged_attention_cpu(PagedCall(case.q, cache, rows, weighing, fused, None))
    torch.testing.assert_close(fused.double(), wanted, rtol=1e-4, atol=1e-4)
    if soft_cap is not None:
        return
    for request, visible in enumerate(seen):
        prefix, kv_len = RAGGED.prefix_lens[request], visible.shape[1]
        if window is not None:
            own = torch.arange(prefix, kv_len).unsqueeze(1)
            visible &= torch.arange(kv_len) > own - window
        expected = sdpa(case, request, visible)
        torch.testing.assert_close(wanted[case.rows_of(request)], expected, rtol=1e-10, atol=1e-12)


def test_blocks_without_their_ends_and_ends_of_no_blocks_are_refused() -> None:
    case = make_case(RAGGED, SHAPES[0], seed=14)
    rows, _ = with_blocks(case)
    lacking, weighing = rows._replace(visible_end=None), Weighing(case.scale)
    with pytest.raises(KernelArgumentError, match="or block with a visible_end, got block"):
        paged_attention_reference(case.q, case.cache, lacking, weighing)
    wrong = {
        r"int32 \[21\], for a block mask, got None": lacking,
        "None, for a causal mask, got int32": rows._replace(mask=MaskKind.CAUSAL),
        r"contiguous int32 \[21\], got int64": rows._replace(visible_end=rows.visible_end.long()),
    }
    for told, given in wrong.items():
        call = PagedCall(case.q, case.cache, given, weighing, *case.empty_outputs())
        with pytest.raises(KernelArgumentError, match=f"visible_end must be {told}"):
            paged_extend(call)


def test_soft_cap_equals_gemma2_attention() -> None:
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1
    shape = Shape(
        num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=16, page_size=16, soft_cap=3.0
    )
    case = make_case(RAGGED, shape, seed=2)
    out, _ = reference(case)
    for request, prefix in enumerate(RAGGED.prefix_lens):
        extend = RAGGED.extend_lens[request]
        hidden = torch.ones(extend, prefix + extend).triu(prefix + 1).double() * -1e30
        expected, _ = eager_attention_forward(
            module,
            *heads_of(case, request),
            hidden[None, None],
            scaling=case.scale,
            softcap=3.0,
        )
        # That function's softmax runs in float32.
        torch.testing.assert_close(out[case.rows_of(request)], expected[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("window", [None, 7])
def test_sinks_equal_gpt_oss_attention(window: int | None) -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=16, page_size=4, sinks=True)
    case = make_case(RAGGED, shape, seed=11)
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 1
    module.sinks = case.sinks.double()
    out, lse = reference(case, window=window)
    for request, prefix in enumerate(RAGGED.prefix_lens):
        extend = RAGGED.extend_lens[request]
        hidden = ~visible_keys(prefix, extend, MaskKind.CAUSAL, tree_mask=None, window=window)
        expected, _ = modeling_gpt_oss.eager_attention_forward(
            module,
            *heads_of(case, request),
            (hidden.double() * -1e30)[None, None],
            scaling=case.scale,
        )
        torch.testing.assert_close(out[case.rows_of(request)], expected[0], rtol=1e-9, atol=1e-9)
    _, plain_lse = reference(replace(case, sinks=None), window=window)
    assert torch.equal(lse, plain_lse)


def test_prefix_alone_has_no_sinks() -> None:
    shape = Shape(num_heads=6, num_kv_heads=2, head_dim=16, v_head_dim=16, page_size=4, sinks=True)
    case = make_case(RAGGED, shape, seed=12)
    with_sinks = reference(case, prefix_only=True)
    without = reference(replace(case, sinks=None), prefix_only=True)
    assert all(torch.equal(mine, other) for mine, other in zip(with_sinks, without, strict=True))


def test_quantised_cache_means_stored_times_scale() -> None:
    shape = replace(SHAPES[1], kv_dtype=torch.float8_e4m3fn)
    case = make_case(RAGGED, shape, seed=13)
    out, _ = reference(case)
    for request, prefix in enumerate(RAGGED.prefix_lens):
        extend = RAGGED.extend_lens[request]
        visible = torch.ones(extend, prefix + extend, dtype=torch.bool).tril(prefix)
        expected = sdpa(case, request, visible)
        torch.testing.assert_close(out[case.rows_of(request)], expected, rtol=1e-10, atol=1e-12)


def test_lse_equals_torch_flash_attention() -> None:
    shape = Shape(num_heads=4, num_kv_heads=4, head_dim=16, v_head_dim=16, page_size=4)
    case = make_case(BatchSpec(prefix_lens=(0, 0), extend_lens=(13, 5)), shape, seed=3)
    _, lse = reference(case)
    for request in range(2):
        _, expected = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *heads_of(case, request),
            0.0,
            True,
            scale=case.scale,
        )
        actual = lse[case.rows_of(request)]
        torch.testing.assert_close(actual, expected[0].T.float(), rtol=1e-6, atol=1e-6)


# Rows 0..4 of one request: 0 is the root, 1 and 2 its children, 3 below 1, 4 below 2.
TREE = torch.tensor(
    [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 1, 0, 1, 0],
        [1, 0, 1, 0, 1],
    ],
    dtype=torch.bool,
)


def with_mask(
    case: PagedCase, mask: MaskKind, tree: Tensor | None, *, window: int | None, prefix_only: bool
) -> tuple[Tensor, Tensor]:
    return paged_attention_reference(
        case.q,
        case.cache,
        case.rows._replace(mask=mask, tree_mask=tree),
        Weighing(case.scale, window, prefix_only=prefix_only),
    )


def test_tree_rows_see_their_prefix_and_ancestors() -> None:
    case = make_case(BatchSpec(prefix_lens=(11,), extend_lens=(5,)), SHAPES[1], seed=4)
    out, _ = with_mask(case, MaskKind.TREE, TREE, window=None, prefix_only=False)
    visible = torch.cat((torch.ones(5, 11, dtype=torch.bool), TREE), dim=1)
    torch.testing.assert_close(out, sdpa(case, 0, visible), rtol=1e-10, atol=1e-12)


def test_tree_window_counts_depth_not_rows() -> None:
    case = make_case(BatchSpec(prefix_lens=(11,), extend_lens=(5,)), SHAPES[1], seed=5)
    out, _ = with_mask(case, MaskKind.TREE, TREE, window=2, prefix_only=False)
    # Depths 0 1 1 2 2: the root still sees key 10, its children see the root, the leaves only
    # their parent and themselves.
    visible = torch.zeros(5, 16, dtype=torch.bool)
    for row, keys in enumerate([(10, 11), (11, 12), (11, 13), (12, 14), (13, 15)]):
        visible[row, list(keys)] = True
    torch.testing.assert_close(out, sdpa(case, 0, visible), rtol=1e-10, atol=1e-12)


def test_tree_chunks_are_cut_by_depth_not_by_row() -> None:
    case = make_case(BatchSpec(prefix_lens=(11,), extend_lens=(5,)), SHAPES[1], seed=5)
    rows = case.rows._replace(mask=MaskKind.TREE, tree_mask=TREE)
    out, _ = paged_attention_reference(case.q, case.cache, rows, Weighing(case.scale, chunk=6))
    # Positions 11 12 12 13 13: the root is the last of its chunk, and no other row sees it.
    visible = torch.zeros(5, 16, dtype=torch.bool)
    for row, keys in enumerate([range(6, 12), (12,), (13,), (12, 14), (13, 15)]):
        visible[row, list(keys)] = True
    torch.testing.assert_close(out, sdpa(case, 0, visible), rtol=1e-10, atol=1e-12)


def test_chain_tree_equals_causal() -> None:
    case = make_case(BatchSpec(prefix_lens=(9,), extend_lens=(6,)), SHAPES[1], seed=6)
    chain = torch.ones(6, 6, dtype=torch.bool).tril()
    for window in (None, 3):
        tree = with_mask(case, MaskKind.TREE, chain, window=window, prefix_only=False)
        causal = with_mask(case, MaskKind.CAUSAL, None, window=window, prefix_only=False)
        torch.testing.assert_close(tree, causal, rtol=0.0, atol=0.0)


def test_full_rows_see_the_whole_step() -> None:
    case = make_case(BatchSpec(prefix_lens=(3,), extend_lens=(5,)), SHAPES[1], seed=7)
    out, _ = with_mask(case, MaskKind.FULL, None, window=None, prefix_only=False)
    visible = torch.ones(5, 8, dtype=torch.bool)
    torch.testing.assert_close(out, sdpa(case, 0, visible), rtol=1e-10, atol=1e-12)


def test_prefix_merged_with_step_by_lse_equals_all() -> None:
    case = make_case(BatchSpec(prefix_lens=(11,), extend_lens=(5,)), SHAPES[1], seed=8)
    whole, whole_lse = with_mask(case, MaskKind.TREE, TREE, window=None, prefix_only=False)
    prefix, prefix_lse = with_mask(case, MaskKind.TREE, TREE, window=None, prefix_only=True)
    visible = torch.cat((torch.zeros(5, 11, dtype=torch.bool), TREE), dim=1)
    step = sdpa(case, 0, visible)
    share = torch.exp(prefix_lse.double() - whole_lse.double())[..., None]
    merged = prefix * share + step * (1.0 - share)
    torch.testing.assert_close(merged, whole, rtol=1e-5, atol=1e-6)


def test_row_without_visible_keys_is_zero_with_lse_minus_infinity() -> None:
    case = make_case(BatchSpec(prefix_lens=(0, 8), extend_lens=(2, 6)), SHAPES[1], seed=9)
    out, lse = with_mask(case, MaskKind.CAUSAL, None, window=3, prefix_only=True)
    blind = torch.tensor([True, True, False, False, True, True, True, True])
    assert torch.equal(lse.isneginf().all(dim=1), blind)
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    assert out.isfinite().all()


def test_mask_that_cannot_be_applied_is_refused() -> None:
    case = make_case(BatchSpec(prefix_lens=(3,), extend_lens=(5,)), SHAPES[1], seed=10)
    with pytest.raises(KernelArgumentError, match="mask must be causal or full, tree with a tree"):
        with_mask(case, MaskKind.TREE, None, window=None, prefix_only=False)
