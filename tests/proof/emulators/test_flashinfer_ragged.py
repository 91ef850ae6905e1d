"""The emulator of FlashInfer's ragged wrapper equals float64 by hand, and refuses broken rules."""

import math
from typing import Any

import pytest
import torch
from by_hand import Row, by_hand
from torch import Tensor

from paceline.core.errors import HostReadError, KernelArgumentError
from paceline.proof.emulators.flashinfer import BatchPrefillWithRaggedKVCacheWrapper
from paceline.runner.recording.recorded import RecordedGraph

HEADS, KV_HEADS, DIM = 4, 2, 64
SEEN = (  # of three requests: which key each query sees
    ((1, 0, 0), (1, 1, 0), (1, 0, 1)),
    (),
    ((0, 1, 0, 1, 1), (1, 1, 1, 0, 1)),
)
QUERIES, KEYS = (3, 0, 2), (3, 1, 5)
ROWS = sum(QUERIES)
BITS = (0b01011001, 0b1, 0b11111010, 0b10)  # SEEN by hand, the lowest bit first
STARTS = (0, 2, 2, 4)
TOLERANCE = 0.02  # of sums of values of size 1 in bfloat16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def binding(**changes: Any) -> dict[str, Any]:
    """A legal constructor call for three requests."""
    legal = {
        "float_workspace_buffer": torch.empty(1 << 20, dtype=torch.uint8),
        "use_cuda_graph": True,
        "qo_indptr_buf": ints(0, 0, 0, 0),
        "kv_indptr_buf": ints(0, 0, 0, 0),
        "custom_mask_buf": torch.tensor(BITS, dtype=torch.uint8),
        "mask_indptr_buf": ints(*STARTS),
        "backend": "fa2",
    }
    return legal | changes


def planning(**changes: Any) -> dict[str, Any]:
    """A legal plan: three requests, the second without queries."""
    legal = {
        "qo_indptr": ints(0, 3, 3, 5),
        "kv_indptr": ints(0, 3, 4, 9),
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim_qk": DIM,
        "sm_scale": 0.2,
        "q_data_type": torch.bfloat16,
    }
    return legal | changes


