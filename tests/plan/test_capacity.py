"""How KV is split between the pools of windowed and full layers, and what the plan says of it."""

import json

from draft_models import demands_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.core.gpus import gpu_by_name
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts
from paceline.models.config import parse_config
from paceline.models.locate import SHAPES_FOLDER
from paceline.plan.explain import explain_model
from paceline.plan.memory.budget_table import table
from paceline.plan.memory.capacity import concurrency, planned_len, split_kv
from paceline.plan.memory.footprint import (
    request_bytes,
    request_pages,
    standing_bytes,
    standing_pages,
)
from paceline.plan.resolve import resolve

GEMMA_27B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "sliding_window": 1024,
    "max_position_embeddings": 131072,
    "vocab_size": 262208,
}
FULL_LAYERS, WINDOWED_LAYERS = 10, 52
LAYER_TOKEN = 2 * 16 * 128 * 2  # bytes of K and V


def gemma_27b(**asked):
    config = json.loads((SHAPES_FOLDER / "gemma-3-1b.json").read_text()) | GEMMA_27B
    return resolve(asked, demands_of(parse_config(config), gpu_by_name("h200")))


def groups_of(spread):
    """[num_groups] specs of pages of 16 tokens, from (layers, window) of each."""
    return tuple(
        CacheGroupSpec(
            name=f"group-{index}",
            layer_ids=tuple(range(layers)),
            page_size=16,
            parts=kv_parts(1, 64, 64),
            window=window,
        )
        for index, (layers, window) in enumerate(spread)
    )


def test_the_plan_of_a_large_windowed_model_names_the_pool_that_is_full_first():
    _, fit = gemma_27b()
    rows = {row.context_len: row for row in fit.concurrency}
    standing = 2 * 8192 * WINDOWED_LAYERS * LAYER_TOKEN
    held = fit.kv_bytes - standing
    assert rows[1024].by_bytes == held // (1024 * 62 * LAYER_TOKEN)
    token = FULL_LAYERS * 65536 + WINDOWED_LAYERS * (1024 + 16)
    assert rows[65536].by_bytes == held // (token * LAYER_TOKEN)
    assert (rows[1024].full_first, rows[65536].full_first) == ("window-1024", "full")
    assert rows[1024].requests < 134
    assert rows[65536].requests < 12
    text = table(fit)
    assert "are balanced for requests of 8192 tokens; with others one is full first" in text
    assert (
        f"{rows[1024].requests} requests of 1024 tokens (window-1024 is full first; the bytes of "
        "all pools hold 134)" in text
    )


def test_a_context_limit_moves_the_balance_to_its_requests():
    _, fit = gemma_27b(max_model_len=1024)
    (row,) = fit.concurrency
    assert row.full_first is None
    assert row.requests == row.by_bytes > 100
    assert "full first; the bytes" not in table(fit)


def test_one_pool_needs_no_words_about_its_split():
    document = explain_model({"model": "llama-3.1-8b"}, gpu="h200").to_json()["fit"]
    assert len(document["groups"]) == 1
    for row in document["concurrency"]:
        assert row["full_first"] is None
        assert row["requests"] == min(row["by_bytes"], 256)


def test_pools_that_grow_alike_need_no_words_either():
    fit = explain_model({"model": "bundled", "device": "cpu"}, gpu=None).fit
    assert [group.name for group in fit.groups] == ["full", "draft-full"]
    assert "are balanced for" not in table(fit)


spreads = st.lists(
    st.tuples(st.integers(1, 60), st.sampled_from([None, 16, 100, 1024])), min_size=1, max_size=4
)


@given(
    spread=spreads,
    max_len=st.integers(1, 200_000),
    step_tokens=st.integers(1, 8192),
    more=st.integers(0, 1 << 36),
)
def test_pools_fill_up_together_and_each_holds_one_longest_request(
    spread, max_len, step_tokens, more
):
    specs = groups_of(spread)
    least = standing_bytes(specs, 2, step_tokens) + request_bytes(specs, max_len, 2)
    groups = split_kv(specs, least + more, 2, step_tokens=step_tokens, max_len=max_len)
    taken = sum(group.bytes for group in groups)
    assert 0 <= least + more - taken < sum(group.page_bytes for group in groups)
    held, is_bound = [], []
    for spec, group in zip(specs, groups, strict=True):
        pages = group.num_pages - standing_pages(spec, step_tokens)
        longest = request_pages(spec, max_len)
        assert pages >= longest
        held.append(pages / request_pages(spec, planned_len(max_len)))
        is_bound.append(pages == longest)
    free = [count for count, bound in zip(held, is_bound, strict=True) if not bound]
    assert max(free, default=0) - min(free, default=0) <= 1
    assert all(count >= max(free, default=0) - 1 for count in held)


@given(spread=spreads, max_len=st.integers(256, 200_000), more=st.integers(0, 1 << 36))
def test_what_the_bytes_hold_is_never_less_than_what_runs(spread, max_len, more):
    specs = groups_of(spread)
    least = standing_bytes(specs, 2, 512) + request_bytes(specs, max_len, 2)
    groups = split_kv(specs, least + more, 2, step_tokens=512, max_len=max_len)
    rows = concurrency(specs, groups, max_len, reach=0, step_tokens=512, max_num_seqs=1 << 40)
    for row in rows:
        assert 1 <= row.requests <= row.by_bytes
        assert (row.full_first is None) == (row.requests == row.by_bytes)
