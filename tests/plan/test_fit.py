"""The memory budget: its arithmetic, and what it refuses."""

from dataclasses import replace

import pytest
from draft_models import CPU, H200, demands_of
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.groups import PagedGroup
from paceline.cache.prefix_tree import PrefixTree
from paceline.core.errors import ConfigError
from paceline.core.gpus import GIB, gpu_by_name
from paceline.core.model.cache_groups import cache_group_specs
from paceline.models.config import parse_config
from paceline.models.ends import with_ends
from paceline.models.locate import locate
from paceline.plan.memory.budget_table import budget_lines, compare, table
from paceline.plan.memory.fit import require_fit
from paceline.plan.memory.footprint import request_pages, standing_pages
from paceline.plan.resolve import resolve
from paceline.runner.sanitizer.dead_slots import held_bytes

DRAFTING = {
    "speculative_draft_model_path",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
    "speculative_max_batch",
    "speculative_ngram_min",
    "speculative_ngram_max",
    "force_accept_len",
}


def config_of(model, **changed):
    return parse_config(locate(model).config | changed)


def plan(model="llama-3.1-8b", device=H200, **asked):
    return resolve(asked, demands_of(config_of(model), device))


def plan_latents(device, **asked):
    """The first layers of a model decide as all do, and are rehearsed sooner."""
    config = config_of("deepseek-v2-lite", num_hidden_layers=3)
    return resolve(asked, demands_of(config, device))


def test_llama_8b_weighs_what_its_model_card_says():
    _, fit = plan()
    assert fit.weights_bytes == 2 * 8_030_261_248


def test_llama_8b_keeps_128_kib_of_kv_per_token():
    _, fit = plan()
    (group,) = fit.groups
    assert group.page_bytes == 16 * 131072


def test_the_cache_takes_the_format_of_the_activations_unless_asked():
    resolution, _ = plan(dtype="float16")
    assert resolution.options.kv_cache_dtype == "float16"
    assert resolution.origins["kv_cache_dtype"] == "chosen: the format of the activations"
    assert plan(dtype="float16", kv_cache_dtype="float16")[0].origins["kv_cache_dtype"] == "asked"


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3"])
def test_an_8_bit_cache_halves_a_page_and_nothing_else(name):
    _, plain = plan()
    resolution, fit = plan(kv_cache_dtype=name)
    assert resolution.options.kv_cache_dtype == "fp8_e4m3"
    assert fit.groups[0].page_bytes * 2 == plain.groups[0].page_bytes
    assert fit.kv_tokens == pytest.approx(2 * plain.kv_tokens, rel=1e-4)
    for field in ("weights_bytes", "graphs_bytes", "activations_bytes"):
        assert getattr(fit, field) == getattr(plain, field)
    assert fit.workspace_bytes == pytest.approx(plain.workspace_bytes, abs=1024)  # scales are KV's


def test_an_8_bit_cache_on_a_cpu_takes_half_for_every_running_request():
    asked = {"max_model_len": 512, "max_num_seqs": 2}
    sizes = [
        plan("gemma-3-1b", CPU, kv_cache_dtype=kind, **asked)[0].options.kv_cache_bytes
        for kind in ("auto", "fp8")
    ]
    assert sizes[1] * 2 == sizes[0]


def test_a_cache_format_that_is_neither_the_models_nor_8_bits_is_refused():
    text = (
        "kv_cache_dtype must be bfloat16, the format of the activations, or fp8_e4m3, got float32; "
        "leave --kv-cache-dtype out, or set --dtype to the same"
    )
    with pytest.raises(ConfigError) as caught:
        plan(kv_cache_dtype="float32")
    assert text in str(caught.value)


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-1b"])
@pytest.mark.parametrize("device", [H200, CPU], ids=["gpu", "cpu"])
def test_the_lines_add_up_to_what_is_usable(model, device):
    if model == "llama-3.1-8b" and device is CPU:
        device = replace(CPU, total_bytes=64 * GIB, free_bytes=48 * GIB)
    _, fit = plan(model, device)
    assert sum(size for _, size in budget_lines(fit)) == fit.usable_bytes < fit.total_bytes
    assert not fit.short_by_bytes


