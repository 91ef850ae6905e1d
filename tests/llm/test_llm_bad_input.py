"""Bad input: the type and the text of each error, and an engine that serves on."""

import json
import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from llm_cases import (
    CONTEXT,
    GREEDY,
    VOCAB,
    Checkpoint,
    Tokens,
    assert_idle,
    make_llm,
    shared_prompts,
    text_of,
    tokens_of,
)

from paceline.core.errors import (
    BackendUnsupported,
    CapacityError,
    ConfigError,
    ModelError,
    RequestError,
    WeightsError,
)
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

GOOD = [10, 11, 12]


@pytest.fixture(scope="module")
def answers(checkpoint: Checkpoint) -> list[Tokens]:
    return [checkpoint.generate(prompt, GREEDY.max_tokens) for prompt in shared_prompts()[:3]]


@pytest.fixture(scope="module")
def shared_llm(checkpoint: Checkpoint) -> LLM:
    return make_llm(checkpoint, knobs=Knobs(num_pages=(8,)))


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """A small engine; its books must balance after every error."""
    yield shared_llm
    assert_idle(shared_llm)


ID_RULE = f"an integer from 0 to {VOCAB - 1}"
PROMPT_RULE = "must be text, token ids or a mapping with one of them"
KEY_RULE = "keys of a prompt must be prompt or prompt_token_ids"
BAD_PROMPTS: dict[str, tuple[object, str]] = {
    "id above": ([1, VOCAB], f"prompt token id 1 must be {ID_RULE}, got {VOCAB}; encode"),
    "id negative": ([-1, 4], f"prompt token id 0 must be {ID_RULE}, got -1"),
    "id bool": ([4, True], f"prompt token id 1 must be {ID_RULE}, got True"),
    "id float": ([[4, 5.0]], f"prompt token id 1 must be {ID_RULE}, got 5.0"),
    "id text": ([[4, "a"]], f"prompt token id 1 must be {ID_RULE}, got 'a'"),
    "text empty": ("", r"prompt must be 1 to 127 tokens \(.*\), got 0 tokens; pass"),
    "ids empty": (
        [[]],
        r"must be 1 to 127 tokens \(context 128, 1 generated\), got 0 tokens; pass",
    ),
    "too long": ([4] * CONTEXT, r"must be 1 to 127 tokens .*, got 128 tokens; shorten the prompt"),
    "None": (None, f"prompts {PROMPT_RULE}, .* got NoneType; pass a str, or the ids as"),
    "number": (7, f"prompts {PROMPT_RULE}, .* got int"),
    "bytes": (b"ab", f"prompts {PROMPT_RULE}, .* got bytes"),
    "mapping empty": ({}, f"{KEY_RULE}, got neither; pass"),
    "mapping both": ({"prompt": "ab", "prompt_token_ids": [4]}, f"{KEY_RULE}, got prompt, prompt_"),
    "mapping more": ({"prompt": "ab", "multi_modal_data": {}}, f"{KEY_RULE}, got multi_modal_data"),
    "mapping ids": ({"prompt": [4]}, "prompt must be text, got list"),
    "mapping text": ({"prompt_token_ids": "ab"}, "prompt_token_ids must be token ids, got str"),
    "array of floats": (np.array([4.0, 5.0]), f"prompt token id 0 must be {ID_RULE}, got 4.0"),
    "array of rows": (
        [torch.zeros(2, 2, 2)],
        r"prompt must be \[num_tokens\] token ids, got shape",
    ),
    "number as array": (np.array(4), r"prompt must be \[num_tokens\] token ids, got shape \[\]"),
    "bytes inside": ([b"ab"], f"prompt {PROMPT_RULE}, got bytes"),
    "mixed": ([4, "ab"], rf"^prompt\[0\]: prompt {PROMPT_RULE}, got int"),
    "second": (["ab", [VOCAB]], rf"^prompt\[1\]: prompt token id 0 must be {ID_RULE}, got {VOCAB}"),
    "surrogate": ("a\ud800", "prompt must be valid Unicode, got a lone surrogate at index 1"),
}
BAD_PARAMS: dict[str, tuple[object, str]] = {
    "unknown": ({"temprature": 0.5}, "sampling field must be .*, got 'temprature'; did you mean"),
    "twice": ({"max_tokens": 1, "max_new_tokens": 2}, "max_tokens must be given once"),
    "NaN": ({"temperature": math.nan}, "temperature must be a finite number in 0..100, got nan"),
    "negative": ({"temperature": -0.1}, "temperature must be a finite number"),
    "text": ({"top_p": "0.5"}, "top_p must be a finite number in 0..1, got '0.5'"),
    "zero tokens": ({"max_tokens": 0}, "max_tokens must be .* at least 1 or None, got 0"),
    "float tokens": ({"max_tokens": 1.5}, "max_tokens must be an integer .*, got 1.5"),
    "bool seed": ({"seed": True}, "seed must be an integer .*, got True"),
    "stop id": ({"stop_token_ids": [VOCAB]}, r"stop_token_ids must be .* below .*, got \[160\]"),
    "bias id": ({"logit_bias": {"160": 1}}, "logit_bias must be token ids below the voc.* 160"),
    "empty stop": ({"stop": [""]}, "stop must be non-empty strings"),
    "logprobs": ({"logprobs": 21}, r"logprobs must be an integer in 0\.\.20 or None, got 21"),
    "stop ids": ({"stop_token_ids": [*range(4, 36)]}, "at most 32 ids with .* 2 .*, got 34"),
    "too few": ([SamplingParams()] * 2, "sampling_params must be one for all or .* got 2"),
    "number": (5, "sampling_params must be one for all or one for each .*, got int"),
    "inside": ([5], "sampling_params must be SamplingParams or a mapping, got int"),
}  # fmt: skip


