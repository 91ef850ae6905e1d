"""Prompt log-probabilities, several completions and plug-ins on a GPU, beside the CPU's answers."""

import pytest
import torch

import gpu_check
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.llm import LLM

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

PROMPTS = [[(7 * i * i + row) % 400 + 4 for i in range(30 + 25 * row)] for row in range(4)]
TOLERANCE = 5e-3  # natural log units, float32 with products in TF32 allowed


def engine(device: str, **options: object) -> LLM:
    small = {"max_num_seqs": 8, "max_model_len": 256, "chunked_prefill_size": 32}
    return LLM("bundled", device=device, dtype="float32", **small, **options)


def prompt_scores(llm: LLM, *, sync_is_an_error: bool) -> list[torch.Tensor]:
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=3)
    trackers = llm.submit(PROMPTS, params)
    with gpu_check.no_sync(sync_is_an_error):
        while not all(tracker.is_finished for tracker in trackers):
            llm.engine.step()
    rows = [tracker.snapshot().prompt_logprobs[1:] for tracker in trackers]
    return [torch.tensor([row.chosen for row in of_prompt]) for of_prompt in rows]


def test_prompt_scores_are_the_cpus_and_the_loop_never_waits_for_them() -> None:
    with engine("cpu") as llm:
        wanted = prompt_scores(llm, sync_is_an_error=False)
    with engine("cuda") as llm:
        prompt_scores(llm, sync_is_an_error=False)  # compiles kernels and captures graphs
        found = prompt_scores(llm, sync_is_an_error=True)
    for ours, theirs in zip(found, wanted, strict=True):
        assert (ours - theirs).abs().max() < TOLERANCE


def test_a_plug_in_is_replayed_as_it_runs_eagerly() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, extra_args={"length_decay": [4, 1.2]})
    names = ["example_processor:LengthDecay"]
    answers = []
    for enforce_eager in (True, False):
        with engine("cuda", logits_processors=names, enforce_eager=enforce_eager) as llm:
            answers.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)])
    assert answers[0] == answers[1]
    assert all(len(answer) < 40 for answer in answers[0])


def test_completions_share_the_prompt_and_differ() -> None:
    params = SamplingParams(seed=5, max_tokens=24, n=6, ignore_eos=True)
    with engine("cuda") as llm:
        [output] = llm.generate(PROMPTS[3], params)
        [alone] = llm.generate(PROMPTS[3], SamplingParams(seed=5, max_tokens=24, ignore_eos=True))
    assert len({each.token_ids for each in output.outputs}) == 6
    assert output.outputs[0].token_ids == alone.outputs[0].token_ids
