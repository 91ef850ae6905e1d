"""STATE groups in the plan: slots by requests, not by tokens, and where states are kept."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from draft_models import TARGET, folder
from example_state_backend import SumBackend
from sum_model import MODEL_TYPE, register

from paceline.attention.contract import GraphSupport
from paceline.attention.mixers import REGISTRIES
from paceline.core.dtypes import FP8, KV_ELEMENT_BYTES
from paceline.core.errors import BackendUnsupported, ConfigError
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import (
    CacheKind,
    Heads,
    LayerSpec,
    RowPart,
    kv_parts,
)
from paceline.core.options.engine_options import EngineOptions
from paceline.models.config import parse_config
from paceline.plan.explain import Explanation, explain_model, show
from paceline.plan.memory.capacity import kv_tokens, split_kv
from paceline.plan.memory.footprint import request_bytes, request_pages, standing_pages
from paceline.plan.speculation import target_groups

SCHEMA = Path(__file__).parents[2] / "docs" / "schemas" / "explain.json"
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
    assert kv_tokens(groups) == full.tokens
    assert (full.slots, state.slots, state.tokens) == (None, state.num_pages - 1, None)


def test_rows_of_encoders_are_budgeted_for_as_many_requests():
    encoder = replace(FULL, name="encoder", kind=CacheKind.ENCODER, encoder_len=100)
    assert [request_pages(encoder, length) for length in (2, 64, 100_000)] == [7, 7, 7]
    full, rows = split_kv([FULL, encoder], 64 << 20, 2, step_tokens=64, max_len=1024)
    assert (full.num_pages - 1) // 64 == (rows.num_pages - 1) // 7
    assert kv_tokens([full, rows]) == full.tokens
    assert (rows.tokens, rows.slots) == (None, None)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch)


def model_folder(path: Path, num_layers: int) -> str:
    return folder(path, TARGET | {"model_type": MODEL_TYPE, "num_hidden_layers": num_layers})


def explained(path: Path, num_layers: int, **asked: object) -> Explanation:
    """Of a model with so many layers that attend, beside two of sums."""
    asked |= {"model": model_folder(path, num_layers), "device": "cpu", "load_format": "dummy"}
    return explain_model(asked, gpu=None)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({}, (16, 512)),
        ({"page_size": 96}, (96, 576)),
        ({"page_size": 4, "state_checkpoint_every": 20}, (4, 20)),
    ],
)
def test_states_are_kept_at_whole_pages(tmp_path, asked, found):
    plan = explained(tmp_path, 2, **asked)
    options = plan.resolution.options
    assert (options.page_size, options.state_checkpoint_every) == found
    *_, states = plan.fit.groups
    assert (states.page_size, states.state_every) == found


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize("every", [None, 24])
def test_where_no_layer_keeps_rows_a_page_is_the_way_to_the_next_state(tmp_path, every):
    asked = {} if every is None else {"state_checkpoint_every": every}
    plan = explained(tmp_path, 0, **asked)
    assert plan.resolution.options.page_size == (every or 512)
    assert [group.state_every for group in plan.fit.groups] == [every or 512]


@pytest.mark.usefixtures("registered")
def test_a_drafter_may_keep_rows_where_its_target_keeps_none(tmp_path):
    drafter = folder(tmp_path / "drafter", TARGET)
    asked = {"speculative_algorithm": "STANDALONE", "speculative_draft_model_path": drafter}
    plan = explained(tmp_path / "target", 0, **asked)
    assert [group.page_size for group in plan.fit.groups] == [16, 16]
    assert [choice.backend for choice in plan.phases] == ["torch", "torch"]
    assert "a round that passes a length at which states are kept" in show(plan)


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("num_layers", "asked", "text"),
    [
        (
            2,
            {"state_checkpoint_every": 24},
            "state_checkpoint_every must be a multiple of the page size, 16 tokens, got 24; set "
            "--state-checkpoint-every to 32, or change --page-size: states are found again at the "
            "ends of pages",
        ),
        (
            2,
            {"state_checkpoint_every": 32, "enable_prefix_cache": False},
            "state_checkpoint_every must be left out with --no-enable-prefix-caching: no states "
            "are kept for others, got 32; remove --state-checkpoint-every",
        ),
        (
            0,
            {"page_size": 16},
            "page_size must be left out with a model whose layers keep states alone, got 16; say "
            "where its states are kept, with --state-checkpoint-every",
        ),
        (
            0,
            {"kv_cache_dtype": "fp8"},
            "kv_cache_dtype must be left out with a model whose layers keep states alone, in "
            "formats they name, got fp8_e4m3; remove --kv-cache-dtype; fewer states take less: "
            "--max-num-seqs",
        ),
    ],
)
def test_sizes_that_say_nothing_are_refused(tmp_path, num_layers, asked, text):
    with pytest.raises(ConfigError) as caught:
        explained(tmp_path, num_layers, **asked)
    assert str(caught.value) == text


class NoGraphs(SumBackend):
    name = "no-graphs"
    capabilities = replace(SumBackend.capabilities, graph=GraphSupport.NEVER)


class NoRounds(SumBackend):
    name = "no-rounds"
    capabilities = replace(SumBackend.capabilities, graph=GraphSupport.DECODE)


NGRAM = {"speculative_algorithm": "NGRAM"}


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("backend", "asked", "reasons"),
    [
        (NoGraphs, {}, ["graphs of decode steps, of never: --enforce-eager runs without"]),
        (NoGraphs, {"enforce_eager": True}, []),
        (NoRounds, {}, []),
        (NoRounds, NGRAM, ["graphs of uniform steps, of decode: --enforce-eager runs without"]),
        (NoRounds, NGRAM | {"enforce_eager": True}, []),
        (SumBackend, {"prompt_blocks": True}, ["mask block, of causal, tree"]),
    ],
)
def test_who_runs_layers_of_states_can_do_every_step(tmp_path, backend, asked, reasons):
    asked = asked | {"linear_attention_backend": f"{backend.__module__}:{backend.__name__}"}
    if not reasons:
        assert explained(tmp_path, 2, **asked).mixers["sum"].why == "asked for"
        return
    with pytest.raises(BackendUnsupported) as caught:
        explained(tmp_path, 2, **asked)
    assert caught.value.reasons == reasons


@pytest.mark.usefixtures("registered")
def test_auto_takes_who_runs_as_graphs(tmp_path, monkeypatch):
    targets = {name: f"{__name__}:{name}" for name in ("NoGraphs", "NoRounds")}
    monkeypatch.setitem(REGISTRIES, "sum", targets)
    assert explained(tmp_path, 2).mixers["sum"].name == "NoRounds"
    assert explained(tmp_path, 2, enforce_eager=True).mixers["sum"].name == "NoGraphs"


def test_states_are_no_smaller_in_an_8_bit_cache():
    sums = LayerSpec(mixer="sum", state=(RowPart("sum", (3,), dtype="float32"), RowPart("x", (5,))))
    layers = (LayerSpec(heads=Heads(4, 2, 16, 16)), sums)
    config = replace(parse_config(TARGET), layers=layers)
    sizes = [
        [group.page_bytes(KV_ELEMENT_BYTES[kv]) for group in target_groups(config, options)]
        for kv in ("bfloat16", FP8)
        for options in [EngineOptions(dtype="bfloat16", kv_cache_dtype=kv, page_size=16)]
    ]
    assert sizes == [[16 * 2 * 2 * 16 * 2, 3 * 4 + 5 * 2 + 4], [16 * 2 * 2 * 16, 3 * 4 + 5 * 2 + 4]]


@pytest.mark.usefixtures("registered")
def test_the_plan_says_how_many_states_there_are_and_for_whom(tmp_path):
    plan = explained(tmp_path, 2, max_num_seqs=8, state_checkpoint_every=64)
    states = plan.fit.groups[1]
    assert states.page_bytes == 2 * 3 * 4 + 4
    assert states.slots == states.num_pages - 1 >= 16
    told = show(plan)
    assert "4 layers, 4/2 heads of 16 and 2 of sum, weights" in told
    assert (
        f"{states.slots} states of sum, 0.0 MiB each: one for each running request; the prefix "
        "cache, unless it is off, has the others, of lengths divisible by 64" in told
    )
    document = json.loads(json.dumps(plan.to_json()))
    assert [(g["tokens"] is None, g["slots"] is None) for g in document["fit"]["groups"]] == [
        (False, True),
        (True, False),
    ]
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    alone = show(explained(tmp_path, 0))
    assert "KV holds" not in alone
    assert "prefill none (no layer attends over a cache)" in alone
    assert "a round that passes" not in alone


def test_a_shape_of_linear_attention_is_planned_with_who_runs_its_layers():
    asked = {"model": "qwen3-next-16-layers", "max_model_len": 2048, "max_num_seqs": 8}
    asked |= {"max_num_batched_tokens": 512, "state_checkpoint_every": 1024}
    plan = explain_model(asked, gpu="h200")
    plan.require()
    full, states = plan.fit.groups
    assert (full.name, states.name) == ("full", "gdn")
    of_layer = 4 * 32 * 128 * 128 + 2 * 8192 * 3  # the state in float32, the window in bfloat16
    assert states.bytes // states.num_pages == 12 * of_layer + 4
    document = json.loads(json.dumps(plan.to_json()))
    jsonschema.validate(document, json.loads(SCHEMA.read_text()))
    (found,) = document["linear_attention"]
    assert (found["mixer"], found["backend"]) == ("gdn", "triton")
    assert (
        "linear attention\n  gdn     triton (first of triton, torch that can run on cuda)"
        in show(plan)
    )
