"""A STATE group in the KV budget: slots by requests, not by tokens."""

from paceline.core.model_config import CacheGroupSpec, CacheKind, RowPart, kv_parts
from paceline.plan.capacity import kv_tokens, split_kv
from paceline.plan.footprint import request_bytes, request_pages, standing_pages

FULL = CacheGroupSpec(
    name="full", layer_ids=(0,), window=None, page_size=16, parts=kv_parts(2, 8, 8)
)
STATE = CacheGroupSpec(
    name="state",
    layer_ids=(1, 2),
    window=None,
    page_size=16,
    parts=(RowPart("state", (64, 64), dtype="float32"),),
    kind=CacheKind.STATE,
    state_every=64,
)


def test_a_request_of_any_length_holds_its_own_slot_and_one_more():
    assert [request_pages(STATE, length) for length in (2, 64, 100_000)] == [2, 2, 2]
    assert standing_pages(STATE, 512) == 1
    slot = 2 * 64 * 64 * 4 + 4
    assert request_bytes([FULL, STATE], 160, 2) == 10 * 16 * 2 * 16 * 2 + 2 * slot


def test_pools_fill_up_together():
    budget = 64 << 20
    groups = split_kv([FULL, STATE], budget, 2, step_tokens=64, max_len=1024)
    full, state = groups
    assert sum(group.bytes for group in groups) <= budget
    assert (full.num_pages - 1) // 64 == (state.num_pages - 1) // 2  # requests of 1024 tokens
    assert kv_tokens([FULL, STATE], groups) == full.tokens
