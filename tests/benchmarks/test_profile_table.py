"""The profile's table: roles of kernels, steps, idle time and bytes, on made-up traces."""

import re
from pathlib import Path

import pytest
import torch

from paceline import kernels
from paceline.core.parallel import Parallel
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from profile_table import (
    Kernel,
    idle,
    kind_of,
    own_times,
    role_rows,
    roles_of,
    show,
    split_steps,
)
from profile_work import Work, role_bytes, role_flops, step_limit_us

ENTRY = re.compile(r"^def (_\w+_kernel)\(", re.MULTILINE)
LAYER = [
    ("_rms_norm_kernel", "norm"),
    ("nvjet_sm90_tst_64x64_a", "qkv"),
    ("_rope_write_kv_kernel", "rope"),
    ("_decode_kernel", "attention"),
    ("nvjet_sm90_tst_64x64_a", "o"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "o"),
    ("_rms_norm_kernel", "norm"),
    ("nvjet_sm90_tst_64x64_b", "gate_up"),
    ("_act_and_mul_kernel", "act"),
    ("nvjet_sm90_tst_64x64_c", "down"),
    ("void cublasLt::splitKreduce_kernel<32, 16, int, float>", "down"),
]
FUSED_LAYER = [
    ("_rms_norm_kernel", "norm"),
    ("_one_token_kernel", "qkv"),
    ("_rope_write_kv_kernel", "rope"),
    ("_decode_kernel", "attention"),
    ("_one_token_kernel", "o"),
    ("_rms_norm_kernel", "norm"),
    ("_few_tokens_kernel", "gate_up"),
    ("_round_rows_kernel", "down"),
    ("nvjet_sm90_qqtst_64x64_d", "down"),
]
LAYER_OF_A_RANK = [
    *FUSED_LAYER[1:5],
    ("_all_reduce_norm_polled_kernel", "exchange"),
    *FUSED_LAYER[6:],
    ("_all_reduce_norm_kernel", "exchange"),
]
SEPARATE_QK_NORM_LAYER = [
    ("_rms_norm_kernel", "norm"),
    ("nvjet_a", "qkv"),
    ("_rms_norm_kernel", "norm"),
    ("_rms_norm_kernel", "norm"),
    *LAYER[2:],
]
ROUTED_LAYER = [
    *LAYER[:7],
    ("nvjet_router", "router"),
    ("_moe_route_kernel", "route"),
    ("_moe_align_kernel", "route"),
    ("_gate_up_kernel", "experts"),
    ("_down_kernel", "experts"),
    ("_sum_kernel", "experts"),
]
ROUTED_PROMPT_LAYER = [
    *ROUTED_LAYER[:9],
    ("_moe_align_count_kernel", "route"),
    ("_moe_align_kernel", "route"),
    ("_groups_gate_up_kernel", "experts"),
    ("_groups_down_kernel", "experts"),
    ("_sum_kernel", "experts"),
]
LATENT_LAYER = [
    ("_rms_norm_kernel", "norm"),
    ("_one_token_kernel", "qkv"),
    ("_one_token_kernel", "qkv"),
    ("_latent_rows_kernel", "latents"),
    ("_head_products_kernel", "latents"),
    ("paged_extend_kernel", "attention"),
    ("_merge_kernel", "attention"),
    ("_head_products_kernel", "latents"),
    ("_one_token_kernel", "o"),
    ("_rms_norm_kernel", "norm"),
    ("_one_token_kernel", "router"),
    ("_one_token_kernel", "gate_up"),
    ("_moe_route_kernel", "route"),
    ("_one_token_kernel", "down"),
    ("_one_gate_up_kernel", "experts"),
    ("_one_down_kernel", "experts"),
]
SHARED_EXPERT_LAYER = [  # of many tokens
    *LAYER[:7],
    ("nvjet_router", "router"),
    ("nvjet_gate_up", "gate_up"),
    ("_act_and_mul_kernel", "act"),
    ("_moe_route_kernel", "route"),
    ("nvjet_down", "down"),
    *ROUTED_LAYER[9:],
]
DRAFT_PASS = [  # of a drafter with a layer and a head of its own
    ("_derive_pass_kernel", "derive"),
    *LAYER,
    ("_rms_norm_kernel", "norm"),
    ("nvjet_draft_head", "head"),
    ("_draft_topk_blocks_kernel", "draft"),
    ("_draft_topk_rows_kernel", "draft"),
    ("_grow_tree_kernel", "draft"),
]
STATE_LAYER = [  # of a model that keeps states alone
    ("_rms_norm_kernel", "norm"),
    ("_one_token_kernel", "qkv"),
    ("_decay_rates_kernel", "states"),
    ("_state_step_kernel", "states"),
    ("_gated_norm_kernel", "states"),
    ("_one_token_kernel", "o"),
]
LAYERS = [
    LAYER,
    STATE_LAYER,
    FUSED_LAYER,
    LAYER_OF_A_RANK,
    SEPARATE_QK_NORM_LAYER,
    ROUTED_LAYER,
    ROUTED_PROMPT_LAYER,
    LATENT_LAYER,
    SHARED_EXPERT_LAYER,
]
HEAD = [("_derive_kernel", "derive"), ("indexSelectLargeIndex", "other")]
TAIL = [
    ("_rms_norm_kernel", "norm"),
    ("nvjet_head", "head"),
    ("_greedy_blocks_kernel", "sample"),
    ("_greedy_rows_kernel", "sample"),
    ("_commit_kernel", "commit"),
    ("Memcpy DtoH (Device -> Pinned)", "copy"),
]
LLAMA = parse_config(locate("llama-3.1-8b").config)


