"""The verbs, on an engine that is scripted."""

import json
import os
import re
import signal
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli import interrupts as interrupts_module
from paceline.cli.app import app
from paceline.core.errors import ConfigError, IntegrityError

SCHEMAS = Path(__file__).parents[2] / "docs" / "schemas"


def run(*words, engine=None, stdin=None):
    return CliRunner().invoke(app, list(words), obj=engine, input=stdin)


def validate(document, name):
    jsonschema.validate(document, json.loads((SCHEMAS / f"{name}.json").read_text()))


def test_generate_streams_text_to_stdout_and_the_rate_to_stderr():
    engine = FakeEngine()
    done = run("generate", "--prompt", "hi", engine=engine)
    assert done.exit_code == 0, done.output
    assert done.stdout == "one two three four\n"
    assert "4 tokens, 3.0 tokens/s, first after 500 ms" in done.stderr
    assert engine.prompts == [["hi"]]
    assert engine.closed


def test_generate_echo_prints_the_prompt_first():
    done = run("generate", "--prompt", "zero ", "--echo", engine=FakeEngine())
    assert done.stdout == "zero one two three four\n"


def test_generate_json_ends_with_one_document_that_fits_its_schema():
    done = run("generate", "--prompt", "hi", "--max-tokens", "2", "--json", engine=FakeEngine())
    document = json.loads(done.stdout.splitlines()[-1])
    validate(document, "generate")
    assert document["text"] == "one two "
    assert document["token_ids"] == [0, 1]
    assert document["finish_reason"] == "length"


def test_generate_says_that_acceptance_was_forced():
    words = ("generate", "--prompt", "hi", "--max-tokens", "2", "--force-accept-len", "2")
    document = json.loads(run(*words, "--json", engine=FakeEngine()).stdout.splitlines()[-1])
    validate(document, "generate")
    assert document["forced_tokens_per_round"] == 2.0
    assert "FORCED: the text is wrong" in run(*words, engine=FakeEngine()).stderr
    plain = run("generate", "--prompt", "hi", "--json", engine=FakeEngine())
    assert "forced_tokens_per_round" not in plain.stdout
    assert "FORCED" not in plain.stderr


def test_a_schema_refuses_a_document_with_a_missing_field():
    document = json.loads(run("generate", "--prompt", "x", "--json", engine=FakeEngine()).stdout)
    del document["metrics"]["ttft_s"]
    with pytest.raises(jsonschema.ValidationError, match="ttft_s"):
        validate(document, "generate")


def test_a_failed_request_is_an_error():
    done = run("generate", "--prompt", "hi", engine=FakeEngine(finish_reason="error"))
    assert done.exit_code == 1
    assert "logits held NaN" in done.stderr


