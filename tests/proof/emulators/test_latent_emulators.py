"""The emulators of FlashMLA and of FlashInfer's wrapper for latents refuse what their libraries
would get wrong, and answer as the definition does."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.proof.emulators import flashinfer_mla, flashmla

BF16 = torch.bfloat16
SCALE = 0.05


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def wanted(q: Tensor, rows: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """(out, lse) of one request in float64: q [queries, heads, 576], rows [keys, 576]."""
    scores = torch.einsum("qhd,kd->qhk", q.double(), rows.double()) * SCALE
    if causal:
        own = torch.arange(len(q)).view(-1, 1, 1) + len(rows) - len(q)
        scores = scores.masked_fill(torch.arange(len(rows)) > own, float("-inf"))
    return scores.softmax(-1) @ rows[:, :512].double(), scores.logsumexp(-1)


# --- FlashMLA -------------------------------------------------------------------------------------


def decode(**changes: Any) -> tuple[Tensor, Tensor]:
    """Two requests of 70 and 5 keys, two queries each."""
    torch.manual_seed(0)
    lens = ints(70, 5)
    q = torch.randn(2, 2, 4, 576).to(BF16)
    schedule = flashmla.get_mla_metadata(changes.pop("planned", lens), changes.pop("rows", 8), 1)
    given = {
        "q": q,
        "k_cache": torch.randn(4, 64, 1, 576, generator=torch.Generator().manual_seed(1)).to(BF16),
        "block_table": torch.tensor([[2, 1], [3, 0]], dtype=torch.int32),
        "cache_seqlens": lens,
        "head_dim_v": 512,
        "tile_scheduler_metadata": schedule[0],
        "num_splits": schedule[1],
        "softmax_scale": SCALE,
        "causal": True,
    }
    return flashmla.flash_mla_with_kvcache(**(given | changes))


def test_flashmla_equals_the_definition() -> None:
    torch.manual_seed(0)
    q = torch.randn(2, 2, 4, 576).to(BF16)
    cache = torch.randn(4, 64, 1, 576, generator=torch.Generator().manual_seed(1)).to(BF16)
    out, lse = decode()
    for request, (pages, keys) in enumerate((([2, 1], 70), ([3], 5))):
        rows = cache[pages].flatten(0, 2)[:keys]
        expected, expected_lse = wanted(q[request], rows, causal=True)
        assert (out[request].double() - expected).abs().max() < 0.02
        assert (lse[request].t().double() - expected_lse).abs().max() < 1e-4


def test_a_request_of_no_key_has_an_infinite_lse() -> None:
    lens = ints(70, 0)
    out, lse = decode(cache_seqlens=lens, planned=lens, causal=False)
    assert not out[1].any()
    assert lse[1].isposinf().all()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"planned": ints(70, 6)}, "flashmla rows and lengths of the schedule must be"),
        ({"rows": 4}, "flashmla rows and lengths of the schedule must be"),
        ({"q": torch.zeros(2, 2, 4, 288).to(BF16)}, "flashmla head dim must be"),
        ({"q": torch.zeros(2, 2, 4, 576)}, "flashmla q dtype must be a 16-bit float"),
        ({"k_cache": torch.zeros(4, 16, 1, 576).to(BF16)}, "flashmla page of k_cache must be"),
        ({"k_cache": torch.zeros(4, 64, 1, 576).half()}, "flashmla k_cache dtype must be"),
        ({"head_dim_v": 576}, "flashmla head_dim_v must be 512, got 576"),
        ({"block_table": torch.zeros(2, 2).long()}, "flashmla block_table dtype and dims must be"),
        ({"block_table": torch.zeros(3, 2).int()}, "flashmla requests of block_table must be 2"),
        ({"block_table": torch.zeros(2, 1).int()}, "flashmla block_table width must be at least 2"),
        (
            {"block_table": torch.full((2, 2), 9).int()},
            "flashmla block_table must be page ids below 4",
        ),
        ({"cache_seqlens": ints(70, 0, 5, 0)[::2]}, "flashmla cache_seqlens must be contiguous"),
        ({"num_splits": ints(0, 1)}, "flashmla shapes of the schedule must be"),
    ],
)
def test_a_call_that_flashmla_would_get_wrong_is_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        decode(**changes)


def test_a_schedule_is_of_one_kv_head() -> None:
    with pytest.raises(KernelArgumentError, match="flashmla num_heads_k must be 1, got 2"):
        flashmla.get_mla_metadata(ints(5), 4, 2)


# --- FlashInfer -----------------------------------------------------------------------------------


def wrapper(size: int = 1 << 20) -> flashinfer_mla.BatchMLAPagedAttentionWrapper:
    return flashinfer_mla.BatchMLAPagedAttentionWrapper(torch.zeros(size, dtype=torch.uint8))


def planned(
    made: flashinfer_mla.BatchMLAPagedAttentionWrapper, **changes: Any
) -> flashinfer_mla.BatchMLAPagedAttentionWrapper:
    """Two requests of 9 and 5 keys in pages of 4, three queries and one."""
    given = {
        "qo_indptr": ints(0, 3, 4),
        "kv_indptr": ints(0, 3, 5),
        "kv_indices": ints(2, 1, 3, 5, 4, 0),
        "kv_len_arr": ints(9, 5),
        "num_heads": 4,
        "head_dim_ckv": 512,
        "head_dim_kpe": 64,
        "page_size": 4,
        "causal": True,
        "sm_scale": SCALE,
        "q_data_type": BF16,
        "kv_data_type": BF16,
    }
    made.plan(**(given | changes))
    return made


def attend(
    made: flashinfer_mla.BatchMLAPagedAttentionWrapper, q: Tensor, rows: Tensor, **options: Any
) -> Any:
    parts = (q[..., :512], q[..., 512:], rows[..., :512], rows[..., 512:])
    return made.run(*parts, **options)


def test_flashinfer_equals_the_definition_in_either_base() -> None:
    torch.manual_seed(0)
    q, rows = torch.randn(4, 4, 576).to(BF16), torch.randn(6, 4, 576).to(BF16)
    out, lse = attend(planned(wrapper()), q, rows, return_lse=True, return_lse_base_on_e=True)
    _, base_two = attend(planned(wrapper()), q, rows, return_lse=True)
    for begin, end, pages, keys in ((0, 3, [2, 1, 3], 9), (3, 4, [5, 4], 5)):
        expected, expected_lse = wanted(q[begin:end], rows[pages].flatten(0, 1)[:keys], causal=True)
        assert (out[begin:end].double() - expected).abs().max() < 0.02
        assert (lse[begin:end].double() - expected_lse).abs().max() < 1e-4
        assert (base_two[begin:end].double() * 0.6931471805599453 - expected_lse).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qo_indptr": ints(0, 3, 4).long()}, "qo_indptr dtype must be torch.int32"),
        ({"head_dim_kpe": 0}, "dims must be"),
        ({"q_data_type": torch.float32}, "q_data_type must be a 16-bit float"),
        ({"kv_data_type": torch.float16}, "kv_data_type must be torch.bfloat16"),
        ({"qo_indptr": ints(0, 4)}, "lengths of the lists must be 3"),
        ({"kv_len_arr": ints(9, 9)}, "pages of a request must be 3, got 2"),
        ({"qo_indptr": ints(0, 3, 9)}, "keys of a causal request must be at least"),
        ({"kv_indices": ints(2, 1)}, r"kv_indptr\[-1\] must be at most 2 pages, got 5"),
        ({"num_heads": 64 * 16384, "causal": False}, "units of work must be at most 16384"),
    ],
)
def test_a_plan_that_flashinfer_would_get_wrong_is_refused(
    changes: dict[str, Any], text: str
) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        planned(wrapper(), **changes)


def small_workspace(made: Any) -> None:
    made._int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)


def small_pinned(made: Any) -> None:
    made._pin_memory_int_workspace_buffer = torch.zeros(4096, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (small_workspace, "bytes of int_workspace_buffer must be at least"),
        (small_pinned, "bytes of pinned int_workspace_buffer must be at least"),
    ],
)
def test_a_schedule_needs_its_room(change: Callable[[Any], None], text: str) -> None:
    made = wrapper()
    change(made)
    with pytest.raises(KernelArgumentError, match=text):
        planned(made)
    with pytest.raises(KernelArgumentError, match="bytes of float_workspace_buffer must be"):
        planned(wrapper(64))


def test_a_run_needs_its_plan_and_the_pages_of_its_cache() -> None:
    q, rows = torch.zeros(4, 4, 576).to(BF16), torch.zeros(6, 4, 576).to(BF16)
    with pytest.raises(KernelArgumentError, match="run must be after plan, got no plan"):
        attend(wrapper(), q, rows)
    with pytest.raises(KernelArgumentError, match="rows, dtype and page size must be"):
        attend(planned(wrapper()), q[:3], rows)
    with pytest.raises(KernelArgumentError, match="kv_indices must be pages below 3"):
        attend(planned(wrapper()), q, rows[:3])
    with pytest.raises(KernelArgumentError, match="out shape must be"):
        attend(planned(wrapper()), q, rows, out=torch.zeros(4, 4, 64).to(BF16))


def test_a_schedule_that_another_wrapper_left_is_followed_or_refused() -> None:
    """Two share a workspace, as a ring's wrappers do: whichever planned last is run."""
    torch.manual_seed(0)
    q, rows = torch.randn(4, 4, 576).to(BF16), torch.randn(6, 4, 576).to(BF16)
    first, second = planned(wrapper()), wrapper()
    second._int_workspace_buffer = first._int_workspace_buffer
    planned(second, qo_indptr=ints(0, 1, 4), kv_indptr=ints(0, 2, 5), kv_len_arr=ints(5, 9))
    assert torch.equal(attend(first, q, rows), attend(second, q, rows))
    planned(second, num_heads=64)
    with pytest.raises(KernelArgumentError, match="tiles beside each other must be 1, as recorded"):
        attend(first, q, rows)
    first._int_workspace_buffer.zero_()
    with pytest.raises(
        KernelArgumentError, match="schedule must be a plan in int_workspace_buffer"
    ):
        attend(first, q, rows)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"use_cuda_graph": True}, "use_cuda_graph must be False, which is emulated"),
        ({"backend": "cutlass"}, "backend must be auto or fa3"),
    ],
)
def test_what_is_not_emulated_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        flashinfer_mla.BatchMLAPagedAttentionWrapper(torch.zeros(64, dtype=torch.uint8), **options)