@pytest.mark.parametrize("model", ["llama-3.1-8b", "gemma-3-1b"])
def test_kv_stays_within_the_budget_and_leaves_less_than_a_page_of_each_group(model):
    resolution, fit = plan(model, kv_cache_bytes=4 * GIB)
    left = 4 * GIB - fit.kv_bytes
    assert 0 <= left < sum(group.page_bytes for group in fit.groups)
    assert resolution.options.kv_cache_bytes == 4 * GIB


def test_the_promised_concurrency_fits_every_group():
    resolution, fit = plan("gemma-3-1b", gpu_by_name("l4"))
    tokens = resolution.options.max_num_batched_tokens
    specs = cache_group_specs(config_of("gemma-3-1b"), 16)
    for row in fit.concurrency:
        for spec, group in zip(specs, fit.groups, strict=True):
            used = row.requests * request_pages(spec, row.context_len)
            assert used + standing_pages(spec, tokens) <= group.num_pages
    assert fit.concurrency[-1].requests >= 1


@given(
    length=st.integers(1, 5000),
    page_size=st.sampled_from([1, 7, 16, 64]),
    step_tokens=st.integers(1, 2048),
)
def test_a_request_needs_no_more_pages_than_are_planned_for_it(length, page_size, step_tokens):
    specs = cache_group_specs(config_of("gemma-3-1b"), page_size)
    for index, spec in enumerate(specs):
        tree = PrefixTree(page_size, [s.window is None for s in specs])
        group = PagedGroup(spec, index, tree, num_pages=9, max_extend_len=step_tokens)
        planned = request_pages(spec, length) + standing_pages(spec, step_tokens) - 1
        assert group.pages_to_fit(length) <= planned


def test_a_context_that_does_not_fit_is_lowered_only_when_it_was_not_asked():
    small = gpu_by_name("rtx-4090")
    resolution, fit = plan(device=small)
    assert 256 <= fit.max_model_len < 131072
    assert "the model's limit is 131072" in resolution.origins["max_model_len"]
    require_fit(fit)
    _, asked = plan(device=small, max_model_len=131072)
    assert asked.short_by_bytes
    with pytest.raises(ConfigError, match="a request of 131072 tokens was wanted"):
        require_fit(asked)


@pytest.mark.parametrize(
    ("free_bytes", "why"),
    [(10**9, "what weights and buffers leave"), (8 * 10**8, "a quarter of free memory")],
    ids=["a shorter context fits", "not even the shortest"],
)
def test_a_cpus_cache_is_what_is_left_where_any_request_fits(free_bytes, why):
    config = config_of("llama-3.2-1b", num_hidden_layers=2)
    small = replace(CPU, total_bytes=free_bytes, free_bytes=free_bytes)
    resolution, fit = resolve({}, demands_of(config, small))
    assert fit.max_model_len < config.max_position
    assert bool(fit.short_by_bytes) == (why == "a quarter of free memory")
    assert resolution.origins["kv_cache_bytes"] == f"chosen: {why}"


def test_one_token_more_than_the_longest_request_does_not_fit():
    _, fit = plan(kv_cache_bytes=GIB)
    _, exact = plan(kv_cache_bytes=GIB, max_model_len=fit.longest_len)
    _, more = plan(kv_cache_bytes=GIB, max_model_len=fit.longest_len + 1)
    assert not exact.short_by_bytes
    assert 0 < more.short_by_bytes <= fit.groups[0].page_bytes