ALIASES = [
    ("--model-path x", {"model": "x"}),
    ("--context-length 64", {"max_model_len": 64}),
    ("--max-model-len 64", {"max_model_len": 64}),
    ("--max_model_len 64", {"max_model_len": 64}),
    ("--mem-fraction-static 0.5", {"gpu_memory_utilization": 0.5}),
    ("--gpu-memory-utilization 0.5", {"gpu_memory_utilization": 0.5}),
    ("--max-running-requests 4", {"max_num_seqs": 4}),
    ("--max-num-seqs 4", {"max_num_seqs": 4}),
    ("--max-num-batched-tokens 9", {"max_num_batched_tokens": 9}),
    ("--chunked-prefill-size 9", {"chunked_prefill_size": 9}),
    ("--enable-prefix-caching", {"enable_prefix_cache": True}),
    ("--no-enable-prefix-caching", {"enable_prefix_cache": False}),
    ("--disable-radix-cache", {"enable_prefix_cache": False}),
    ("--enforce-eager", {"enforce_eager": True}),
    ("--sanitize", {"sanitize": True}),
    ("--disable-cuda-graph", {"enforce_eager": True}),
    ("--cuda-graph-max-bs 8", {"cuda_graph_max_bs": 8}),
    ("--attention-backend triton", {"attention_backend": "triton"}),
    ("--block-size 4", {"page_size": 4}),
    ("--page-size 4", {"page_size": 4}),
    ("--dtype float32", {"dtype": "float32"}),
    ("--dtype auto", {"dtype": "auto"}),
    ("--dtype bf16", {"dtype": "bfloat16"}),
    ("--dtype half", {"dtype": "float16"}),
    ("--max-model-len 2k", {"max_model_len": 2048}),
    ("--kv-cache-memory-bytes 1.5GiB", {"kv_cache_bytes": 3 << 29}),
    ("--kv-cache-dtype fp8", {"kv_cache_dtype": "fp8_e4m3"}),
    ("--load-format dummy", {"load_format": "dummy"}),
    ("--random-seed 7", {"seed": 7}),
    ("--seed -1", {"seed": -1}),
    ("--seed 7", {"seed": 7}),
    ("--device cpu", {"device": "cpu"}),
    ("--kv-cache-memory-bytes 1000", {"kv_cache_bytes": 1000}),
    ("--revision main", {"revision": "main"}),
    ("--no-overlap", {"overlap": False}),
    ("--threads 1", {"threads": 1}),
    ("--speculative-algorithm NGRAM", {"speculative_algorithm": "NGRAM"}),
    ("--speculative-algorithm ngram", {"speculative_algorithm": "NGRAM"}),
    ("--speculative-algorithm auto", {"speculative_algorithm": "auto"}),
    ("--speculative-algorithm off", {"speculative_algorithm": "off"}),
    ("--speculative-draft-model-path x", {"speculative_draft_model_path": "x"}),
    ("--speculative-draft-model x", {"speculative_draft_model_path": "x"}),
    ("--speculative-num-steps 2", {"speculative_num_steps": 2}),
    ("--speculative_num_steps 2", {"speculative_num_steps": 2}),
    ("--speculative-eagle-topk 4", {"speculative_eagle_topk": 4}),
    ("--speculative-num-draft-tokens 8", {"speculative_num_draft_tokens": 8}),
    ("--speculative-acceptance rejection", {"speculative_acceptance": "rejection"}),
    ("--speculative-ngram-min-match-window-size 1", {"speculative_ngram_min": 1}),
    ("--speculative-ngram-max 9", {"speculative_ngram_max": 9}),
    ("--force-accept-len 2.5", {"force_accept_len": 2.5}),
    ("x", {"model": "x"}),
    ("-tp 2", {"tensor_parallel_size": 2}),
    ("--tp 2", {"tensor_parallel_size": 2}),
    ("--tp-size 2", {"tensor_parallel_size": 2}),
    ("--tensor-parallel-size 2", {"tensor_parallel_size": 2}),
    ("", {}),
]


@pytest.mark.parametrize(("typed", "asked"), ALIASES, ids=[typed for typed, _ in ALIASES])
def test_flags_reach_the_engine_under_every_name(typed, asked):
    engine = FakeEngine()
    done = run("generate", "--prompt", "x", *typed.split(), engine=engine)
    assert done.exit_code == 0, done.output
    assert engine.asked == asked


@pytest.mark.parametrize("flag", ["--max-tokens", "--max-new-tokens", "--max_new_tokens"])
def test_max_tokens_has_its_aliases(flag):
    engine = FakeEngine()
    run("generate", "--prompt", "x", flag, "3", engine=engine)
    assert engine.params[0].max_tokens == 3


@pytest.mark.parametrize(
    ("typed", "text"),
    [
        ("--tp 0", "ConfigError: tensor_parallel_size must be from 1 to 64 processes, got 0"),
        ("-tp two", "'two' is not a valid integer"),
        ("a --model b", "ConfigError: model must be given once, got 'a' by position and 'b' by"),
        ("--dtype int4", "ConfigError: dtype must be one of bfloat16, float16, float32, got"),
        ("--page-size many", "page_size must be a number of tokens such as 4096 or 32k, got"),
        ("--max-num-seqs many", "is not a valid integer"),
        ("--verbose --quiet", "--verbose and --quiet exclude each other"),
        ("--logit-bias [1]", "RequestError: logit_bias must be a mapping"),
        ("--unheard-of 1", "No such option"),
        ("--temperature nan", "RequestError: temperature must be"),
    ],
)
def test_what_is_not_understood_is_refused(typed, text):
    engine = FakeEngine()
    done = run("generate", "--prompt", "x", *typed.split(), engine=engine)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not engine.prompts


TWICE = [
    "--seed 1 --seed 2",
    "--seed 1 --random-seed 1",
    "--overlap --no-overlap",
    "--max-num-seqs 4 --max_running_requests 5",
    "--model a --model-path b",
    "--tp 1 --tp 1",
]


