"""Whisper: an encoder's rows are made once for a request, and every token of it reads them."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from audio import CONTEXT, MELS, MOST_FRAMES, Audio, asked, frames_of, make_audio
from box_cases import boxed, replayed_as_it_was, written
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    assert_same_or_tie,
    make_llm,
    random_prompts,
    recorded_steps,
    tokens_of,
)
from safetensors.torch import load_file, save_file

from paceline.core.errors import ConfigError, ModelError, RequestError
from paceline.core.model.config import CacheKind
from paceline.core.parallel import ALONE
from paceline.core.step import JoinDelta
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.llm.boot import Knobs
from paceline.models.audio_encoder import AudioLayer
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.plan.explain import explain_model, show
from paceline.server.border.engine_main import require_served

SHORT = replace(GREEDY, max_tokens=12)
PROMPTS = random_prompts((20, 5, 9, 3, 26, 12), seed=3)
LENGTHS = (MOST_FRAMES, 22, 0, 1, 13, 32)  # frames; 0: no audio
FRAMES = [frames_of(seed, length) for seed, length in enumerate(LENGTHS)]
ASKED = [asked(prompt, frames) for prompt, frames in zip(PROMPTS, FRAMES, strict=True)]
WAYS: dict[str, dict[str, Any]] = {
    "graphs": {},
    "eager, sanitized": {"enforce_eager": True, "sanitize": True},
    "graphs of prompts, sanitized": {
        "sanitize": True,
        "cuda_graph_max_tokens": 32,
        "chunked_prefill_size": 7,
    },
    "drafts": {"speculative_algorithm": "NGRAM", "page_size": 4},
    "the twin loop, no prefixes": {"overlap": False, "enable_prefix_cache": False},
}


@pytest.fixture(scope="module")
def audio(tmp_path_factory: pytest.TempPathFactory) -> Audio:
    return make_audio(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def said(audio: Audio) -> list[tuple[int, ...]]:
    """What transformers says of each."""
    return [
        audio.said(prompt, frames, SHORT.max_tokens)
        for prompt, frames in zip(PROMPTS, FRAMES, strict=True)
    ]


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_transformers(audio: Audio, said: Any, way: str) -> None:
    """Audio of every length in one batch, and none."""
    with make_llm(audio, **WAYS[way]) as llm:
        got = tokens_of(llm.generate(ASKED, SHORT))
        assert_idle(llm)
        for prompt, frames, ours, theirs in zip(PROMPTS, FRAMES, got, said, strict=True):
            assert_same_or_tie(ours, theirs, audio.gap_over(prompt, frames))
        assert bool(llm.engine.runner.graphs_captured) == ("eager" not in way)


def test_logits_are_those_of_transformers(audio: Audio) -> None:
    wanted = [
        audio.logits_of(prompt, frames).log_softmax(-1)
        for prompt, frames in zip(PROMPTS, FRAMES, strict=True)
    ]
    with make_llm(audio, chunked_prefill_size=7) as llm:
        outputs = llm.generate(ASKED, replace(SHORT, max_tokens=1, prompt_logprobs=0))
    for prompt, theirs, output in zip(PROMPTS, wanted, outputs, strict=True):
        assert output.prompt_logprobs is not None
        found = zip(prompt[1:], output.prompt_logprobs[1:], strict=True)
        ours = [entry[token].logprob for token, entry in found]
        own = theirs[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])]
        torch.testing.assert_close(torch.tensor(ours), own, rtol=0, atol=2e-5)


def test_what_is_heard_matters(said: Any, audio: Audio) -> None:
    """Or the other tests could not fail."""
    others = [frames_of(9, MOST_FRAMES), FRAMES[0][:, :20], FRAMES[2]]
    answers = {said[0], *(audio.said(PROMPTS[0], frames, 12) for frames in others)}
    assert len(answers) == 4


def test_a_prefix_is_found_below_the_same_audio_alone(audio: Audio, said: Any) -> None:
    other = frames_of(9, MOST_FRAMES)
    with make_llm(audio, page_size=4) as llm:
        prompts = [ASKED[0], ASKED[0], asked(PROMPTS[0], other), asked(PROMPTS[0], FRAMES[2])]
        outputs = [llm.generate(each, SHORT)[0] for each in prompts]
        assert [each.metrics.cached_tokens for each in outputs] == [0, 16, 0, 0]
    assert tokens_of(outputs[:2]) == [said[0]] * 2
    assert tokens_of(outputs[2:]) == [
        audio.said(PROMPTS[0], frames, 12) for frames in (other, FRAMES[2])
    ]


def test_who_is_preempted_hears_again(audio: Audio, said: Any) -> None:
    knobs = Knobs(num_pages=(19, 40), reserve_ahead=0, admission_margin=0)
    with make_llm(audio, page_size=4, knobs=knobs) as llm, recorded_steps(llm) as steps:
        outputs = llm.generate(ASKED, SHORT)
        assert tokens_of(outputs) == said
        assert_idle(llm)
    joins = [d for step in steps for d in step.deltas if isinstance(d, JoinDelta)]
    assert len(joins) > len(ASKED)


def test_completions_of_one_prompt_hear_the_same(audio: Audio, said: Any) -> None:
    with make_llm(audio, page_size=4) as llm:
        [output] = llm.generate(ASKED[0], replace(SHORT, n=2))
    assert [each.token_ids for each in output.outputs] == [said[0]] * 2


def test_a_graph_captured_over_padding_reads_rows(audio: Audio, said: Any) -> None:
    """It is captured at boot, before anybody has brought any: with none it would have been one
    without cross attention."""
    with make_llm(audio, max_num_seqs=1) as llm:
        captured = llm.engine.runner.graphs_captured
        got = tokens_of(llm.generate(ASKED[0], SHORT))
        assert llm.engine.runner.graphs_captured == captured == 1
    assert got == [said[0]], "the captured graph reads no rows"


@pytest.mark.parametrize(
    ("given", "got"),
    [
        (None, "nothing"),
        ([[0.0]], "list"),
        (torch.zeros(1, MELS, 4), rf"float32 \[1, {MELS}, 4\]"),
        (torch.zeros(MELS + 1, 4), rf"float32 \[{MELS + 1}, 4\]"),
        (torch.zeros(MELS, MOST_FRAMES + 1), rf"float32 \[{MELS}, {MOST_FRAMES + 1}\]"),
        (torch.zeros(MELS, 4, dtype=torch.int64), rf"int64 \[{MELS}, 4\]"),
        (torch.zeros(MELS, 4).numpy()[::-1], "At least one stride .*"),
        (torch.zeros(MELS, 4).numpy().astype(object), "can't convert .*"),
    ],
)
def test_other_input_is_refused_and_the_rest_goes_on(
    audio: Audio, said: Any, given: Any, got: str
) -> None:
    wanted = rf"encoder_input must be floats \[{MELS}, 0 to {MOST_FRAMES}\], got {got}; pass it"
    with make_llm(audio) as llm:
        with pytest.raises(RequestError, match=rf"prompt\[1\]: {wanted}"):
            llm.generate([ASKED[0], asked(PROMPTS[1], given)], SHORT)
        assert tokens_of(llm.generate(ASKED[1], SHORT)) == said[1:2]


def test_other_models_take_none(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm, pytest.raises(RequestError) as caught:
        llm.generate({"prompt": "aaab", "encoder_input": torch.zeros(1, 1)}, SHORT)
    assert str(caught.value) == (
        "encoder_input must be left out: layers of llama read no encoder, got Tensor; leave it "
        "out, or load a model with cross attention"
    )


def test_the_plan_counts_rows_and_what_makes_them(audio: Audio, tmp_path: Path) -> None:
    plan = explain_model({"model": str(audio.folder), "max_num_seqs": 8}, gpu=None)
    [group] = [group for group in plan.fit.groups if group.encoder_len]
    assert group.encoder_len == MOST_FRAMES // 2
    assert group.num_pages - 1 >= 8 * -(-group.encoder_len // group.page_size)
    rows = (group.num_pages - 1) * group.page_size
    assert f"{rows} rows of encoders in encoder: 20 of a request at most" in show(plan)
    longer = audio.theirs.config.to_dict() | {"max_source_positions": 15000}
    (tmp_path / "config.json").write_text(json.dumps(longer))
    counted = explain_model({"model": str(tmp_path), "max_num_seqs": 8}, gpu=None).fit
    widest = 15000 * audio.theirs.config.encoder_ffn_dim * 4  # of a feed-forward block
    assert counted.activations_bytes > widest > plan.fit.activations_bytes


def test_no_endpoint_takes_audio(audio: Audio) -> None:
    config = parse_config(audio.theirs.config.to_dict())
    with pytest.raises(
        ConfigError, match="got whisper, whose requests bring encoder_input; use it"
    ):
        require_served(config)
    require_served(replace(config, encoder_input=None))


def test_a_black_box_keeps_what_was_heard(audio: Audio, tmp_path: Path) -> None:
    with boxed(audio, tmp_path, kept_steps=6, page_size=4, chunked_prefill_size=9) as llm:
        llm.generate(ASKED, SHORT)
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    assert replayed_as_it_was(record, sanitize=True).num_restored > 0


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"scale_embedding": True}, "scale_embedding must be absent"),
        ({"activation_function": "relu"}, "activation_function must be 'gelu', got 'relu'"),
        ({"decoder_attention_heads": 5}, "decoder_attention_heads must be a divisor of d_model 48"),
        ({"encoder_layers": 5000}, "encoder_layers must be at most 1000, got 5000"),
    ],
)
def test_files_of_other_whispers_are_refused(audio: Audio, changed: Any, named: str) -> None:
    with pytest.raises(ModelError, match=named):
        parse_config(audio.theirs.config.to_dict() | changed)


def test_blocks_are_two_layers_each(audio: Audio) -> None:
    config = parse_config(audio.theirs.config.to_dict())
    assert config.max_position == CONTEXT
    kinds = [[cached.kind for cached in layer.caches] for layer in config.layers]
    assert kinds == [[CacheKind.TOKENS], [CacheKind.ENCODER]] * 2


def test_biases_of_keys_are_zeros_unless_a_file_has_them(audio: Audio, tmp_path: Path) -> None:
    shutil.copytree(audio.folder, tmp_path, dirs_exist_ok=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.encoder.layers.0.self_attn.k_proj.bias"] = torch.ones(48)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    model = load_model(
        locate(str(tmp_path)),
        parse_config(audio.theirs.config.to_dict()),
        parallel=ALONE,
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    first, second = (layer.qkv.bias.split(48)[1] for layer in model.encoder.layers)
    assert first.eq(1).all()
    assert second.eq(0).all()


def test_rows_in_half_precision_stay_finite(audio: Audio) -> None:
    config = parse_config(audio.theirs.config.to_dict())
    placement = Placement(torch.device("cpu"), torch.float16, DENSE)
    layer = AudioLayer(config, config.encoder_input, placement)
    for parameter in layer.parameters():
        parameter.zero_()
    layer.mlp.down.bias.fill_(100.0)
    x = torch.full((3, 48), torch.finfo(torch.float16).max, dtype=torch.float16)
    rows = layer(x, torch.tensor([0, 3], dtype=torch.int32))
    assert torch.equal(rows, torch.full_like(x, torch.finfo(torch.float16).max - 1000))


def test_ranks_do_not_share_it(audio: Audio) -> None:
    with pytest.raises(ConfigError, match="layers that read an encoder are not split among ranks"):
        explain_model({"model": str(audio.folder), "tensor_parallel_size": 3}, gpu=None)