def inputs(**changes: Any) -> dict[str, Any]:
    """A legal run; k and v are halves of one projection."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    both = normal(sum(KEYS), KV_HEADS, 2 * DIM)
    legal = {
        "q": normal(ROWS, HEADS, DIM),
        "k": both[..., :DIM],
        "v": both[..., DIM:],
        "return_lse": True,
    }
    return legal | changes


def planned(bound: dict[str, Any] | None = None, **changes: Any) -> Any:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(**(bound or binding()))
    wrapper.plan(**planning(**changes))
    return wrapper


def expected(
    given: dict[str, Any], seen: tuple[Any, ...] = SEEN, soft_cap: float | None = None
) -> tuple[Tensor, Tensor]:
    """(out [rows, heads, dim], lse base 2 [rows, heads]) of a run."""
    rows: list[Row] = []
    pairs = zip(given["k"].split(KEYS), given["v"].split(KEYS), seen, strict=True)
    for k, v, masks in pairs:
        for mask in masks:
            visible = [key for key, sees in enumerate(mask) if sees]
            rows.append(Row(given["q"][len(rows)], k, v, visible))
    out, lse = by_hand(rows, scale=0.2, soft_cap=soft_cap)
    return out, lse / math.log(2)


def near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    (out, lse), (wanted_out, wanted_lse) = found, wanted
    is_near = bool(((out.double() - wanted_out).abs() < TOLERANCE).all())
    return is_near and bool(((lse.double() - wanted_lse).abs() < 1e-3).all())


@pytest.mark.parametrize("soft_cap", [None, 0.7])
def test_it_equals_float64_by_hand(soft_cap: float | None) -> None:
    found = planned(logits_soft_cap=soft_cap).run(**inputs())
    assert near(found, expected(inputs(), soft_cap=soft_cap))
    assert not near(found, expected(inputs(), soft_cap=0.3))


@pytest.mark.parametrize("query", range(3))
def test_by_hand_tells_masks_apart(query: int) -> None:
    rows = list(SEEN[0])
    rows[query] = (1, 1, 1) if rows[query] != (1, 1, 1) else (1, 0, 0)
    assert not near(planned().run(**inputs()), expected(inputs(), (tuple(rows), *SEEN[1:])))


def test_a_plan_leaves_the_mask_to_the_caller() -> None:
    bound = binding()
    planned(bound)
    assert bound["custom_mask_buf"].tolist() == list(BITS)
    assert bound["mask_indptr_buf"].tolist() == list(STARTS)


@pytest.mark.parametrize("name", ["custom_mask", "packed_custom_mask"])
def test_a_mask_is_not_planned(name: str) -> None:
    with pytest.raises(TypeError, match=name):
        planned(**{name: torch.tensor(BITS)})


def test_outputs_are_written_where_the_caller_says() -> None:
    out, lse = torch.zeros(ROWS, HEADS, DIM).bfloat16(), torch.zeros(ROWS, HEADS)
    found = planned().run(**inputs(out=out, lse=lse))
    assert found[0] is out
    assert found[1] is lse
    assert isinstance(planned().run(**inputs(return_lse=False)), Tensor)


def test_a_replay_reads_the_bits_of_the_moment() -> None:
    bound, given = binding(), inputs()
    wrapper = planned(bound)
    out, lse = torch.zeros(ROWS, HEADS, DIM).bfloat16(), torch.zeros(ROWS, HEADS)
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: wrapper.run(**given | {"out": out, "lse": lse}) and None)
    bound["custom_mask_buf"][0] = 0b11111111
    graph.replay()
    seen = (((1, 1, 1), (1, 1, 1), (1, 1, 1)), *SEEN[1:])
    assert near((out, lse), expected(given, seen))
    assert not near((out, lse), expected(given))


# --- rules ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"kv_layout": "HND"}, "kv_layout must be 'NHD'"),
        ({"use_cuda_graph": False}, "use_cuda_graph must be True"),
        ({"backend": "auto"}, "backend must be 'fa2'"),
        ({"float_workspace_buffer": torch.empty(64)}, "float_workspace_buffer dtype"),
        ({"qo_indptr_buf": None}, "qo_indptr_buf must be a tensor in CUDA graph mode"),
        ({"kv_indptr_buf": None}, "kv_indptr_buf must be a tensor"),
        ({"custom_mask_buf": None}, "custom_mask_buf must be a tensor"),
        ({"mask_indptr_buf": None}, "mask_indptr_buf must be a tensor"),
        ({"custom_mask_buf": ints(*BITS)}, "custom_mask_buf dtype must be torch.uint8"),
        ({"mask_indptr_buf": ints(*STARTS).long()}, "mask_indptr_buf dtype must be torch.int32"),
        (
            {"custom_mask_buf": torch.zeros(4, dtype=torch.uint8, device="meta")},
            "custom_mask_buf device must be cpu",
        ),
        ({"kv_indptr_buf": ints(0, 0)}, "length of kv_indptr_buf must be 4"),
        ({"mask_indptr_buf": ints(0, 0, 0)}, "length of mask_indptr_buf must be 4"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_binding_that_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"flashinfer .*{text}"):
        BatchPrefillWithRaggedKVCacheWrapper(**binding(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"causal": True}, "causal under a mask must be False"),
        ({"window_left": 3}, "window_left must be -1"),
        ({"pos_encoding_mode": "ROPE_LLAMA"}, "pos_encoding_mode must be 'NONE'"),
        ({"q_data_type": torch.float32}, "q_data_type must be a 16-bit float"),
        ({"kv_data_type": torch.float8_e4m3fn}, "kv_data_type must be torch.bfloat16"),
        ({"num_qo_heads": 3}, r"num_qo_heads must be n \* 2"),
        ({"head_dim_qk": 96}, "head_dim_qk must be"),
        ({"head_dim_vo": 128}, "head_dim_vo must be 64"),
        ({"qo_indptr": ints(0, 3, 3, 5).long()}, "qo_indptr dtype must be torch.int32"),
        ({"qo_indptr": ints(0, 3, 5)}, r"length of qo_indptr \(fixed in graph mode\) must be 4"),
        ({"kv_indptr": ints(0, 3, 4)}, r"length of kv_indptr \(fixed in graph mode\) must be 4"),
        ({"qo_indptr": ints(1, 3, 3, 5)}, r"qo_indptr\[0\] must be 0"),
        ({"kv_indptr": ints(0, 5, 4, 9)}, "kv_indptr must be monotone"),
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
        wrapper.plan(**planning(qo_indptr=ints(0, 3, 3, 6)))


@pytest.mark.parametrize("name", ["float_workspace_buffer", "int_workspace_buffer"])
def test_a_workspace_too_small_for_the_plan_is_refused(name: str) -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(**binding())
    sizes = {"float_workspace_buffer": 1 << 20, "int_workspace_buffer": 1 << 12} | {name: 64}
    wrapper.reset_workspace_buffer(
        **{each: torch.empty(size, dtype=torch.uint8) for each, size in sizes.items()}
    )
    with pytest.raises(KernelArgumentError, match=f"bytes of {name} must be at least"):
        wrapper.plan(**planning())


def test_a_run_before_a_plan_is_refused() -> None:
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(**binding())
    with pytest.raises(KernelArgumentError, match="flashinfer run must be after plan"):
        wrapper.run(**inputs())


ROWS_OF_KEYS = torch.zeros(sum(KEYS), KV_HEADS, DIM, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"q": torch.zeros(ROWS, HEADS, DIM)}, "q dtype must be torch.bfloat16"),
        ({"q": torch.zeros(6, HEADS, DIM).bfloat16()}, r"q shape must be \(5, 4, 64\)"),
        ({"k": ROWS_OF_KEYS.float()}, "k dtype must be torch.bfloat16"),
        ({"k": ROWS_OF_KEYS[:, :1]}, "k shape must be .*'keys', 2, 64"),
        ({"v": ROWS_OF_KEYS[:4]}, "v shape must be"),
        ({"v": ROWS_OF_KEYS.half()}, "v dtype must be torch.bfloat16"),
        (
            {"k": ROWS_OF_KEYS.repeat(1, 1, 2)[..., ::2]},
            "last stride of k must be 1",
        ),
        (
            {"k": torch.zeros(9, KV_HEADS, DIM + 1).bfloat16()[..., :DIM]},
            "address and strides of k must be multiples of 16 bytes",
        ),
        (
            {"k": torch.zeros(9, KV_HEADS, 2 * DIM).bfloat16()[..., 1 : DIM + 1]},
            "address and strides of k must be multiples of 16 bytes",
        ),
        ({"k": ROWS_OF_KEYS[:8], "v": ROWS_OF_KEYS[:8]}, r"kv_indptr\[-1\] must be at most 8 keys"),
        ({"out": torch.zeros(ROWS, HEADS, 8).bfloat16()}, "out shape"),
        ({"lse": torch.zeros(HEADS, ROWS).T}, "lse must be contiguous"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_run_that_breaks_a_rule_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=f"flashinfer .*{text}"):
        planned().run(**inputs(**changes))


def test_offsets_in_bits_are_refused_when_they_leave_the_mask() -> None:
    wrapper = planned(binding(mask_indptr_buf=ints(0, 9, 9, 19)))
    with pytest.raises(KernelArgumentError, match="mask_indptr must be bytes below 4"):
        wrapper.run(**inputs())


@pytest.mark.parametrize("name", ["qo_indptr_buf", "kv_indptr_buf"])
def test_planned_lengths_are_the_executed_ones(name: str) -> None:
    bound = binding()
    wrapper = planned(bound)
    bound[name][1] += 1
    with pytest.raises(KernelArgumentError, match="planned lengths must be the executed"):
        wrapper.run(**inputs())


def test_a_plan_inside_a_graph_is_refused() -> None:
    wrapper = planned()
    with pytest.raises(HostReadError, match="a recorded region must be device-only"):
        RecordedGraph(poison=False).capture(lambda: wrapper.plan(**planning()))