@pytest.mark.parametrize("typed", [*TWICE, "--max-tokens 3 --max-new-tokens 4", "--json --json"])
def test_an_option_given_twice_is_refused(typed):
    """The last one would win, and the first be dropped without a word."""
    engine = FakeEngine()
    done = run("generate", "--prompt", "x", *typed.split(), engine=engine)
    assert done.exit_code == 2
    assert "may be given once, got 2; keep one" in done.stderr
    assert not engine.prompts


@pytest.mark.parametrize(
    "typed",
    [
        "explain --gpu h200 --gpu l4",
        "env --json --json",
        "check --filter a --filter b",
        "bench latency --batch-size 1 --batch-size 2",
        "bench attention --kv-len 1 --kv-len 2",
        "prove --against a --against b",
        "serve --port 1 --port 2",
        "chat --system a --system b",
        "debug fixes --json --json",
    ],
)
def test_no_verb_drops_the_first_of_two(typed):
    done = run(*typed.split(), engine=FakeEngine())
    assert done.exit_code == 2
    assert "may be given once, got 2; keep one" in " ".join(done.stderr.split())


def test_chat_keeps_history_and_reset_forgets_it():
    engine = FakeEngine()
    done = run("chat", engine=engine, stdin="a\nb\n/reset\nc\n/exit\nnever\n")
    assert done.exit_code == 0, done.output
    answer = "one two three four"
    assert engine.prompts == [["a"], [f"a|{answer}|b"], ["c"]]
    assert "forgotten" in done.stderr
    assert engine.closed


def test_chat_ends_with_its_input():
    assert run("chat", engine=FakeEngine(), stdin="a\n").exit_code == 0


def test_chat_system_message_survives_a_reset():
    engine = FakeEngine()
    run("chat", "--system", "be kind", engine=engine, stdin="a\n/reset\nb\n")
    assert engine.prompts == [["be kind|a"], ["be kind|b"]]


def test_chat_without_a_template_says_so_once_and_continues_text():
    engine = FakeEngine(template=False)
    done = run("chat", engine=engine, stdin="a\nb\n")
    assert done.stderr.count("has no chat template") == 1
    assert engine.prompts == [["a\n"], ["a\none two three four\nb\n"]]


def test_chat_names_an_unknown_command():
    done = run("chat", engine=FakeEngine(), stdin="/rest\n")
    assert "unknown command /rest" in done.stderr


def test_control_c_stops_the_answer_and_not_the_program():
    engine = FakeEngine()
    plain = engine._stream

    def interrupted(params):
        for count, snapshot in enumerate(plain(params)):
            if count == 1 and len(engine.prompts) == 1:
                os.kill(os.getpid(), signal.SIGINT)
            yield snapshot

    engine._stream = interrupted
    done = run("chat", engine=engine, stdin="a\n/reset\nb\n/exit\n")
    assert done.exit_code == 0, done.output
    assert engine.aborted == ["fake-0"]
    assert "one two  [stopped]" in done.stdout
    assert engine.prompts == [["a"], ["b"]]


def test_a_second_control_c_raises():
    before = signal.getsignal(signal.SIGINT)
    with interrupts_module.interrupts() as pressed:
        os.kill(os.getpid(), signal.SIGINT)
        assert pressed == [signal.SIGINT]
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def bench(engine, **asked):
    from paceline.bench.latency import bench_latency
    from paceline.bench.latency_shape import LatencyShape

    shape = LatencyShape(batch_sizes=(1, 2), input_len=5, output_len=4)
    return bench_latency({"model": "fake", **asked}, shape, make_llm=engine)


def test_a_bench_draws_its_document(tmp_path):
    words = ["bench", "latency", "--batch-size", "1,2", "--input-len", "8", "--output-len", "3"]
    path = tmp_path / "page.html"
    done = CliRunner().invoke(app, [*words, "--html", str(path)], obj=FakeEngine())
    assert done.exit_code == 0, done.output
    assert path.read_text().startswith("<!doctype html>")
    assert "<h1>paceline bench latency on " in path.read_text()
    assert json.loads(done.stdout.splitlines()[-1])["results"]


def test_a_page_that_cannot_be_written_is_told_before_the_bench_runs(tmp_path):
    def never(**asked):
        raise AssertionError("built")

    path = tmp_path / "none" / "page.html"
    done = CliRunner().invoke(app, ["bench", "latency", "--html", str(path)], obj=never)
    assert done.exit_code == 2
    assert "No such file or directory" in done.stderr