def assert_serves(llm: LLM, answers: list[Tokens]) -> None:
    assert tokens_of(llm.generate(shared_prompts()[0], GREEDY)) == answers[:1]


@pytest.mark.parametrize("case", BAD_PROMPTS)
def test_a_bad_prompt_is_refused_by_name(llm: LLM, answers: list[Tokens], case: str) -> None:
    prompt, text = BAD_PROMPTS[case]
    for stream in (False, True):
        with pytest.raises(RequestError, match=text):
            llm.generate(prompt, GREEDY, stream=stream)
    assert not llm.engine.has_work
    assert_serves(llm, answers)


@pytest.mark.parametrize("case", BAD_PARAMS)
def test_bad_parameters_are_refused_by_name(llm: LLM, answers: list[Tokens], case: str) -> None:
    params, text = BAD_PARAMS[case]
    with pytest.raises(RequestError, match=text):
        llm.generate([GOOD], params)
    assert not llm.engine.has_work
    assert_serves(llm, answers)


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(
    llm: LLM, answers: list[Tokens]
) -> None:
    """The pool holds 7 pages of 16; KV of the last token is never written."""
    prompt = [4] * 50
    text = (
        r"KV pages of request 'request-\d+' \(114 tokens\) must be at most \[7\] .*, got \[8\]; "
        "lower max_tokens, shorten the prompt, or give the KV cache more memory"
    )
    with pytest.raises(CapacityError, match=text):
        llm.generate([GOOD, prompt], [GREEDY, replace(GREEDY, max_tokens=64)])
    with pytest.raises(CapacityError, match=r"\(128 tokens\)"):
        llm.generate(prompt, replace(GREEDY, max_tokens=None))
    assert not llm.engine.has_work
    [output] = llm.generate(prompt, replace(GREEDY, max_tokens=63))
    assert len(output.outputs[0].token_ids) == 63
    assert_serves(llm, answers)


