"""An 8-bit KV cache: the engine's answers are transformers' with K and V rounded to e4m3.

transformers keeps its own cache and rounds by torch's own cast where it attends, so writing,
scaling, paging and reading back are all held to something that has none of them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from llm_cases import (
    GREEDY,
    Checkpoint,
    Tokens,
    assert_idle,
    assert_same_or_tie,
    llm_of,
    make_checkpoint,
    make_head64_checkpoint,
    make_llm,
    random_prompts,
    shared_prompts,
    tokens_of,
)
from safetensors.torch import save_file
from torch import Tensor

from covers import Cell, pairwise, slow_unless
from paceline.core.errors import WeightsError
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput

FP8 = {"kv_cache_dtype": "fp8"}
# Layer -> (K's scale, V's scale) in the checkpoint; the other layers have none, which means 1.
SCALES = {0: (0.3, 0.02), 1: (0.05, 0.7)}
SCORED = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=20)
TIGHT = {1: (121, 121), 16: (13, 13), 64: (5, 5)}
# A float32 sum in another order may round a number to the neighbour in e4m3, an eighth away: 0.003
# was seen.  Without rounding it is 0.12 and more.
TOLERANCE = 1e-2


LLAMA = transformers.models.llama.modeling_llama
GEMMA = transformers.models.gemma3.modeling_gemma3
PLAIN = {family: family.eager_attention_forward for family in (LLAMA, GEMMA)}


def rounded(x: Tensor, scale: float) -> Tensor:
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


def round_attention(patch: pytest.MonkeyPatch, family: Any, scales: dict[int, Any]) -> None:
    """Make a transformers model family attend to rounded K and V."""
    plain = PLAIN[family]

    def attend(module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        k_scale, v_scale = scales.get(module.layer_idx, (1.0, 1.0))
        return plain(module, q, rounded(k, k_scale), rounded(v, v_scale), *args, **kwargs)

    patch.setattr(family, "eager_attention_forward", attend)


def add_scales(checkpoint: Checkpoint, scales: dict[int, tuple[float, float]]) -> None:
    (checkpoint.folder / "model.safetensors.index.json").unlink()
    tensors = {
        f"model.layers.{layer}.self_attn.{side}_proj.{side}_scale": torch.tensor([scale])
        for layer, pair in scales.items()
        for side, scale in zip("kv", pair, strict=True)
    }
    save_file(tensors, checkpoint.folder / "scales.safetensors")


@dataclass(frozen=True)
class Truth:
    """A checkpoint whose transformers model rounds K and V, prompts and its greedy answers."""

    checkpoint: Checkpoint
    prompts: list[list[int]]
    answers: list[Tokens]

    def check(self, index: int, token_ids: Tokens) -> None:
        gap_of = self.checkpoint.gap(self.prompts[index])
        assert_same_or_tie(token_ids, self.answers[index], gap_of)


def make_truth(checkpoint: Checkpoint) -> Truth:
    prompts = shared_prompts()
    return Truth(checkpoint, prompts, [checkpoint.generate(p, GREEDY.max_tokens) for p in prompts])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> Iterator[Truth]:
    """With scales in the checkpoint."""
    checkpoint = make_checkpoint("llama-gqa2-untied", tmp_path_factory.mktemp("llama"))
    add_scales(checkpoint, SCALES)
    with pytest.MonkeyPatch.context() as patch:
        round_attention(patch, LLAMA, SCALES)
        yield make_truth(checkpoint)


@pytest.fixture(scope="module")
def gemma(tmp_path_factory) -> Iterator[Truth]:
    """Windows, per-head norms, no scales."""
    case = "gemma3-untied-full-rope-linear"
    checkpoint = make_checkpoint(case, tmp_path_factory.mktemp("gemma"))
    with pytest.MonkeyPatch.context() as patch:
        round_attention(patch, GEMMA, {})
        yield make_truth(checkpoint)


def error_of(output: RequestOutput, theirs: Tensor) -> float:
    """The largest difference of any log-probability from `theirs` [tokens, vocab] logits."""
    logprobs = output.outputs[0].logprobs
    top_ids = torch.tensor([row.top_ids for row in logprobs])
    top = torch.tensor([row.top_values for row in logprobs])
    wanted = theirs[len(output.prompt_token_ids) - 1 :].log_softmax(-1)
    return (top - wanted.gather(1, top_ids)).abs().max().item()


@pytest.mark.parametrize("model", ["llama", "gemma"])
@pytest.mark.parametrize("chunk", [7, 1024])
def test_logprobs_are_those_of_rounded_keys_and_values(
    model: str, chunk: int, request: pytest.FixtureRequest
) -> None:
    """Prefill in chunks and whole, decode, and a prefix hit."""
    truth: Truth = request.getfixturevalue(model)
    options = FP8 | {"chunked_prefill_size": chunk, "page_size": 4}
    with make_llm(truth.checkpoint, **options) as llm:
        fresh = llm.generate(truth.prompts[:3], SCORED)
        cached = llm.generate(truth.prompts[0], SCORED)
        assert_idle(llm)
    assert cached[0].metrics.cached_tokens
    for output in [*fresh, *cached]:
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
        assert error_of(output, truth.checkpoint.logits(ids)) < TOLERANCE


def test_rounding_shows_and_is_small(llama: Truth) -> None:
    """What is not rounded fails the test above, and is off by a tenth of a logit at most."""
    with make_llm(llama.checkpoint) as llm:
        [output] = llm.generate(llama.prompts[:1], SCORED)
    ids = [*output.prompt_token_ids, *output.outputs[0].token_ids[:-1]]
    theirs = llama.checkpoint.logits(ids)
    error = error_of(output, theirs)
    assert 10 * TOLERANCE < error < 0.1 * theirs.abs().max()


AXES = {
    "enforce_eager": (False, True),
    "page_size": (1, 16, 64),
    "enable_prefix_cache": (True, False),
    "chunked_prefill_size": (7, 1024),
    "overlap": (True, False),
    "pool": ("roomy", "tight"),
    "stream": ("inline", "deferred"),
}


@pytest.mark.parametrize("model", [pytest.param("llama", marks=pytest.mark.slow), "gemma"])
@pytest.mark.parametrize(
    "cell",
    slow_unless(lambda cell: cell["stream"] == "inline" or cell["page_size"] == 16, pairwise(AXES)),
)
def test_greedy_tokens_do_not_depend_on_how_they_are_computed(
    model: str, cell: Cell, request: pytest.FixtureRequest
) -> None:
    truth: Truth = request.getfixturevalue(model)
    groups = 2 if model == "gemma" else 1
    tight = {page_size: pages[:groups] for page_size, pages in TIGHT.items()}
    with llm_of(truth.checkpoint, cell, tight_pages=tight, **FP8) as llm:
        outputs = llm.generate(truth.prompts, GREEDY)
        again = llm.generate(truth.prompts[4:5], GREEDY)
        assert_idle(llm)
    for index, token_ids in enumerate(tokens_of(outputs)):
        truth.check(index, token_ids)
    truth.check(4, tokens_of(again)[0])
    preemptions = sum(output.metrics.preemptions for output in outputs)
    assert (preemptions > 0) == (cell["pool"] == "tight")


def test_logprobs_are_bit_equal_at_every_page_size_and_in_a_graph(llama: Truth) -> None:
    seen = []
    for options in ({"page_size": 1}, {"page_size": 16}, {"enforce_eager": True}):
        with make_llm(llama.checkpoint, **FP8, **options) as llm:
            seen.append([output.outputs for output in llm.generate(llama.prompts[:3], SCORED)])
    assert seen[0] == seen[1] == seen[2]


def test_the_triton_interpreter_reads_what_the_pool_wrote(tmp_path) -> None:
    checkpoint = make_head64_checkpoint(tmp_path)
    [prompt] = random_prompts((33,))
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=20)
    with make_llm(checkpoint, attention_backend="triton", max_num_seqs=1, **FP8) as llm:
        [output] = llm.generate([prompt], params)
    with pytest.MonkeyPatch.context() as patch:
        checkpoint.theirs.set_attn_implementation("eager")
        round_attention(patch, LLAMA, {})
        theirs = checkpoint.logits([*prompt, *output.outputs[0].token_ids[:-1]])
    assert error_of(output, theirs) < TOLERANCE


def events_of(llm: Any) -> dict[str, str]:
    return {event["reason"]: event["detail"] for event in llm.report()["events"]}


def test_a_scale_of_no_layer_is_refused(tmp_path) -> None:
    checkpoint = make_checkpoint("llama-gqa2-untied", tmp_path)
    add_scales(checkpoint, {0: (0.5, 0.5), 7: (0.5, 0.5)})
    text = r"scales of the KV cache must be those of layers 0 to 1, got layers \[7\]; check that"
    with pytest.raises(WeightsError, match=text):
        make_llm(checkpoint, **FP8)


def test_where_scales_come_from_is_an_event(llama: Truth, gemma: Truth) -> None:
    with make_llm(llama.checkpoint, **FP8) as llm:
        assert events_of(llm)["kv_scales"] == "4 of 4 scales come from the checkpoint"
    with make_llm(gemma.checkpoint, **FP8) as llm:
        detail = "0 of 6 scales come from the checkpoint; the others are 1"
        assert events_of(llm)["kv_scales"] == detail
    with make_llm(llama.checkpoint) as llm:
        detail = "those of the checkpoint; the cache is float32"
        assert events_of(llm)["kv_scales_unused"] == detail
    with make_llm(gemma.checkpoint) as llm:
        assert "kv_scales_unused" not in events_of(llm)