def test_bench_document_fits_its_schema_and_its_prompts_are_exact():
    engine = FakeEngine()
    document = bench(engine).to_json()
    validate(document, "bench_latency")
    assert [row["batch_size"] for row in document["results"]] == [1, 2]
    assert {len(prompt) for batch in engine.prompts for prompt in batch} == {5}
    assert {token < 50 for batch in engine.prompts for p in batch for token in p} == {True}
    assert all(params.ignore_eos and params.temperature == 0 for params in engine.params)
    assert engine.asked["enable_prefix_cache"] is False
    assert engine.closed


def test_bench_times_t1_on_the_prompts_of_the_full_run():
    engine = FakeEngine()
    bench(engine)
    calls = list(zip(engine.prompts, [p.max_tokens for p in engine.params], strict=True))
    ones = [prompts for prompts, count in calls[1:] if count == 1]
    full = [prompts for prompts, count in calls if count == 4]
    assert len(ones) == 6
    assert len({str(prompts) for prompts in ones}) == 6
    assert all(prompts in full for prompts in ones)


def test_bench_refuses_to_time_an_engine_that_is_not_steady():
    with pytest.raises(IntegrityError, match="two greedy runs of one prompt must be equal"):
        bench(FakeEngine(unsteady=True))


def test_bench_refuses_a_run_with_preemptions():
    with pytest.raises(IntegrityError, match="preemptions must be 0, got 1"):
        bench(FakeEngine(preempted=True))


def test_bench_makes_room_for_its_largest_batch_and_refuses_less():
    engine = FakeEngine()
    bench(engine)
    assert engine.asked["max_num_seqs"] == 2
    with pytest.raises(ConfigError, match="max_num_seqs must be at least 2, the largest batch, go"):
        bench(FakeEngine(), max_num_seqs=1)


def test_bench_refuses_a_wrong_count():
    engine = FakeEngine()
    engine.generate = lambda prompts, params, **_: [engine._output(0, 3, params) for _ in prompts]
    with pytest.raises(IntegrityError, match="output tokens per request must be 1"):
        bench(engine)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--batch-size", "1,x"], "batch_size must be numbers separated by commas, got '1,x'"),
        (["--batch-size", "0"], "batch_size must be at least 1, got 0"),
        (["--output-len", "1"], "output_len must be at least 2, got 1"),
    ],
)
def test_bench_refuses_shapes_it_cannot_time(words, text):
    done = run("bench", "latency", *words, engine=FakeEngine())
    assert done.exit_code == 2
    assert f"ConfigError: {text}" in done.stderr


