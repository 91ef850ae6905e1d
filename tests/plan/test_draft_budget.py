"""The memory budget and the size of a step with a drafter."""

from dataclasses import replace

import pytest
from draft_models import (
    CPU,
    H200,
    HEAD,
    TARGET,
    demands_of,
    drafted,
    folder,
    named,
    planned,
    shallow,
)
from test_measured import Allocations

from paceline.core.errors import ConfigError
from paceline.core.gpus import GIB, gpu_by_name
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.plan.explain import explain_model, nearest_if_short, show
from paceline.plan.memory.budget_table import budget_lines, compare, table
from paceline.plan.memory.footprint import request_pages, standing_pages
from paceline.plan.resolve import resolve
from paceline.plan.speculation import all_groups
from paceline.runner.recording.graphs import AHEAD

EAGLE3 = {"path": "eagle3-llama-3.1-8b", "load_format": "dummy"}


@pytest.fixture
def drafters(tmp_path):
    """Options that name what may draft for a small target, by algorithm."""
    model, head = TARGET | {"vocab_size": 400}, HEAD | {"vocab_size": 400, "draft_vocab_size": 200}
    return {
        "target": folder(tmp_path / "target", model),
        "EAGLE3": {"path": folder(tmp_path / "head", head)},
        "STANDALONE": {"path": folder(tmp_path / "draft", model | {"num_hidden_layers": 2})},
    }


def plan(device=H200, **asked):
    return planned("llama-3.1-8b", device, **EAGLE3 | asked)


def test_a_head_weighs_what_its_tensors_do():
    hidden, inner, vocab = 4096, 14336, 32000
    fc, head = 3 * hidden * hidden, vocab * hidden
    attention = 2 * hidden * (4096 + 2 * 1024) + hidden * hidden
    norms = 4 * hidden  # of the token, of the feature, before the block, before the head
    elements = fc + head + attention + 3 * hidden * inner + norms
    assert plan()[1].draft_weights_bytes == 2 * elements + 8 * vocab


def test_a_drafter_has_pages_for_as_many_tokens_as_its_target():
    _, fit = plan()
    target, draft = fit.groups
    assert (target.name, draft.name) == ("full", "draft-full")
    assert target.page_bytes == 16 * 131072
    assert draft.page_bytes == 16 * 4096
    assert abs(target.num_pages - draft.num_pages) <= 1


@pytest.mark.parametrize("asked", [{}, {"topk": 4}])
@pytest.mark.parametrize("device", [H200, CPU], ids=["gpu", "cpu"])
def test_the_lines_add_up_to_what_is_usable(device, asked):
    _, fit = planned("bundled", device, algorithm="NGRAM", **asked)
    assert sum(size for _, size in budget_lines(fit)) == fit.usable_bytes
    _, fit = plan(**asked)
    assert sum(size for _, size in budget_lines(fit)) == fit.usable_bytes
    assert "draft weights" in table(fit)
    assert "draft weights" in compare(fit, {"draft weights": 1})


def test_a_plan_without_a_drafter_shows_none():
    _, fit = planned("llama-3.1-8b", H200, algorithm="off")
    assert fit.draft_weights_bytes == 0
    assert "draft" not in table(fit)


@pytest.mark.parametrize(("asked", "rows"), [({}, 64), ({"topk": 4}, 32), ({"steps": 15}, 16)])
def test_requests_are_fewer_by_as_many_rows_as_each_brings(asked, rows):
    resolution, _ = plan(**asked)
    assert resolution.options.max_num_seqs == rows
    assert "tokens of each, in all the rows usual on cuda" in resolution.origins["max_num_seqs"]


def test_a_step_grows_to_hold_a_round_of_the_requests_that_were_asked_for():
    resolution, _ = plan(max_num_seqs=3000, max_model_len=64)
    assert resolution.options.max_num_batched_tokens == 12000
    origin = resolution.origins["max_num_batched_tokens"]
    assert origin == "chosen: 4 tokens of each of --max-num-seqs"


def test_fewer_requests_run_where_a_step_was_asked_that_holds_fewer_rounds():
    resolution, _ = plan(max_num_batched_tokens=31)
    assert resolution.options.max_num_seqs == 7
    origin = resolution.origins["max_num_seqs"]
    assert origin == "chosen: a step of --max-num-batched-tokens holds 4 tokens of each"


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"max_num_batched_tokens": 31, "max_num_seqs": 8},
            "max_num_batched_tokens must be at least 32, got 31; a step holds the 4 tokens of a "
            "round of every running request: raise --max-num-batched-tokens to 32, or lower "
            "--max-num-seqs to 7",
        ),
        (
            {"max_num_batched_tokens": 3},
            "must be at least 4, got 3; a step holds the 4 tokens of a round of every running "
            "request: raise --max-num-batched-tokens to 4, or lower --speculative-num-draft-tokens",
        ),
    ],
)
def test_a_step_that_holds_no_round_is_refused(asked, text):
    with pytest.raises(ConfigError) as caught:
        plan(**asked)
    assert text in str(caught.value)