def test_a_model_that_cannot_fit_is_refused_with_the_shortfall():
    _, fit = plan(device=gpu_by_name("l4"), dtype="float32")
    assert "does not fit: short by" in table(fit)
    with pytest.raises(ConfigError) as caught:
        require_fit(fit)
    text = str(caught.value)
    assert text.startswith("memory for the model on NVIDIA L4 must be at least ")
    assert "short by" in text
    assert "lower --max-model-len" in text


def test_a_cache_that_is_too_small_is_told_by_the_byte_and_by_its_flag():
    _, fit = plan(kv_cache_bytes=GIB, max_model_len=131072)
    with pytest.raises(ConfigError) as caught:
        require_fit(fit)
    least = 8193 * fit_page_bytes()
    assert str(caught.value) == (
        f"memory for the KV cache on NVIDIA H200 must be at least {least} bytes, got {GIB} bytes "
        f"(short by {least - GIB}; a request of 131072 tokens was wanted, the longest that fits "
        f"has {511 * 16}); raise --kv-cache-memory-bytes to {least}, or lower --max-model-len"
    )
    _, enough = plan(kv_cache_bytes=least, max_model_len=131072)
    require_fit(enough)


def fit_page_bytes():
    (spec,) = cache_group_specs(config_of("llama-3.1-8b"), 16)
    return spec.page_bytes(2)


def test_a_cache_that_the_device_cannot_hold_names_its_flag():
    _, fit = plan(kv_cache_bytes=200 * GIB)
    with pytest.raises(ConfigError, match="; lower --kv-cache-memory-bytes, --max-model-len"):
        require_fit(fit)


def test_the_largest_gpus_give_kv_the_bulk():
    _, fit = plan()
    assert fit.kv_bytes > 0.75 * fit.usable_bytes


def test_graphs_cost_nothing_when_they_are_off():
    _, fit = plan(enforce_eager=True)
    assert fit.graphs_bytes == 0


def test_a_sanitizer_has_room_for_what_it_copies_and_poisons():
    plain, sanitized = plan("llama-3.2-1b")[1], plan("llama-3.2-1b", sanitize=True)[1]
    copied = 2 * plain.workspace_bytes + held_bytes(1)
    assert sanitized.workspace_bytes - plain.workspace_bytes == copied
    assert plain.kv_room_bytes - sanitized.kv_room_bytes == copied


def test_prefill_graphs_leave_an_8b_model_its_context_on_a_small_gpu():
    """CUDA graphs share one pool: those of prefills add what the largest step holds, and no more
    for each."""
    _, without = plan(device=gpu_by_name("l4"), cuda_graph_max_tokens=0)
    resolution, fit = plan(device=gpu_by_name("l4"))
    tokens = resolution.options.cuda_graph_max_tokens
    assert tokens == 1024
    step = (
        5 * tokens * 14336 * 2
    )  # bytes: gate|up and their product, half as much in layers' inputs
    assert 0 < fit.graphs_bytes - without.graphs_bytes < 3 * step
    assert 25_000 < fit.max_model_len < without.max_model_len


def test_measured_stands_beside_planned():
    _, fit = plan()
    text = compare(fit, {"weights": 15 * GIB})
    row = next(line for line in text.splitlines() if "weights" in line)
    assert row.split() == ["weights", "14.96", "GiB", "15.00", "GiB"]
    assert text.splitlines()[-1].split()[-1] == "-"


def test_measured_kv_stands_beside_all_groups_together():
    _, fit = plan("gemma-3-1b")
    text = compare(fit, {"KV": fit.kv_bytes})
    (row,) = (line for line in text.splitlines() if "KV" in line)
    assert row.split()[1:3] == row.split()[3:5]


def test_an_unknown_measurement_is_refused():
    _, fit = plan()
    with pytest.raises(ConfigError, match="measured must be names among"):
        compare(fit, {"wieghts": 1})


def test_every_value_has_an_origin():
    resolution, _ = plan(page_size=64, max_num_seqs="auto")
    assert resolution.origins["page_size"] == "asked"
    assert resolution.origins["overlap"] == "default"
    assert resolution.origins["max_num_seqs"] == "chosen: usual on cuda"
    text = resolution.table()
    assert "page-size" in text
    assert "(asked)" in text
    assert "overlap=True" in text.splitlines()[-1]