def test_first_token_time_counts_from_process_start():
    import subprocess
    import sys
    import time

    code = (
        "import time; time.sleep(0.5);"
        "from paceline.plan.machine import seconds_since_process_start as s; print(s())"
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 0.45 < float(done.stdout) < time.perf_counter() - began + 0.05


def test_env_document_fits_its_schema():
    done = run("env", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    validate(document, "env")
    names = {backend["name"]: backend for backend in document["backends"]}
    assert names["torch"]["live"] == (not document["gpus"])
    assert all(backend["live"] == (not backend["reasons"]) for backend in names.values())


def test_env_for_people_names_every_backend():
    done = run("env")
    assert "backend torch" in done.stdout
    assert "backend triton" in done.stdout
    assert "kernel cache" in done.stdout
    begins = {re.match(r"(?:\w+ )?\S+ {2,}", line).end() for line in done.stdout.splitlines()}
    assert len(begins) == 1  # blanks between a name and what is said of it, in one column


@pytest.mark.parametrize("model", ["llama-3.1-8b", "llama-3.2-1b", "qwen3-8b", "gemma-3-1b"])
def test_explain_document_fits_its_schema(model):
    done = run("explain", "--model", model, "--gpu", "h200", "--json")
    assert done.exit_code == 0, done.output
    document = json.loads(done.stdout.splitlines()[-1])
    validate(document, "explain")
    assert document["fits"]
    assert [row["phase"] for row in document["attention"]] == ["prefill", "decode"]
    for row in document["attention"]:
        assert row["backend"] == "triton"
        assert row["rejected"]["torch"]
    origins = {name: entry["origin"] for name, entry in document["options"].items()}
    assert origins["model"] == "asked"
    assert origins["overlap"] == "default"
    assert origins["page_size"].startswith("chosen: ")


def test_explain_says_by_how_much_it_does_not_fit_and_exits_with_2():
    done = run("explain", "--model", "llama-3.1-8b", "--gpu", "rtx-4090", "--dtype", "float32")
    assert done.exit_code == 2
    assert "does not fit: short by" in done.stdout
    assert "ConfigError: memory for the model on NVIDIA GeForce RTX 4090" in done.stderr


def test_explain_names_the_known_gpus():
    done = run("explain", "--model", "llama-3.1-8b", "--gpu", "h9000")
    assert done.exit_code == 2
    assert "gpu must be one of a100-40gb" in done.stderr
    assert "got h9000" in done.stderr


def test_an_explicit_backend_that_cannot_run_lists_its_reasons():
    words = ["--model", "llama-3.1-8b", "--gpu", "h200", "--attention-backend", "torch"]
    done = run("explain", *words)
    assert done.exit_code == 2
    assert "BackendUnsupported: attention backend 'torch' cannot run here" in done.stderr


@pytest.mark.parametrize(
    "words", [["generate", "--prompt", "x"], ["chat"], ["bench", "latency"], ["explain"]]
)
def test_every_verb_takes_the_model_by_position_or_by_flag_and_not_both(words):
    nowhere = ["./nowhere"] if words == ["explain"] else ["llama-3.1-8b"]
    both = run(*words, *nowhere, "--model", "other", engine=FakeEngine())
    assert both.exit_code == 2
    assert "ConfigError: model must be given once" in both.stderr
    engine = FakeEngine()
    done = run(*words, *nowhere, engine=engine, stdin="")
    if words == ["explain"]:
        assert "got './nowhere'" in done.stderr
    else:
        assert done.exit_code == 0, done.output
        assert engine.asked["model"] == "llama-3.1-8b"


def test_an_answer_of_chat_may_fill_the_context():
    engine = FakeEngine()
    run("chat", engine=engine, stdin="a\n")
    run("chat", "--max-tokens", "3", engine=engine, stdin="a\n")
    assert [params.max_tokens for params in engine.params] == [None, 3]


def test_control_c_before_the_first_word_stops_the_answer():
    engine = FakeEngine()
    plain = engine._stream

    def interrupted(params):
        os.kill(os.getpid(), signal.SIGINT)
        yield from plain(params)

    engine._stream = interrupted
    done = run("chat", engine=engine, stdin="a\n/exit\n")
    assert done.exit_code == 0, done.output
    assert engine.aborted == ["fake-0"]
    assert done.stdout == "one  [stopped]\n"


@pytest.mark.parametrize("model", ["bundled", "llama-3.1-8b"])
def test_a_revision_of_a_model_that_has_none_is_refused(model):
    done = run("explain", "--model", model, "--gpu", "h200", "--revision", "v2")
    assert done.exit_code == 2
    assert "ConfigError: revision must be left out for" in done.stderr


def test_explain_refuses_a_step_that_cannot_hold_its_requests():
    words = ["--max-num-batched-tokens", "8", "--max-num-seqs", "16"]
    done = run("explain", "llama-3.1-8b", "--gpu", "h200", *words)
    assert done.exit_code == 2
    assert "max_num_batched_tokens must be at least 16, got 8" in done.stderr


def test_a_backend_that_only_lacks_graphs_is_advised_to_run_eagerly():
    words = ["bundled", "--device", "cpu", "--attention-backend", "eager_backend:EagerBackend"]
    words += ["--speculative-algorithm", "off"]
    done = run("explain", *words)
    assert done.exit_code == 2
    assert "graph support must be at least DECODE, got NEVER" in done.stderr
    assert "add --enforce-eager" in done.stderr
    assert run("explain", *words, "--enforce-eager").exit_code == 0


def test_a_backend_that_lacks_more_is_not_advised_to_run_eagerly():
    words = ["llama-3.1-8b", "--gpu", "h200", "--attention-backend", "eager_backend:EagerBackend"]
    done = run("explain", *words)
    assert "device must be cpu, got cuda" in done.stderr
    assert "--enforce-eager" not in done.stderr


def test_typed_errors_of_the_engine_exit_with_2():
    def broken(**asked):
        raise ConfigError("page_size must be 16, got 3; use 16")

    done = run("generate", "--prompt", "x", engine=broken)
    assert done.exit_code == 2
    assert done.stderr.endswith("ConfigError: page_size must be 16, got 3; use 16\n")
