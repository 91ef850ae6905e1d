"""The emulator of FlashInfer equals float64 by hand, and refuses what breaks a rule."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import Row, by_hand, gathered
from torch import Tensor

from paceline.core.errors import HostReadError, KernelArgumentError
from paceline.proof.emulators.flashinfer import BatchPrefillWithPagedKVCacheWrapper
from paceline.proof.emulators.flashinfer_kernel import NO_KEY
from paceline.runner.recording.recorded import RecordedGraph

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 64, 4, 9
EXTENDS, KEYS = (2, 0, 3), (9, 1, 6)
ROWS = sum(EXTENDS)
INDICES = (7, 2, 5, 0, 8, 3)
TOLERANCE = 0.02  # of sums of values of size 1 in bfloat16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def binding(**changes: Any) -> dict[str, Any]:
    """A legal constructor call for three requests."""
    legal = {
        "float_workspace_buffer": torch.empty(1 << 20, dtype=torch.uint8),
        "use_cuda_graph": True,
        "qo_indptr_buf": ints(0, 0, 0, 0),
        "paged_kv_indptr_buf": ints(0, 0, 0, 0),
        "paged_kv_indices_buf": ints(*[0] * 8),
        "paged_kv_last_page_len_buf": ints(0, 0, 0),
        "backend": "fa2",
    }
    return legal | changes


def planning(**changes: Any) -> dict[str, Any]:
    """A legal plan: three requests, the second without queries."""
    legal = {
        "qo_indptr": ints(0, 2, 2, 5),
        "paged_kv_indptr": ints(0, 3, 4, 6),
        "paged_kv_indices": ints(*INDICES),
        "paged_kv_last_page_len": ints(1, 1, 2),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim_qk": DIM,
        "page_size": PAGE,
        "causal": True,
        "sm_scale": 0.2,
        "q_data_type": torch.bfloat16,
    }
    return legal | changes


def inputs(**changes: Any) -> dict[str, Any]:
    """A legal run."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    legal = {
        "q": normal(ROWS, HEADS, DIM),
        "paged_kv_cache": tuple(normal(PAGES, PAGE, KV_HEADS, DIM) for _ in range(2)),
        "return_lse": True,
    }
    return legal | changes


def planned(bound: dict[str, Any] | None = None, **changes: Any) -> Any:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(**(bound or binding()))
    wrapper.plan(**planning(**changes))
    return wrapper


