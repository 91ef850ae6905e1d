"""The emulator of FlashAttention equals float64 by hand, and refuses what breaks a rule."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from by_hand import Row, by_hand, gathered
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.proof.emulators.flash_attn import (
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)
from paceline.runner.recording.recorded import RecordedGraph

HEADS, KV_HEADS, DIM, PAGE, PAGES = 4, 2, 8, 4, 9
EXTENDS, KEYS = (2, 0, 3), (9, 1, 6)
TOLERANCE = 0.02  # of sums of values of size 1 in bfloat16


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def call(**changes: Any) -> dict[str, Any]:
    """A legal call of FlashAttention 4: three requests, the second without queries."""
    random = torch.Generator().manual_seed(1)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(torch.bfloat16)

    legal = {
        "q": normal(sum(EXTENDS), HEADS, DIM),
        "k": normal(PAGES, PAGE, KV_HEADS, DIM),
        "v": normal(PAGES, PAGE, KV_HEADS, DIM),
        "cu_seqlens_q": ints(0, 2, 2, 5),
        "max_seqlen_q": 3,
        "seqused_k": ints(*KEYS),
        "page_table": torch.tensor([[7, 2, 5], [0, 0, 0], [8, 3, 0]], dtype=torch.int32),
        "softmax_scale": 0.5,
        "causal": True,
    }
    return legal | changes


def expected(given: dict[str, Any], sees: Callable[[int, int], bool]) -> tuple[Tensor, Tensor]:
    """(out [tokens, heads, dim], lse [heads, tokens]) of a call.

    sees(own, key): whether the query at position `own` sees the key at position `key`.
    """
    rows: list[Row] = []
    for pages, extend, keys in zip(given["page_table"].tolist(), EXTENDS, KEYS, strict=True):
        k, v = (gathered(given[name], pages, keys) for name in "kv")
        for own in range(keys - extend, keys):
            seen = [key for key in range(keys) if sees(own, key)]
            rows.append(Row(given["q"][len(rows)], k, v, seen))
    cap, sinks = given.get("softcap"), given.get("learnable_sink")
    out, lse = by_hand(rows, scale=0.5, soft_cap=cap, sinks=sinks)
    return out, lse.T


@pytest.mark.parametrize(
    ("changes", "sees"),
    [
        ({}, lambda own, key: key <= own),
        ({"causal": False}, lambda own, key: True),
        ({"window_size": (3, 0)}, lambda own, key: own - 3 <= key <= own),
        ({"window_size": (0, 0)}, lambda own, key: key == own),
        ({"causal": False, "window_size": (2, 1)}, lambda own, key: own - 2 <= key <= own + 1),
        ({"softcap": 0.5}, lambda own, key: key <= own),
        (
            {"learnable_sink": torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.bfloat16)},
            lambda own, key: key <= own,
        ),
    ],
    ids=["causal", "open", "window", "itself", "both sides", "capped", "sinks"],
)
def test_the_answer_is_that_of_the_sum_by_hand(
    changes: dict[str, Any], sees: Callable[[int, int], bool]
) -> None:
    given = call(**changes)
    out, lse = flash_attn_varlen_func(**given, return_lse=True)
    wanted, wanted_lse = expected(given, sees)
    assert lse is not None
    assert (out.double() - wanted).abs().max() < TOLERANCE
    assert (lse.double() - wanted_lse).abs().max() < 1e-5


def as_version_3(given: dict[str, Any]) -> dict[str, Any]:
    names = {"k": "k_cache", "v": "v_cache", "seqused_k": "cache_seqlens"}
    return {names.get(name, name): value for name, value in given.items()}


def test_version_3_gives_the_same_with_its_own_words() -> None:
    given = call(window_size=(3, 0))
    out, lse = flash_attn_varlen_func(**given, return_lse=True)
    alone = flash_attn_with_kvcache(**as_version_3(given))
    both = flash_attn_with_kvcache(**as_version_3(given), return_softmax_lse=True)
    assert isinstance(alone, Tensor)
    assert torch.equal(alone, out)
    assert torch.equal(both[0], out)
    assert torch.equal(both[1], lse)
    open_window = flash_attn_with_kvcache(**as_version_3(call(window_size=(-1, -1))))
    assert torch.equal(open_window, flash_attn_varlen_func(**call())[0])


def test_a_dead_slot_of_v_reaches_the_output_and_one_of_k_does_not() -> None:
    """The kernel multiplies what it masks by 0: a NaN in V stays one."""
    given = call()
    given["k"][5, 1:] = float("nan")
    assert flash_attn_varlen_func(**given)[0].isfinite().all()
    given["v"][5, 1:] = float("nan")
    assert flash_attn_varlen_func(**given)[0][:2].isnan().all()


def test_weights_are_rounded_to_the_dtype_of_v() -> None:
    """Two keys of opposite values; the second weighs 0.9988, which is 1 in bfloat16."""
    given = call(q=torch.zeros(1, 1, DIM), k=torch.zeros(1, 2, 1, DIM), v=torch.ones(1, 2, 1, DIM))
    given["q"][..., 0] = 1.0
    given["k"][0, 1, 0, 0] = -1.0
    given["v"][0, 1] = -1.0
    given |= {name: given[name].to(torch.bfloat16) for name in "qkv"}
    given |= {"cu_seqlens_q": ints(0, 1), "seqused_k": ints(2), "page_table": ints(0).view(1, 1)}
    out, _ = flash_attn_varlen_func(**given | {"max_seqlen_q": 1, "softmax_scale": 0.0012})
    assert not out.any()


def test_a_recorded_graph_replays_it_with_the_lengths_of_that_moment() -> None:
    given = call(causal=False)
    held: list[Tensor] = []
    graph = RecordedGraph(poison=True)
    graph.capture(lambda: held.append(flash_attn_varlen_func(**given)[0]))
    given["seqused_k"].copy_(torch.tensor([4, 1, 2]))
    graph.replay()
    assert torch.equal(held[0], flash_attn_varlen_func(**given)[0])
    given["page_table"][0, 0] = PAGES
    with pytest.raises(KernelArgumentError, match="page ids below 9"):
        graph.replay()


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"page_table": call()["page_table"].long()}, "page_table dtype must be torch.int32"),
        ({"page_table": call()["page_table"].t().contiguous().t()}, "last stride of page_table"),
        ({"page_table": call()["page_table"][:2]}, r"page_table shape must be \(3, pages\)"),
        ({"page_table": call()["page_table"][:, :2]}, "page_table width must be at least 3 pages"),
        ({"page_table": call()["page_table"] + 1}, "page_table must be page ids below 9, got"),
        ({"page_table": call()["page_table"] - 8}, "page_table must be page ids below 9, got"),
        ({"seqused_k": ints(9, 1, 6).long()}, "seqused_k dtype must be torch.int32"),
        ({"seqused_k": ints(9, 1)}, r"seqused_k shape must be \(3,\), got \(2,\)"),
        ({"seqused_k": ints(9, 9, 1, 1, 6, 6)[::2]}, "last stride of seqused_k must be 1, got 2"),
        ({"seqused_k": ints(0, 1, 6)}, "seqused_k must be at least 1 for a request with queries"),
        ({"cu_seqlens_q": ints(0, 2, 2, 5).long()}, "cu_seqlens_q dtype must be torch.int32"),
        ({"cu_seqlens_q": ints(1, 2, 2, 5)}, r"cu_seqlens_q\[0\] must be 0, got 1"),
        ({"cu_seqlens_q": ints(0, 3, 2, 5)}, "cu_seqlens_q must be monotone"),
        ({"cu_seqlens_q": ints(0, 2, 2, 4)}, r"cu_seqlens_q\[-1\] must be the 5 rows of q, got 4"),
        ({"max_seqlen_q": 2}, "max_seqlen_q must be at least 3, got 2"),
        ({"q": call()["q"].float()}, "q must be bfloat16 or float16, got torch.float32"),
        ({"k": call()["k"].half()}, "k and v dtype must be torch.bfloat16"),
        ({"q": call()["q"][0]}, "q, k and v must be 3, 4 and 4 dims"),
        ({"v": call()["v"][:8]}, "places and heads of v"),
        ({"q": call()["q"][..., :4]}, "head dim of k must be 4, got 8"),
        ({"v": call()["v"][..., :4]}, "V head dim must be a multiple of 8 from 8 to 256, got 4"),
        ({"q": call()["q"][:, :3]}, "heads must be a multiple of 2 KV heads, got 3"),
        ({"q": call()["q"].transpose(1, 2).contiguous().transpose(1, 2)}, "last stride of q"),
        ({"window_size": (-1, 0)}, "window_size must be None or at least 0"),
        ({"num_splits": 2}, "num_splits must be 1 on CUDA arch 9, got 2"),
        ({"learnable_sink": torch.zeros(HEADS)}, "learnable_sink must be"),
    ],
)
def test_a_broken_rule_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        flash_attn_varlen_func(**call(**changes))


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"window_size": (-2, 0)}, "window_size must be -1 or at least 0"),
        ({"num_splits": -1}, "num_splits must be at least 0, got -1"),
        ({"page_table": call()["page_table"].long()}, "page_table dtype must be torch.int32"),
    ],
)
def test_version_3_refuses_by_name_too(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(KernelArgumentError, match=text):
        flash_attn_with_kvcache(**as_version_3(call(**changes)))


def test_a_keyword_the_library_has_not_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="cache_seqlens"):
        flash_attn_varlen_func(**call(cache_seqlens=ints(9, 1, 6)))
