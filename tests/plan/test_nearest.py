"""The nearest options that fit: they do, and nothing closer to the ask does."""

from dataclasses import replace

import pytest
from draft_models import demands_of
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from paceline.core.errors import ConfigError
from paceline.core.gpus import GIB, gpu_by_name
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.models.size import weights_bytes
from paceline.plan.explain import nearest_if_short
from paceline.plan.memory import nearest
from paceline.plan.memory.fit import require_fit
from paceline.plan.memory.nearest import Knob, lowered
from paceline.plan.memory.suggestion import flag_words
from paceline.plan.resolve import resolve, shortage

BOUNDED = {"max_num_seqs": "cuda_graph_max_bs", "max_num_batched_tokens": "chunked_prefill_size"}


def config_of(model):
    return parse_config(locate(model).config)


def shallow(model, gpu, less=0):
    """Few layers of `model`, which is rehearsed as often sooner, and the GPU of that name without
    the bytes of the others' weights, and `less` still."""
    given = locate(model).config
    config = parse_config({**given, "num_hidden_layers": 6 if "gemma" in model else 2})
    left_out = weights_bytes(config_of(model), "bfloat16") - weights_bytes(config, "bfloat16")
    device = gpu_by_name(gpu)
    total, free = device.total_bytes - left_out - less, device.free_bytes - left_out - less
    return config, replace(device, total_bytes=total, free_bytes=free)


def search(config, device, asked):
    """(the suggestion or None, whether options fit) for an ask."""
    demands = demands_of(config, device)

    def fits(options):
        try:
            return not shortage(options, demands)[1]
        except ConfigError:
            return False

    resolution, fit = resolve(asked, demands)
    found = nearest_if_short(asked, resolution, fit, demands)
    return found, fits


def one_notch_back(asked, command, change):
    """The options of `command` with one change one notch closer to the ask."""
    options, option = dict(command.asked), change.option
    was, now = change.was, change.now
    closer = was
    if option == "gpu_memory_utilization":
        closer = max(was, now - 0.01)
    elif option in {"max_num_seqs", "max_num_batched_tokens"}:
        closer = min(was >> bit for bit in range(was.bit_length()) if was >> bit > now)
    options[option] = asked.get(option) if closer == was else closer
    bounded = BOUNDED.get(option)
    if bounded and asked.get(bounded) is not None:
        options[bounded] = min(asked[bounded], closer)
    if option == "dtype" and asked.get("kv_cache_dtype") == was:
        options["kv_cache_dtype"] = was
    return options


def followers(asked):
    """Options that change only because another one does."""
    found = {name for name in BOUNDED.values() if asked.get(name) is not None}
    return found | ({"kv_cache_dtype"} if asked.get("kv_cache_dtype") == "float32" else set())