def test_bad_requests_do_not_disturb_running_ones(llm: LLM, answers: list[Tokens]) -> None:
    """One bad request of each kind between the snapshots of a stream."""
    bad = [(prompt, GREEDY, text) for prompt, text in BAD_PROMPTS.values()]
    bad += [([GOOD], params, text) for params, text in BAD_PARAMS.values()]
    bad.append(([GOOD, [4] * 100], replace(GREEDY, max_tokens=None), "KV pages of request"))
    last: dict[str, Tokens] = {}
    for output in llm.generate(shared_prompts()[:3], GREEDY, stream=True):
        last[output.request_id] = output.outputs[0].token_ids
        if bad:
            prompt, params, text = bad.pop()
            with pytest.raises(RequestError, match=text):
                llm.generate(prompt, params)
    assert not bad
    assert list(last.values()) == answers


BAD_OPTIONS: dict[str, tuple[dict[str, object], str]] = {
    "unknown": ({"page_sise": 4}, "engine option must be .*, got page_sise; did you mean"),
    "type": ({"page_size": 4.0}, "page_size must be int tokens, got 4.0; set --page-size"),
    "bool": ({"page_size": True}, "page_size must be int tokens, got True"),
    "low": ({"page_size": 0}, "page_size must be at least 1 tokens, got 0"),
    "dtype": ({"dtype": "float64"}, "dtype must be one of bfloat16, .*, got 'float64'"),
    "too long": ({"max_model_len": 129}, "max_model_len must be at most 128, .*, got 129"),
    "budget": ({"max_num_batched_tokens": 4}, "batched_tokens must be at least 8, got 4; a step"),
    "gpu share": ({"gpu_memory_utilization": 0.5}, "gpu_memory_ut.* must be left out on a CPU"),
    "no backend": ({"attention_backend": "flash9"}, "must be triton, .* or .*, got 'fl"),
    "no name": ({"attention_backend": ""}, "must be triton, .* or .*, got ''; name"),
    "no module": ({"attention_backend": "not.here:Backend"}, "must be an importable .*, got 'not"),
    "no class": ({"attention_backend": "llm_cases:Nobody"}, r"got 'llm_cases:Nobody' \(.*Nobody"),
    "not a backend": ({"attention_backend": "llm_cases:LLM"}, "must be a subclass of AttentionB"),
    "cache": ({"kv_cache_bytes": 64}, r"memory for .* must be at least .* \(short by "),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_OPTIONS)
def test_a_bad_option_is_refused_by_name(checkpoint: Checkpoint, case: str) -> None:
    options, text = BAD_OPTIONS[case]
    with pytest.raises(ConfigError, match=text):
        make_llm(checkpoint, **options)


def test_options_go_by_the_names_and_words_of_other_engines(
    checkpoint: Checkpoint, answers: list[Tokens]
) -> None:
    names: dict[str, object] = {
        "dtype": torch.float32,
        "context_length": "0.125k",
        "max_running_requests": 8,
        "tensor_parallel_size": 1,
        "disable_radix_cache": True,
        "disable_cuda_graph": True,
    }
    with LLM(checkpoint.folder, threads=1, **names) as llm:
        told = llm.report()["options"]
        assert tokens_of(llm.generate(shared_prompts()[:3], GREEDY)) == answers
    asked = {name: each["value"] for name, each in told.items() if each["origin"] == "asked"}
    assert asked == {
        "model": str(checkpoint.folder),
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 8,
        "tensor_parallel_size": 1,
        "enable_prefix_cache": False,
        "enforce_eager": True,
        "threads": 1,
    }


@pytest.mark.parametrize("name", ["model", "model_path"])
def test_a_model_goes_by_both_of_its_names_and_once(checkpoint: Checkpoint, name: str) -> None:
    with pytest.raises(ConfigError, match="max_model_len must be at most 128"):
        LLM(**{name: checkpoint.folder, "max_model_len": 129})
    if name == "model_path":
        with pytest.raises(ConfigError, match="model must be given once, got also as model_path"):
            LLM("bundled", model_path=checkpoint.folder)