def shape_of(device=CPU, **asked):
    resolution, _ = plan("llama-3.2-1b", device, **asked)
    options, origins = resolution.options, resolution.origins
    return options.max_num_seqs, options.max_num_batched_tokens, origins


@pytest.mark.parametrize(
    ("model", "tokens", "why"),
    [
        ("qwen3-embedding-0.6b", 16384, "chosen: usual on cuda where nothing is generated"),
        ("bert-base", 8192, "chosen: usual on cuda"),  # it waits for the host, not the host for it
    ],
)
def test_where_nothing_is_generated_graphs_of_small_models_hold_whole_steps(model, tokens, why):
    source = locate(model)
    config = with_ends(parse_config(source.config | {"num_hidden_layers": 1}), source, None)
    chosen = resolve({}, demands_of(config, H200))[0]
    options = chosen.options
    assert (options.max_num_batched_tokens, options.cuda_graph_max_tokens) == (tokens, tokens)
    assert chosen.origins["max_num_batched_tokens"] == why


def test_a_short_step_lowers_the_requests_that_were_left_open():
    requests, tokens, origins = shape_of(max_num_batched_tokens=8)
    assert (requests, tokens) == (8, 8)
    why = "chosen: a step of --max-num-batched-tokens holds one token of each"
    assert origins["max_num_seqs"] == why


def test_many_requests_raise_the_step_that_was_left_open():
    requests, tokens, origins = shape_of(max_num_seqs=2048)
    assert (requests, tokens) == (2048, 2048)
    assert origins["max_num_batched_tokens"] == "chosen: one token of each of --max-num-seqs"


def test_a_long_chunk_raises_the_step_that_was_left_open():
    _, tokens, origins = shape_of(chunked_prefill_size=4096)
    assert tokens == 4096
    assert "--chunked-prefill-size" in origins["max_num_batched_tokens"]


def test_smaller_gpus_take_smaller_steps():
    sizes = [shape_of(gpu_by_name(name))[:2] for name in ("h200", "a100-40gb", "l4")]
    assert sizes == [(256, 8192), (128, 4096), (64, 2048)]