asks = st.fixed_dictionaries(
    {},
    optional={
        "max_num_seqs": st.integers(1, 4000),
        "max_num_batched_tokens": st.integers(4000, 60_000),
        "max_model_len": st.integers(300, 32_768),
        "kv_cache_bytes": st.integers(GIB // 100, 200 * GIB),
        "gpu_memory_utilization": st.sampled_from([0.3, 0.5, 0.855, 0.9]),
        "dtype": st.sampled_from(["float32", "bfloat16"]),
        "chunked_prefill_size": st.integers(1, 4000),
        "enforce_eager": st.booleans(),
        "page_size": st.sampled_from([1, 16, 64]),
    },
)


@settings(max_examples=5, deadline=None)
@given(
    model=st.sampled_from(["llama-3.1-8b", "llama-3.2-1b", "gemma-3-1b"]),
    gpu=st.sampled_from(["a10g", "l4", "rtx-5090", "a100-40gb", "h200"]),
    asked=asks,
)
@example(  # the asked cache must grow unless the number format is smaller, and then all is room
    model="llama-3.1-8b",
    gpu="a10g",
    asked={
        "max_num_seqs": 2505,
        "max_num_batched_tokens": 4000,
        "max_model_len": 4006,
        "kv_cache_bytes": 63211271,
        "gpu_memory_utilization": 0.3,
        "dtype": "float32",
        "chunked_prefill_size": 336,
        "enforce_eager": True,
        "page_size": 1,
    },
)
def test_a_suggestion_fits_and_one_notch_closer_to_the_ask_does_not(model, gpu, asked):
    found, fits = search(*shallow(model, gpu), asked)
    assume(found is not None)
    assert fits(asked) is False
    for command in found.commands:
        assert command.changes
        assert fits(command.asked)
        changes = [each for each in command.changes if each.option not in followers(asked)]
        for change in changes:
            closer = dict(command.asked) | {change.option: asked.get(change.option)}
            if len(changes) == 1:
                closer = one_notch_back(asked, command, change)
            assert not fits(closer), change


def test_a_step_that_asks_for_too_many_requests_gets_fewer_and_nothing_else_changes():
    asked = {"max_num_seqs": 2000, "max_model_len": 128_000}
    found, fits = search(*shallow("llama-3.1-8b", "l4"), asked)
    (change,) = found.commands[0].changes
    assert (change.option, change.was) == ("max_num_seqs", 2000)
    assert change.now in {2000 >> bit for bit in range(11)}
    assert not fits({**asked, "max_num_seqs": 2 * change.now})


def too_long(config, device):
    """An ask that is short of KV alone, and not by half: nothing else has anything to give."""
    asked = {"max_num_seqs": 1, "max_num_batched_tokens": 256, "gpu_memory_utilization": 0.95}
    _, fit = resolve(asked, demands_of(config, device))
    return {**asked, "max_model_len": int(1.8 * fit.max_model_len)}


def test_a_context_is_shortened_before_the_cache_is_quantised():
    config, device = shallow("llama-3.1-8b", "l4", less=6 * GIB)
    asked = too_long(config, device)
    found, _ = search(config, device, asked)
    options = [[change.option for change in command.changes] for command in found.commands]
    assert options == [["max_model_len"], ["kv_cache_dtype"]]
    assert found.commands[1].asked == {**asked, "kv_cache_dtype": "fp8_e4m3"}


def test_a_gpu_without_fp8_conversions_is_offered_no_fp8_cache():
    config, device = shallow("llama-3.1-8b", "l4", less=6 * GIB)
    device = replace(device, cuda_arch=(8, 6))
    found, _ = search(config, device, too_long(config, device))
    options = [[change.option for change in command.changes] for command in found.commands]
    assert options == [["max_model_len"]]


def test_a_smaller_number_format_takes_the_asked_cache_format_along():
    asked = {"dtype": "float32", "kv_cache_dtype": "float32"}
    found, _ = search(config_of("llama-3.1-8b"), gpu_by_name("l4"), asked)
    assert found.commands[0].asked == {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}


def test_an_asked_graph_size_follows_the_requests_down():
    asked = {"max_num_seqs": 3000, "cuda_graph_max_bs": 3000, "max_model_len": 4096}
    found, _ = search(*shallow("llama-3.1-8b", "l4"), asked)
    first = found.commands[0].asked
    assert first["cuda_graph_max_bs"] == first["max_num_seqs"] < 3000
    assert "--cuda-graph-max-bs from 3000 to" in found.advice()


@pytest.mark.parametrize(
    ("asked", "option"),
    [
        ({"max_model_len": 4096, "kv_cache_bytes": 1000 * 8192}, "max_model_len"),
        ({"max_num_batched_tokens": 60_000, "max_num_seqs": 32}, "max_num_batched_tokens"),
    ],
)
def test_an_asked_prefill_graph_follows_the_step_and_the_context_down(asked, option):
    asked = {**asked, "cuda_graph_max_tokens": 2048 if option == "max_model_len" else 40_000}
    found, fits = search(*shallow("llama-3.1-8b", "l4"), asked)
    command = next(c for c in found.commands if option in {change.option for change in c.changes})
    assert command.asked["cuda_graph_max_tokens"] <= command.asked[option] < asked[option]
    assert fits(command.asked)


def test_two_changes_share_the_way():
    asked = {"max_num_seqs": 3000, "max_num_batched_tokens": 200_000}
    found, _ = search(*shallow("qwen3-8b", "rtx-3090"), asked)
    first = found.commands[0].asked
    assert first["max_num_seqs"] > 50
    assert first["max_num_batched_tokens"] > 2000


def test_a_change_that_was_not_needed_is_undone():
    knobs = [
        Knob(option="max_num_seqs", values=(8, 4, 2)),
        Knob(option="max_model_len", values=(100, 50)),
    ]
    asked = {"max_num_seqs": 16, "max_model_len": 200}
    found = lowered(asked, knobs, lambda options: options["max_model_len"] <= 50)
    assert found == {"max_num_seqs": 16, "max_model_len": 50}


def test_the_error_of_a_short_budget_ends_with_the_suggestion():
    asked = {"model": "llama-3.1-8b", "max_model_len": 120_000}
    config, device = shallow("llama-3.1-8b", "l4", less=5 * GIB)
    found, _ = search(config, device, asked)
    _, fit = resolve(asked, demands_of(config, device))
    with pytest.raises(ConfigError) as caught:
        require_fit(fit, found.advice())
    length = found.commands[0].asked["max_model_len"]
    assert str(caught.value).endswith(
        f"; the nearest that fits changes --max-model-len from 120000 to {length}: "
        f"--model llama-3.1-8b --max-model-len {length}"
    )


@pytest.mark.parametrize(
    ("gib", "also", "changed"),
    [
        (3.6, {}, {"max_num_batched_tokens": 4096}),
        (3.2, {}, {"max_num_batched_tokens": 512, "latent_expand_from": None}),  # all are graphs
        (
            8.0,
            {"max_model_len": 20_000, "kv_cache_bytes": 20_000 * 1700},  # 2304 a token, or 1288
            {"kv_cache_dtype": "fp8_e4m3", "latent_expand_from": None},
        ),
    ],
)
def test_latents_stay_expanded_as_asked_unless_a_suggestion_rules_it_out(gib, also, changed):
    asked = {"latent_expand_from": 300, "max_num_seqs": 1, "max_num_batched_tokens": 8192, **also}
    found, fits = search(*with_little_memory(int(gib * GIB), "deepseek-v2-lite"), asked)
    (command,) = [each for each in found.commands if each.asked == asked | changed]
    assert fits(command.asked)


def with_little_memory(total, model="qwen3-8b"):
    """(few layers of a model, an L4 of that many bytes)."""
    config, device = shallow(model, "l4")
    return config, replace(device, total_bytes=total, free_bytes=total)


def test_weights_that_exceed_the_memory_are_told_with_who_would_hold_them(monkeypatch):
    """Of few GPUs and models; the test below looks at all."""
    monkeypatch.setattr(nearest, "GPUS", {name: gpu_by_name(name) for name in ("l4", "h200")})
    monkeypatch.setattr(nearest, "shape_names", lambda: ("llama-3.2-1b", "qwen3-8b"))
    total = int(3.7 * GIB)
    config, device = with_little_memory(total)
    found, _ = search(config, device, {"model": "qwen3-8b"})
    assert found.commands == ()
    weights, context, usable = weights_bytes(config, "bfloat16"), 640 << 20, int(total * 0.95)
    assert found.weights_over_bytes == weights + context - usable
    assert found.short_by_bytes > found.weights_over_bytes
    assert "the weights alone exceed the usable memory by 0.15 GiB" in found.advice()
    assert "l4" in found.devices
    assert search(config, gpu_by_name(found.devices[0]), {})[0] is None
    assert "llama-3.2-1b" in found.models
    assert "qwen3-8b" not in found.models
    assert search(config_of("llama-3.2-1b"), device, {})[0] is None


@pytest.mark.parametrize(
    ("model", "gib", "asked"),
    [("qwen3-8b", 3.9, {}), ("deepseek-v2-lite", 2.8, {"latent_expand_from": 300})],
)
def test_what_is_short_for_another_reason_than_weights_says_so(model, gib, asked):
    found, _ = search(*with_little_memory(int(gib * GIB), model), asked)
    assert found.commands == ()
    assert found.weights_over_bytes == 0
    assert "with every option at its least" in found.advice()


def test_an_option_that_has_nothing_to_say_of_a_model_is_not_turned():
    """A cache in fp8, of layers that keep states alone."""
    found, _ = search(*with_little_memory(int(1.2 * GIB), "mamba2-2.7b"), {})
    assert found.commands == ()
    assert "with every option at its least" in found.advice()


def test_a_fit_needs_no_suggestion():
    assert search(*shallow("llama-3.1-8b", "h200"), {})[0] is None


def test_flags_are_quoted_and_open_values_left_out():
    asked = {
        "model": "my model",
        "dtype": "auto",
        "max_model_len": None,
        "overlap": False,
        "enforce_eager": True,
        "logits_processors": ("a:B", "c:D"),
    }
    assert flag_words(asked) == [
        "--model",
        "my model",
        "--logits-processor",
        "a:B",
        "--logits-processor",
        "c:D",
        "--enforce-eager",
        "--no-overlap",
    ]


def test_an_open_context_leaves_room_for_the_cache_that_is_asked_for():
    """Where the longest would lack one byte of it, a page less is served."""
    asked = {"max_num_seqs": 367, "kv_cache_bytes": 4_105_817_604}
    config, device = shallow("llama-3.1-8b", "a10g")
    assert search(config, device, asked)[0] is None
    resolution, _ = resolve(asked, demands_of(config, device))
    assert resolution.options.max_model_len == config.max_position - 16