def step(layer, layers=3):
    return [*HEAD, *(layer * layers), *TAIL]


def trace(names, *, start=0.0, each=2.0, gap=0.5):
    """Kernels of `each` microseconds, `gap` apart."""
    return [
        Kernel(name, start + i * (each + gap), start + i * (each + gap) + each)
        for i, name in enumerate(names)
    ]


def traces(names, steps, *, pause, **pace):
    found, start = [], 0.0
    for _ in range(steps):
        found += trace(names, start=start, **pace)
        start = found[-1].end + pause
    return found


def names_of(kernels):
    return [[kernel.name for kernel in step] for step in kernels]


@pytest.mark.parametrize("layer", LAYERS)
def test_every_kernel_gets_its_role(layer):
    names, roles = zip(*step(layer), strict=True)
    assert roles_of(names) == list(roles)


def test_kernels_that_draft_have_a_role_and_the_product_before_them_is_a_head():
    names, roles = zip(*DRAFT_PASS, *DRAFT_PASS, *step(LAYER), strict=True)
    assert roles_of(names) == list(roles)


def test_a_round_commits_what_it_accepted():
    verified = [*step(LAYER)[:-2], ("_commit_kernel", "commit"), ("_compact_kv_kernel", "commit")]
    observed = [("_chain_rows_kernel", "commit"), *LAYER, ("_rms_norm_kernel", "norm")]
    names, roles = zip(*verified, *observed, strict=True)
    assert roles_of(names) == list(roles)


SOURCES = Path(kernels.__file__).parent / "_triton"
OUR_KERNELS = sorted(
    {name for path in SOURCES.glob("*.py") for name in ENTRY.findall(path.read_text())}
)


@pytest.mark.parametrize("name", OUR_KERNELS)
def test_every_kernel_of_the_package_is_known(name):
    assert kind_of(name) != "other"


FUSED = [(FUSED_LAYER, role) for role in ("norm", "rope", "attention", "qkv")]
SEPARATE = [(LAYER, role) for role in ("act", "norm", "rope", "attention", "qkv", "gate_up")]


@pytest.mark.parametrize(("layer", "role"), [*FUSED, *SEPARATE])
def test_renamed_kernels_are_other_and_take_no_neighbour_with_them(layer, role):
    names, roles = map(list, zip(*step(layer), strict=True))
    renamed = ["_new_kernel" if r == role else n for n, r in zip(names, roles, strict=True)]
    expected = ["other" if r == role else r for r in roles]
    assert roles_of(renamed) == expected


def test_steps_begin_with_derive_and_with_what_is_staged_before_it():
    names = ["Memcpy HtoD (Pinned -> Device)", "index_copy", *(name for name, _ in step(LAYER))]
    kernels = traces(names, 4, pause=9.0)
    assert names_of(split_steps(kernels, 4)) == [names] * 4


def test_steps_without_a_known_derive_begin_after_the_longest_pause():
    names = [name for name, _ in step(LAYER) if name != "_derive_kernel"]
    kernels = traces(names, 5, pause=9.0)
    assert names_of(split_steps(kernels, 5)) == [names] * 5


def test_idle_time_is_told_apart_within_and_between_steps():
    kernels = traces(["_derive_kernel", "a", "b", "_commit_kernel"], 5, pause=3.0)
    found = idle(split_steps(kernels, 5))
    assert found.busy_us == pytest.approx(8.0)
    assert found.idle_within_us == pytest.approx(1.5)
    assert found.idle_between_us == pytest.approx(3.0)
    assert found.idle_within_share == pytest.approx(1.5 / 12.5)
    assert found.idle_between_share == pytest.approx(3.0 / 12.5)
    assert found.line(None).endswith(
        "; idle within a step 1.5 us (12.0%), between steps 3.0 us (24.0%)"
    )


def test_one_long_pause_does_not_move_the_median():
    kernels = traces(["_derive_kernel", "_commit_kernel"], 5, pause=3.0)
    late = [Kernel(k.name, k.start + 1e4, k.end + 1e4) for k in kernels[4:]]
    assert idle(split_steps(kernels[:4] + late, 5)).idle_between_us == pytest.approx(3.0)