@pytest.mark.parametrize("asked", [{"page_size": 1}, {"page_size": 1, "topk": 8, "tokens": 9}])
def test_the_longest_request_leaves_room_for_a_round_behind_it(asked):
    drafter = drafted("llama-3.1-8b", **EAGLE3 | asked)
    assert drafter is not None
    _, fit = plan(kv_cache_bytes=GIB, **asked)
    reach = drafter.shape.reach
    for group in fit.groups:
        assert group.num_pages - 1 >= fit.longest_len + reach
    _, exact = plan(kv_cache_bytes=GIB, max_model_len=fit.longest_len, **asked)
    _, more = plan(kv_cache_bytes=GIB, max_model_len=fit.longest_len + 1, **asked)
    assert not exact.short_by_bytes
    pages = fit.longest_len + 1 + reach + 1  # page 0 is reserved
    assert more.kv_least_bytes == pages * (131072 + 4096)
    assert 0 < more.short_by_bytes <= 131072 + 4096


def test_a_group_that_keeps_every_token_is_not_short_of_a_round_beside_a_windowed_one():
    asked = {"algorithm": "NGRAM", "load_format": "dummy", "page_size": 1, "steps": 15}
    _, fit = planned("gemma-3-1b", H200, kv_cache_bytes=GIB, **asked)
    _, exact = planned(
        "gemma-3-1b",
        H200,
        kv_cache_bytes=fit.kv_least_bytes,
        max_model_len=fit.longest_len,
        **asked,
    )
    assert exact.groups[0].window is None
    assert exact.groups[0].num_pages == fit.longest_len + 16 + 1


def test_the_hidden_states_that_a_head_reads_are_counted(tmp_path):
    target, sizes = folder(tmp_path / "target", TARGET), []
    for layers in ([1, 5, 8], [0, 1, 4, 5, 7, 8]):
        own = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": layers}}
        head = folder(tmp_path / "head", HEAD | own)
        asked = {"load_format": "dummy", "max_num_seqs": 8, "max_num_batched_tokens": 1024}
        sizes.append(planned(target, CPU, path=head, **asked)[1].activations_bytes)
    hidden_states = 3 * 1024 * 64 * 4
    assert sizes[1] - sizes[0] >= hidden_states


def test_the_promised_concurrency_fits_every_group_with_its_rounds():
    asked = EAGLE3 | {"page_size": 1, "topk": 4, "max_model_len": 32, "max_num_seqs": 256}
    asked |= {"kv_cache_bytes": 4096 * (131072 + 4096)}
    resolution, fit = planned("llama-3.1-8b", H200, **asked)
    drafter = drafted("llama-3.1-8b", **asked)
    assert drafter is not None
    specs = all_groups(parse_config(locate("llama-3.1-8b").config), resolution.options, drafter)
    tokens = resolution.options.max_num_batched_tokens
    for row in fit.concurrency:
        for spec, group in zip(specs, fit.groups, strict=True):
            held = row.requests * request_pages(spec, row.context_len + drafter.shape.reach)
            assert held + standing_pages(spec, tokens) <= group.num_pages
    assert fit.concurrency[-1].requests == 4095 // (32 + drafter.shape.reach)


def test_rejection_keeps_the_drafters_distributions():
    _, plain = plan()
    resolution, fit = plan(acceptance="rejection")
    rows, steps, vocab = resolution.options.max_num_seqs, 3, 128256
    assert fit.activations_bytes - plain.activations_bytes >= rows * steps * vocab * 4