def expected(
    given: dict[str, Any], sees: Callable[[int, int], bool], soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out [rows, heads, dim], lse base 2 [rows, heads]) of a run.

    sees(own, key): whether the query at position `own` sees the key at position `key`.
    """
    rows: list[Row] = []
    left = list(INDICES)
    for extend, keys in zip(EXTENDS, KEYS, strict=True):
        pages, left = left[: -(-keys // PAGE)], left[-(-keys // PAGE) :]
        k, v = (gathered(cache, pages, keys) for cache in given["paged_kv_cache"])
        for own in range(keys - extend, keys):
            seen = [key for key in range(keys) if sees(own, key)]
            rows.append(Row(given["q"][len(rows)], k, v, seen))
    out, lse = by_hand(rows, scale=0.2, soft_cap=soft_cap)
    return out, lse / math.log(2)


def near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    is_near = bool(((out.double() - wanted_out).abs() < TOLERANCE).all())
    empty = wanted_lse.isinf()
    gap = (lse.double() - wanted_lse).masked_fill(empty, 0.0).abs()
    return is_near and torch.equal(lse.isinf(), empty) and bool((gap < 1e-3).all())


VISIBLE: dict[str, tuple[dict[str, Any], Callable[[int, int], bool]]] = {
    "causal": ({}, lambda own, key: key <= own),
    "non-causal": ({"causal": False}, lambda own, key: True),
    "window of 3": ({"window_left": 2}, lambda own, key: own - 2 <= key <= own),
    "window of itself": ({"window_left": 0}, lambda own, key: key == own),
    "non-causal window": (
        {"causal": False, "window_left": 1},
        lambda own, key: key >= own - 1,
    ),
}


@pytest.mark.parametrize("name", VISIBLE)
def test_it_equals_float64_by_hand(name: str) -> None:
    changes, sees = VISIBLE[name]
    assert near(planned(**changes).run(**inputs()), expected(inputs(), sees))


@pytest.mark.parametrize("name", VISIBLE)
def test_by_hand_tells_the_masks_apart(name: str) -> None:
    found = planned(**VISIBLE[name][0]).run(**inputs())
    for other, (_, sees) in VISIBLE.items():
        if other != name:
            assert not near(found, expected(inputs(), sees))


def test_soft_cap_comes_before_the_mask() -> None:
    found = planned(logits_soft_cap=0.7).run(**inputs())
    assert near(found, expected(inputs(), lambda own, key: key <= own, soft_cap=0.7))
    assert not near(found, expected(inputs(), lambda own, key: key <= own))


def test_a_request_without_keys_gives_zero_and_the_librarys_infinity() -> None:
    wrapper = planned(
        paged_kv_indptr=ints(0, 0, 1, 3),
        paged_kv_last_page_len=ints(0, 1, 2),
        paged_kv_indices=ints(0, 8, 3),
        causal=False,
    )
    out, lse = wrapper.run(**inputs())
    assert torch.equal(out[:2], torch.zeros_like(out[:2]))
    assert torch.equal(lse[:2], torch.full_like(lse[:2], NO_KEY))
    assert bool(lse[2:].isfinite().all())


def test_a_dead_slot_behind_the_last_key_is_not_read() -> None:
    given = inputs()
    whole = planned().run(**given)[0].clone()
    for cache in given["paged_kv_cache"]:
        cache[5, 1:] = float("nan")
    assert torch.equal(planned().run(**given)[0], whole)


def test_a_key_before_the_window_is_multiplied_by_zero() -> None:
    given = inputs()
    given["paged_kv_cache"][1][7, 0] = 3e38
    huge = planned(window_left=1).run(**given)[0]
    assert near((huge, huge[..., 0] * 0), (huge.double(), huge[..., 0].double() * 0))
    given["paged_kv_cache"][1][7, 0] = float("nan")
    assert bool(planned(window_left=1).run(**given)[0][0].isnan().any())


def test_an_8_bit_cache_is_read_as_stored() -> None:
    given = inputs()
    small = tuple(cache.to(torch.float8_e4m3fn) for cache in given["paged_kv_cache"])
    found = planned(kv_data_type=torch.float8_e4m3fn).run(**given | {"paged_kv_cache": small})
    assert near(found, expected(given | {"paged_kv_cache": small}, lambda own, key: key <= own))


def test_outputs_are_written_where_the_caller_says() -> None:
    out, lse = torch.zeros(ROWS, HEADS, DIM).bfloat16(), torch.zeros(ROWS, HEADS)
    found = planned().run(**inputs(out=out, lse=lse))
    assert found[0] is out
    assert found[1] is lse
    assert bool(out.any())
    assert isinstance(planned().run(**inputs(return_lse=False)), Tensor)


def test_a_replay_runs_the_plan_made_last() -> None:
    wrapper, given = planned(), inputs()
    out, lse = torch.zeros(ROWS, HEADS, DIM).bfloat16(), torch.zeros(ROWS, HEADS)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: wrapper.run(**given | {"out": out, "lse": lse}) and None)
    wrapper.plan(**planning(qo_indptr=ints(0, 1, 2, 5), paged_kv_last_page_len=ints(3, 1, 4)))
    graph.replay()
    other = BatchPrefillWithPagedKVCacheWrapper(**binding())
    other.plan(**planning(qo_indptr=ints(0, 1, 2, 5), paged_kv_last_page_len=ints(3, 1, 4)))
    assert torch.equal(out, other.run(**given)[0])
    assert not torch.equal(out, planned().run(**given)[0])


def test_wrappers_that_share_buffers_run_by_whichever_planned_last() -> None:
    bound = binding()
    one, other = planned(bound), planned(bound)
    schedule = torch.empty(1 << 12, dtype=torch.uint8)
    for wrapper in (one, other):
        wrapper.reset_workspace_buffer(bound["float_workspace_buffer"], schedule)
        wrapper.plan(**planning())
    other.plan(**planning(paged_kv_last_page_len=ints(4, 1, 4)))
    assert torch.equal(one.run(**inputs())[0], other.run(**inputs())[0])


# --- rules ----------------------------------------------------------------------------------------


def strided(*values: int) -> Tensor:
    """The same numbers, every other entry of a larger tensor."""
    return ints(*[value for value in values for _ in range(2)])[::2]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_layout": "HND"}, "kv_layout must be 'NHD'"),
        ({"use_cuda_graph": False}, "use_cuda_graph must be True"),
        ({"backend": "auto"}, "backend must be 'fa2'"),
        ({"float_workspace_buffer": torch.empty(64)}, "float_workspace_buffer dtype"),
        (
            {"float_workspace_buffer": torch.empty(8, 8, dtype=torch.uint8)},
            "dims of float_workspace_buffer must be 1",
        ),
        (
            {"float_workspace_buffer": torch.empty(65, dtype=torch.uint8)[1:]},
            "float_workspace_buffer address must be a multiple of 16",
        ),
        ({"qo_indptr_buf": None}, "qo_indptr_buf must be a tensor in CUDA graph mode"),
        ({"paged_kv_indices_buf": None}, "paged_kv_indices_buf must be a tensor"),
        (
            {"paged_kv_indices_buf": torch.zeros(8)},
            "paged_kv_indices_buf dtype must be torch.int32",
        ),
        (
            {"paged_kv_indices_buf": torch.zeros(8, dtype=torch.int32, device="meta")},
            "paged_kv_indices_buf device must be cpu",
        ),
        ({"paged_kv_indptr_buf": ints(0, 0)}, "length of paged_kv_indptr_buf must be 4"),
        ({"paged_kv_last_page_len_buf": ints(0)}, "length of paged_kv_last_page_len_buf must be 3"),
        ({"paged_kv_last_page_len_buf": strided(0, 0, 0)}, "must be contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_binding_that_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"flashinfer .*{text}"):
        BatchPrefillWithPagedKVCacheWrapper(**binding(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"qo_indptr": ints(0, 2, 2, 5).long()}, "qo_indptr dtype must be torch.int32"),
        ({"qo_indptr": ints(0, 2, 2, 5)[None]}, "dims of qo_indptr must be 1"),
        ({"paged_kv_indptr": strided(0, 3, 4, 6)}, "paged_kv_indptr must be contiguous"),
        ({"paged_kv_indices": torch.zeros(2)}, "paged_kv_indices dtype"),
        ({"qo_indptr": ints(0, 2, 5)}, r"length of qo_indptr \(fixed in graph mode\) must be 4"),
        ({"paged_kv_last_page_len": ints(1, 1)}, "length of paged_kv_last_page_len"),
        ({"qo_indptr": ints(1, 2, 2, 5)}, r"qo_indptr\[0\] must be 0"),
        ({"paged_kv_indptr": ints(1, 3, 4, 6)}, r"paged_kv_indptr\[0\] must be 0"),
        ({"qo_indptr": ints(0, 4, 2, 5)}, "qo_indptr must be monotone"),
        ({"paged_kv_indptr": ints(0, 5, 4, 6)}, "paged_kv_indptr must be monotone"),
        ({"paged_kv_indices": ints(*range(9))}, "length of paged_kv_indices must be at most 8"),
        (
            {"paged_kv_indptr": ints(0, 3, 4, 9), "paged_kv_indices": ints()},
            r"paged_kv_indptr\[-1\] must be at most 8 pages, got 9",
        ),
        ({"paged_kv_last_page_len": ints(0, 1, 2)}, r"paged_kv_last_page_len must be 1\.\.4"),
        ({"paged_kv_last_page_len": ints(5, 1, 2)}, r"paged_kv_last_page_len must be 1\.\.4"),
        (
            {"paged_kv_indptr": ints(0, 3, 3, 5)},
            r"paged_kv_last_page_len must be 0\.\.0 of 0 pages",
        ),
        (
            {"paged_kv_indptr": ints(0, 1, 2, 4), "paged_kv_last_page_len": ints(1, 1, 2)},
            "keys of a causal request must be at least 2, got 1",
        ),
        ({"max_token_per_sequence": 2}, "max_token_per_sequence must be at least 3"),
        ({"num_qo_heads": 3}, r"num_qo_heads must be n \* 2"),
        ({"head_dim_qk": 96}, "head_dim_qk must be"),
        ({"head_dim_vo": 128}, "head_dim_vo must be 64"),
        ({"page_size": 0}, "page_size must be at least 1"),
        ({"window_left": -2}, "window_left must be -1 or at least 0"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be 'NONE'"),
        ({"q_data_type": torch.float32}, "q_data_type must be a 16-bit float"),
        (
            {"kv_data_type": torch.float16},
            "kv_data_type must be .*torch.bfloat16, torch.float8_e4m3fn",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_plan_that_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"flashinfer .*{text}"):
        planned(**changes)


def test_graph_mode_fixes_the_rows_of_the_first_plan() -> None:
    wrapper = planned()
    with pytest.raises(
        KernelArgumentError, match=r"rows \(fixed by the first plan\) must be at most 5"
    ):
        wrapper.plan(**planning(qo_indptr=ints(0, 2, 3, 6)))


@pytest.mark.parametrize("name", ["float_workspace_buffer", "int_workspace_buffer"])
def test_a_workspace_too_small_for_the_plan_is_refused(name: str) -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(**binding())
    sizes = {"float_workspace_buffer": 1 << 20, "int_workspace_buffer": 1 << 12} | {name: 64}
    wrapper.reset_workspace_buffer(
        **{each: torch.empty(size, dtype=torch.uint8) for each, size in sizes.items()}
    )
    with pytest.raises(KernelArgumentError, match=f"bytes of {name} must be at least"):
        wrapper.plan(**planning())


def test_a_run_before_a_plan_is_refused() -> None:
    wrapper = BatchPrefillWithPagedKVCacheWrapper(**binding())
    with pytest.raises(KernelArgumentError, match="flashinfer run must be after plan"):
        wrapper.run(**inputs())


CACHE = torch.zeros(PAGES, PAGE, KV_HEADS, DIM, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.zeros(ROWS, HEADS, DIM)}, "q dtype must be torch.bfloat16"),
        ({"q": torch.zeros(6, HEADS, DIM).bfloat16()}, r"q shape must be \(5, 4, 64\)"),
        ({"q": torch.zeros(ROWS, 2, DIM).bfloat16()}, "q shape"),
        (
            {"q": torch.zeros(ROWS, HEADS, 2 * DIM).bfloat16()[..., ::2]},
            "last stride of q must be 1",
        ),
        ({"paged_kv_cache": (CACHE.float(), CACHE)}, "k_cache dtype"),
        ({"paged_kv_cache": (CACHE, CACHE.half())}, "v_cache dtype"),
        ({"paged_kv_cache": (CACHE[:, :2], CACHE)}, "k_cache shape must be .*'pages', 4, 2, 64"),
        ({"paged_kv_cache": (CACHE, CACHE.transpose(1, 2))}, "v_cache shape"),
        (
            {"paged_kv_cache": (CACHE, CACHE.repeat(1, 1, 2, 1)[:, :, :2])},
            "v_cache strides must be",
        ),
        ({"out": torch.zeros(ROWS, HEADS, 8).bfloat16()}, "out shape"),
        ({"out": torch.zeros(ROWS, HEADS, DIM)}, "out dtype"),
        ({"lse": torch.zeros(HEADS, ROWS)}, "lse shape must be"),
        ({"lse": torch.zeros(HEADS, ROWS).T}, "lse must be contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"flashinfer .*{text}"):
        planned().run(**inputs(**changes))


@pytest.mark.parametrize("page", [-1, PAGES])
def test_a_page_outside_the_cache_is_refused_when_it_runs(page: int) -> None:
    bound = binding()
    wrapper = planned(bound)
    bound["paged_kv_indices_buf"][1] = page
    with pytest.raises(KernelArgumentError, match="paged_kv_indices must be pages below 9"):
        wrapper.run(**inputs())


@pytest.mark.parametrize(
    "name", ["qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_last_page_len_buf"]
)
def test_planned_lengths_are_the_executed_ones(name: str) -> None:
    bound = binding()
    wrapper = planned(bound)
    bound[name][1] += 1
    with pytest.raises(KernelArgumentError, match="planned lengths must be the executed"):
        wrapper.run(**inputs())


def test_a_workspace_that_holds_no_plan_is_refused() -> None:
    wrapper = planned()
    wrapper.reset_workspace_buffer(
        torch.empty(1 << 20, dtype=torch.uint8), torch.zeros(1 << 12, dtype=torch.uint8)
    )
    with pytest.raises(KernelArgumentError, match="schedule must be a plan"):
        wrapper.run(**inputs())


def test_a_plan_inside_a_graph_is_refused() -> None:
    wrapper = planned()
    with pytest.raises(HostReadError, match="a recorded region must be device-only"):
        RecordedGraph(poison=False).capture(lambda: wrapper.plan(**planning()))