def test_overlapping_kernels_are_not_counted_twice():
    overlapping = [Kernel("a", 0.0, 4.0), Kernel("b", 3.0, 6.0), Kernel("c", 4.0, 5.0)]
    assert own_times(overlapping) == [4.0, 2.0, 0.0]


def work(**changes):
    facts = {"phase": "decode", "requests": 64, "tokens": 64, "kv_len": 4096}
    return Work(**{**facts, "dtype": "bfloat16", "kv_dtype": "bfloat16", **changes})


def test_the_bytes_of_a_decode_step_are_the_models_weights_and_the_cache():
    config = LLAMA
    moved = role_bytes(config, work(requests=1, tokens=1, kv_len=1))
    products = sum(moved[role] for role in ("qkv", "o", "gate_up", "down", "head"))
    matrices = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096)
    assert 0 <= products - matrices < 0.001 * matrices
    attention = role_bytes(config, work())["attention"]
    assert attention == 64 * 4096 * 131072 + 32 * 64 * 2 * 4096 * 2
    half = role_bytes(config, work(kv_dtype="fp8_e4m3"))["attention"]
    assert attention - half == 64 * 4096 * 131072 // 2


def test_products_are_those_of_the_modules():
    config = parse_config(locate("bundled").config)
    model = load_model(
        locate("bundled"),
        config,
        parallel=Parallel(),
        device=torch.device("cpu"),
        dtype=torch.bfloat16,
        load_format="dummy",
        max_positions=8,
        seed=0,
    )
    matrices = [p for p in model.parameters() if p.dim() == 2]
    tied = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    elements = sum(p.numel() for p in matrices) - tied
    flops = role_flops(config, work(requests=1, tokens=1, kv_len=1))
    assert sum(count for role, count in flops.items() if role != "attention") == 2 * elements


def test_prefill_attention_counts_the_triangle():
    flops = role_flops(LLAMA, work(phase="prefill", requests=2, tokens=2 * 10, kv_len=10))
    assert flops["attention"] == 4 * 32 * 128 * 32 * 2 * (10 * 11 // 2)


def test_a_window_bounds_bytes_and_products():
    config = parse_config(locate("gemma-3-1b").config)
    short, long = (role_bytes(config, work(kv_len=n))["attention"] for n in (512, 1024))
    full = sum(layer.window is None for layer in config.layers)
    assert long - short == 64 * full * 512 * 2 * 256 * 2


def test_the_limit_of_the_llama_step_is_that_of_its_bytes():
    limit = step_limit_us(
        LLAMA, work(requests=1, tokens=1, kv_len=1), bandwidth=4.23e12, flops=None
    )
    assert 1e6 / limit == pytest.approx(281, rel=0.01)


def test_rows_have_times_and_shares():
    kernels = traces([name for name, _ in step(LAYER, layers=32)], 3, pause=1.0, each=10.0)
    rows = role_rows(split_steps(kernels, 3), LLAMA, work(), bandwidth=4.8e12, flops=989.4e12)
    by_role = {row["role"]: row for row in rows}
    assert by_role["qkv"]["calls_per_step"] == 32
    assert by_role["qkv"]["us_per_step"] == pytest.approx(320.0)
    assert by_role["other"]["bytes"] is None
    assert sum(row["share_of_busy"] for row in rows) == pytest.approx(1.0)
    moved = role_bytes(LLAMA, work())["attention"]
    assert by_role["attention"]["gb_s"] == pytest.approx(moved / 320e-6 / 1e9)
    limit_us = moved / 4.8e12 * 1e6
    assert by_role["attention"]["share_of_limit"] == pytest.approx(limit_us / 320.0)
    text = show(rows)
    assert text.splitlines()[1].startswith("qkv")
    assert "other" in text


def test_layers_of_states_are_read_and_written_and_have_two_products():
    """Of Mamba-2 2.7B: a state of 80 heads of 64 x 128 in float32, a window of 3 rows."""
    config = parse_config(locate("mamba2-2.7b").config)
    work = Work(
        phase="decode", requests=2, tokens=2, kv_len=9, dtype="bfloat16", kv_dtype="bfloat16"
    )
    moved = role_bytes(config, work)
    assert moved["states"] == 64 * 2 * 2 * (80 * 64 * 128 * 4 + 5376 * 3 * 2)
    assert moved["attention"] == 0
    inner, wide = 2560, 5120 + 5376 + 80
    assert moved["qkv"] == 64 * 2 * (inner * wide + 2 * (inner + wide))
    assert moved["o"] == 64 * 2 * (5120 * inner + 2 * (5120 + inner))
    limit = step_limit_us(config, work, bandwidth=1e12, flops=None)
    assert limit == pytest.approx(5.4e3 + moved["states"] / 1e6, rel=0.01)