def test_a_page_size_the_backend_cannot_take_is_refused(checkpoint: Checkpoint) -> None:
    name = "llm_cases:PagesOf64"
    with pytest.raises(BackendUnsupported) as caught:
        make_llm(checkpoint, attention_backend=name, page_size=16)
    assert caught.value.reasons == ["page size must be [64], got 16"]
    assert str(caught.value) == (
        f"attention backend '{name}' cannot run here:\n  - page size must be [64], got 16\n"
        "choose another with --attention-backend, or 'auto' to let the engine choose"
    )


def test_a_third_party_backend_serves(checkpoint: Checkpoint, answers: list[Tokens]) -> None:
    options = {"attention_backend": "llm_cases:PagesOf64", "page_size": 64}
    with make_llm(checkpoint, **options) as llm:
        assert tokens_of(llm.generate(shared_prompts()[:3], GREEDY)) == answers
        assert llm.report()["attention"] == {"name": "llm_cases:PagesOf64", "why": "asked for"}


def test_an_explicit_backend_that_cannot_run_tells_every_reason(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads of 16 and no interpreter."""
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(BackendUnsupported) as caught:
        make_llm(checkpoint, attention_backend="triton")
    reasons = caught.value.reasons
    assert any(reason.startswith("head dim must be [64, 80") for reason in reasons)
    assert any("TRITON_INTERPRET=1" in reason for reason in reasons)
    assert all(f"  - {reason}\n" in str(caught.value) for reason in reasons)


@pytest.fixture
def copy(checkpoint: Checkpoint, tmp_path: Path) -> Path:
    """The checkpoint's folder, to be damaged."""
    return Path(shutil.copytree(checkpoint.folder, tmp_path / "model"))


def refused(folder: Path, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        LLM(str(folder), threads=1)


def test_a_folder_without_config_is_refused(copy: Path) -> None:
    (copy / "config.json").unlink()
    refused(copy, ModelError, "model '.*' must be a folder with config.json, got .* without it")


def test_a_config_that_is_no_json_is_refused(copy: Path) -> None:
    (copy / "config.json").write_text("{")
    refused(copy, ModelError, r"config\.json must be readable JSON, got .*; restore the file")


def test_an_unknown_architecture_is_refused_with_the_known_ones(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "mamba"}))
    refused(copy, ModelError, "model_type must be one of .*gemma3_text, .*llama, .*, got 'mamba'")


def test_a_truncated_shard_is_refused_by_name(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-100])
    text = rf"{shard.name} must be a complete safetensors file, got \d+ bytes"
    refused(copy, WeightsError, text)


def test_a_missing_shard_is_refused_by_name(copy: Path) -> None:
    shard = sorted(copy.glob("*.safetensors"))[1]
    shard.unlink()
    refused(copy, WeightsError, f"every shard of the checkpoint, got no {shard.name}")


def test_a_damaged_tokenizer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("{}")
    refused(copy, ModelError, r"tokenizer\.json must be a tokenizer in the tokenizers format")


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", ModelError, "model must be a hub id, an existing folder, .*, got")


def test_a_model_without_tokenizer_serves_token_ids_and_says_what_it_lacks(
    copy: Path, answers: list[Tokens]
) -> None:
    (copy / "tokenizer.json").unlink()
    with LLM(str(copy), threads=1) as llm:
        text = "tokenizer must be a model with tokenizer.json, got one without; pass prompts as"
        with pytest.raises(ModelError, match=text):
            llm.generate("ab", GREEDY)
        with pytest.raises(RequestError, match="stop must be empty for a model without a tokeni"):
            llm.generate([GOOD], replace(GREEDY, stop="ab"))
        [output] = llm.generate(shared_prompts()[0], GREEDY)
        assert (output.outputs[0].token_ids, output.outputs[0].text) == (answers[0], "")
        assert_idle(llm)


def test_ids_at_the_edge_of_the_vocabulary_are_good(llm: LLM) -> None:
    prompt = [0, VOCAB - 1]
    assert llm.generate(prompt, GREEDY)[0].prompt_token_ids == tuple(prompt)
    assert llm.generate(text_of(prompt), GREEDY)[0].prompt_token_ids == tuple(prompt)