def test_graphs_that_would_take_the_memory_of_the_cache_hold_fewer_requests():
    small = replace(CPU, free_bytes=GIB // 8)
    resolution, fit = plan("gemma-3-1b", small)
    assert 1 <= resolution.options.cuda_graph_max_bs < resolution.options.max_num_seqs
    assert "a quarter of free memory" in resolution.origins["cuda_graph_max_bs"]
    assert fit.graphs_bytes <= small.free_bytes // 4
    roomy, _ = plan("llama-3.2-1b", replace(CPU, total_bytes=99 * GIB, free_bytes=99 * GIB))
    assert roomy.origins["cuda_graph_max_bs"] == "chosen: every decode batch runs as a graph"


def test_open_values_are_decided():
    for device in (H200, CPU):
        resolution, _ = plan("llama-3.2-1b", device)
        values = resolution.to_json()
        assert values.pop("speculative_algorithm")["value"] == "off"
        open_fields = {n for n, e in values.items() if e["value"] is None}
        open_fields -= DRAFTING  # nobody drafts
        assert open_fields <= {
            "revision",
            "compare_ranks_every",
            "pooling",  # as the model's files say
            "quantization",  # as the checkpoint says
            "black_box_dir",  # nobody asked for a record
            "black_box_bytes",
            "attention_backend",
            "linear_attention_backend",
            "latent_expand_from",  # no layer caches latents
            "latent_expand_backend",
            "state_checkpoint_every",  # no layer keeps a state
            "threads" if device is H200 else "gpu_memory_utilization",
        }


def test_threads_of_a_machine_that_is_not_here_are_its_own_matter():
    assert plan(threads=1000)[0].options.threads == 1000


@pytest.mark.parametrize(("model", "device"), [("gemma-3-1b", CPU), ("llama-3.2-1b", H200)])
def test_without_graphs_no_reason_speaks_of_their_memory_or_time(model, device):
    """The padding stays that of graphs."""
    eager, fit = plan(model, device, enforce_eager=True)
    graphs, _ = plan(model, device)
    assert fit.graphs_bytes == 0
    for name in ("cuda_graph_max_bs", "cuda_graph_max_tokens"):
        assert getattr(eager.options, name) == getattr(graphs.options, name)
        if getattr(eager.options, name):
            assert eager.origins[name].startswith(
                "chosen: no graphs; steps are padded as with them"
            )


@pytest.mark.parametrize(
    ("device", "asked", "dtype"),
    [
        (H200, {}, "bfloat16"),
        (replace(H200, native_bf16=False), {}, "float16"),
        (H200, {"dtype": "float32"}, "float32"),
        (CPU, {}, "float32"),
    ],
)
def test_float32_weights_are_served_in_half_on_a_gpu_unless_asked(device, asked, dtype):
    wide = replace(parse_config(locate("llama-3.2-1b").config), dtype="float32")
    resolution, _ = resolve(asked, demands_of(wide, device))
    assert resolution.options.dtype == dtype


def test_a_cpu_without_bfloat16_computes_in_float32():
    resolution, _ = plan("llama-3.2-1b", replace(CPU, native_bf16=False))
    assert resolution.options.dtype == "float32"
    assert resolution.origins["dtype"] == "chosen: this CPU has no bfloat16 instructions"


@pytest.mark.parametrize(
    ("asked", "device", "text"),
    [
        ({"device": "cuda"}, CPU, "device must be cpu (a CPU), got cuda"),
        ({"gpu_memory_utilization": 0.5}, CPU, "must be left out on a CPU, got 0.5"),
        (
            {"threads": 5},
            CPU,
            "threads must be at most 4, the CPUs this process may use, got 5; lo",
        ),
        ({"max_model_len": 200000}, H200, "must be at most 131072, the model's context limit"),
        (
            {"max_num_batched_tokens": 7, "max_num_seqs": 9},
            H200,
            "max_num_batched_tokens must be at least 9, got 7; a step holds one token of every "
            "running request: raise --max-num-batched-tokens to 9, or lower --max-num-seqs to 7",
        ),
        (
            {"cuda_graph_max_bs": 9, "max_num_seqs": 8},
            H200,
            "cuda_graph_max_bs must be at most 8, the requests of one step, got 9; lower "
            "--cuda-graph-max-bs or raise --max-num-seqs",
        ),
        (
            {"cuda_graph_max_tokens": 65, "max_num_batched_tokens": 64, "max_num_seqs": 2},
            H200,
            "cuda_graph_max_tokens must be at most 64, the tokens of one step, got 65; lower "
            "--cuda-graph-max-tokens or raise --max-num-batched-tokens",
        ),
        (
            {"cuda_graph_max_tokens": 65, "max_model_len": 64},
            H200,
            "cuda_graph_max_tokens must be at most 64, the tokens of one request, got 65; lower "
            "--cuda-graph-max-tokens or raise --max-model-len",
        ),
        (
            {"chunked_prefill_size": 65, "max_num_batched_tokens": 64},
            CPU,
            "chunked_prefill_size must be at most 64, the tokens of one step, got 65; lower "
            "--chunked-prefill-size or raise --max-num-batched-tokens",
        ),
        (
            {"latent_expand_from": 512},
            H200,
            "latent_expand_from must be left out with a model whose layers cache no latents, got "
            "512; remove --latent-expand-from",
        ),
        (
            {"state_checkpoint_every": 512},
            CPU,
            "state_checkpoint_every must be left out with a model whose layers keep no states, "
            "got 512; remove --state-checkpoint-every",
        ),
    ],
)
def test_contradictions_are_refused(asked, device, text):
    with pytest.raises(ConfigError) as caught:
        resolve(asked, demands_of(config_of("llama-3.1-8b"), device))
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "device", "least", "why"),
    [
        (
            {},
            H200,
            171,
            "fewer operations (0: none); steps of up to 2048 tokens are graphs",
        ),
        ({}, CPU, 0, "a CPU attends to latents in blocks, and to expanded keys in none"),
        (
            {"cuda_graph_max_tokens": 8192},
            H200,
            0,
            "every step may be a graph, and attends to latents",
        ),
        ({"kv_cache_dtype": "fp8"}, H200, 0, "only latent attention reads rows in float8"),
        (
            {"chunked_prefill_size": 170},
            H200,
            0,
            "expanded keys and values would take more operations",
        ),
    ],
)
def test_latents_are_expanded_where_that_takes_fewer_operations(asked, device, least, why):
    """512 * 256 products of a key's expansion, over 768 saved with each query: 170.7."""
    resolution, _ = plan_latents(device, **asked)
    assert resolution.options.latent_expand_from == least
    assert resolution.origins["latent_expand_from"] == f"chosen: {why}"
    said = "prompts from 171 tokens on: expanded, by our own kernel"
    assert (said in resolution.line()) == (least == 171)
    assert resolution.options.latent_expand_backend == ("own" if least else None)