@pytest.mark.parametrize(
    "asked",
    [
        {"algorithm": "NGRAM"},
        {"algorithm": "EAGLE3"},
        {"algorithm": "EAGLE3", "topk": 4},
        {"algorithm": "STANDALONE", "topk": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("page_size", [1, 16])
def test_what_is_measured_after_loading_was_planned(asked, page_size, drafters):
    options = {"threads": 1, "load_format": "dummy", "max_num_seqs": 3, "page_size": page_size}
    asked = asked | drafters.get(asked["algorithm"], {})
    asked = named(drafters["target"], options | asked)
    with LLM(**asked, max_num_batched_tokens=64, knobs=Knobs(capture=AHEAD)) as llm:
        memory = llm.report()["memory"]
    planned, measured = memory["planned"], memory["measured"]
    assert measured["KV"] == planned["kv_bytes"]
    assert measured["workspace"] == planned["workspace_bytes"]
    assert measured["graphs"] <= planned["graphs_bytes"] <= 1.02 * measured["graphs"]


@pytest.mark.parametrize(
    "asked", [{}, {"topk": 4}, {"acceptance": "rejection"}], ids=["chain", "tree", "rejection"]
)
def test_a_round_allocates_no_more_than_was_planned(asked, drafters):
    options = {"threads": 1, "load_format": "dummy", "max_num_seqs": 2, "enforce_eager": True}
    asked = options | {"algorithm": "EAGLE3"} | drafters["EAGLE3"] | asked
    params = {"max_tokens": 6, "temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.1}
    with LLM(**named(drafters["target"], asked), max_num_batched_tokens=64) as llm:
        with Allocations() as seen:
            llm.generate([[3, 4, 5], [6, 7]], params)
        memory = llm.report()["memory"]
    bound = memory["planned"]["activations_bytes"]
    standing = memory["measured"]["workspace"]  # operators return some of it too, and the pools
    standing += memory["measured"]["KV"] if "topk" in asked else 0
    assert 0.1 * bound < seen.peak <= bound + standing


def test_explain_shows_the_drafter_and_the_nearest_that_fits_keeps_it(tmp_path):
    asked = {
        "model": shallow(tmp_path, "llama-3.1-8b"),
        "load_format": "dummy",
        "speculative_draft_model_path": "eagle3-llama-3.1-8b",
        "speculative_eagle_topk": 4,
        "max_model_len": 100_000,
        "gpu_memory_utilization": 0.4,  # for a quarter of the layers
    }
    explained = explain_model(asked, gpu="l4")
    text = show(explained)
    assert (
        "drafts: EAGLE3 by eagle3-llama-3.1-8b: a tree of topk 4 and depth 3, 8 tokens verified "
        "per request and round; reads layer.1, layer.3, layer.4" in text
    )
    assert "speculative-num-draft-tokens 8 " in text
    assert explained.nearest is not None
    command = explained.nearest.commands[0]
    assert "--speculative-draft-model-path eagle3-llama-3.1-8b" in command.flags
    assert not explain_model(command.asked, gpu="l4").fit.short_by_bytes


def test_where_nothing_fits_no_draft_head_is_named_as_a_model(tmp_path, monkeypatch):
    """What is named may do without the drafter, which is of one model."""
    monkeypatch.setattr("paceline.plan.memory.nearest.GPUS", {"h200": H200})  # each is rehearsed
    model, size = shallow(tmp_path, "llama-3.1-8b"), 5 * GIB
    little = replace(gpu_by_name("l4"), total_bytes=size, free_bytes=size)
    config, drafter = parse_config(locate(model).config), drafted(model, **EAGLE3)
    asked, demands = named(model, EAGLE3), demands_of(config, little, drafter)
    nearest = nearest_if_short(asked, *resolve(asked, demands), demands)
    assert nearest is not None
    assert nearest.commands == ()
    assert nearest.devices == ("h200",)
    assert "llama-3.2-1b" in nearest.models
    assert not [name for name in nearest.models if name.startswith("eagle")]


def test_the_bundled_head_takes_no_requests_from_a_cpu():
    """It drafts for one at a time; who names a drafter gets rounds for all, and rows for them."""
    options = planned("bundled", CPU)[0].options
    assert (options.max_num_seqs, options.speculative_max_batch) == (32, 1)
    asked = planned("bundled", CPU, algorithm="EAGLE3")[0].options
    assert (asked.max_num_seqs, asked.speculative_max_batch) == (8, None)
    few = planned("bundled", CPU, algorithm="EAGLE3", speculative_max_batch=4)[0].options
    assert (few.max_num_seqs, few.speculative_max_batch) == (32, 4)


def test_graphs_are_planned_for_the_requests_that_draft():
    asked = {"algorithm": "EAGLE3", "max_num_seqs": 32}
    most = (1, 8, 24, 32)
    fits = [planned("bundled", CPU, speculative_max_batch=n, **asked)[1] for n in (*most, 20)]
    plain = planned("bundled", CPU, algorithm="off", max_num_seqs=32)[1].graphs_bytes
    *graphs, of_20 = [fit.graphs_bytes for fit in fits]
    assert plain < graphs[0] < graphs[1] < graphs[2] < graphs[3]
    assert graphs[0] < 1.25 * plain
    assert of_20 == graphs[2]  # what their rounds are padded to