@pytest.mark.parametrize(
    ("asked", "name", "why"),
    [
        ({}, "own", "chosen: the only one that can run"),
        (
            {"attention_backend": "flashmla"},
            "own",
            "chosen: our own kernel, not flashmla: latents alone are what that attends to",
        ),
        (
            {"attention_backend": "flashinfer_mla"},
            "flashinfer",
            "chosen: of the library of flashinfer_mla, asked for",
        ),
        ({"attention_backend": "fa3"}, "fa3", "chosen: of the library of fa3, asked for"),
        ({"attention_backend": "fa3", "dtype": "float32"}, "own", "chosen: our own kernel"),
        ({"attention_backend": "fa3", "latent_expand_backend": "fa4"}, "fa4", "asked"),
        ({"latent_expand_backend": "auto"}, "own", "chosen: the only one that can run"),
    ],
)
def test_who_attends_to_expanded_latents(asked, name, why):
    """Whoever was asked for, by either flag, and says so where it cannot."""
    resolution, _ = plan_latents(H200, **asked)
    assert resolution.options.latent_expand_backend == name
    assert resolution.origins["latent_expand_backend"].startswith(why)
    by = "our own kernel" if name == "own" else name
    assert f"expanded, by {by})" in resolution.line()


@pytest.mark.parametrize(
    ("model", "asked", "text"),
    [
        ("deepseek-v2-lite", {"latent_expand_from": 0}, "left out where no latents are expanded"),
        ("deepseek-v2-lite", {"kv_cache_dtype": "fp8"}, "left out where no latents are expanded"),
        ("llama-3.1-8b", {}, "left out where no latents are expanded"),
    ],
)
def test_who_would_attend_to_nothing_is_refused(model, asked, text):
    with pytest.raises(ConfigError, match=f"latent_expand_backend must be {text}, got fa4"):
        plan(model, latent_expand_backend="fa4", **asked)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ({"kv_cache_dtype": "fp8"}, "0 with --kv-cache-dtype fp8"),
        ({"chunked_prefill_size": 2100}, "at most 2100, the prompt tokens of one request in a"),
        ({"max_num_batched_tokens": 4096, "cuda_graph_max_tokens": 4096}, "0 where every step"),
    ],
)
def test_latents_that_could_never_be_expanded_as_asked_are_refused(asked, text):
    with pytest.raises(ConfigError, match=f"latent_expand_from must be {text}"):
        plan("deepseek-v2-lite", latent_expand_from=2101, **asked)
