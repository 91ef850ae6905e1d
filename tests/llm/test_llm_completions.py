"""Several completions of one prompt: equal to requests of their own, and they share its KV."""

from dataclasses import replace

import pytest
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    llm_of,
    make_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    text_of,
)

from covers import Cell
from paceline.core.errors import CapacityError, RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.seeds import child_seed
from paceline.core.step import Step
from paceline.llm.boot import Knobs

SAMPLED = SamplingParams(seed=3, max_tokens=20, ignore_eos=True)


def chunk_tokens(steps: list[Step]) -> int:
    """Tokens that were computed several to a row: parts of prompts."""
    return sum(sum(n for n in step.layout.extend_lens if n > 1) for step in steps)


CELLS: dict[str, Cell] = {
    "shared": {"page_size": 4},
    "twin": {"page_size": 4, "overlap": False},
    "chunked": {"page_size": 4, "chunked_prefill_size": 7},
    "no-cache": {"enable_prefix_cache": False},
    "one-row": {"page_size": 4, "max_num_seqs": 1},
    "tight": {"pool": "tight"},
    "deferred": {"stream": "deferred", "page_size": 4},
}


@pytest.mark.parametrize("name", CELLS)
def test_each_completion_is_that_of_a_request_with_its_seed(
    checkpoint: Checkpoint, name: str
) -> None:
    prompts = random_prompts([30, 9])
    with llm_of(checkpoint, CELLS[name], tight_pages={16: (9,)}, margin=0) as llm:
        outputs = llm.generate(prompts, replace(SAMPLED, n=4))
        assert_idle(llm)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert [each.index for each in output.outputs] == [0, 1, 2, 3]
            seeded = [replace(SAMPLED, seed=child_seed(3, index)) for index in range(4)]
            apart = llm.generate([prompt] * 4, seeded)
            for each, other in zip(output.outputs, apart, strict=True):
                assert each.token_ids == other.outputs[0].token_ids
                assert each.text == text_of(each.token_ids)
            assert len({each.token_ids for each in output.outputs}) == 4
            assert output.metrics.output_tokens == 80


def test_the_first_completion_is_the_request_with_n_1(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([12])
    with make_llm(checkpoint) as llm:
        [one] = llm.generate(prompt, SAMPLED)
        [five] = llm.generate(prompt, replace(SAMPLED, n=5))
    assert five.outputs[0].token_ids == one.outputs[0].token_ids


def test_the_prompt_is_computed_once(checkpoint: Checkpoint) -> None:
    """The others compute what is behind its last full page: one token each."""
    [prompt] = random_prompts([41])
    with make_llm(checkpoint, page_size=4, chunked_prefill_size=16) as llm:
        with recorded_steps(llm) as steps:
            [output] = llm.generate(prompt, replace(SAMPLED, n=6))
        assert chunk_tokens(steps) == 16 + 16 + 9
    assert output.metrics.cached_tokens == 0


def test_without_a_cache_each_computes_the_prompt_at_once(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([41])
    with make_llm(checkpoint, enable_prefix_cache=False) as llm, recorded_steps(llm) as steps:
        llm.generate(prompt, replace(SAMPLED, n=6))
    assert steps[0].layout.extend_lens == (41,) * 6


def test_a_prompt_within_one_page_waits_for_nobody(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([9])
    with make_llm(checkpoint, page_size=16) as llm, recorded_steps(llm) as steps:
        llm.generate(prompt, replace(SAMPLED, n=6))
    assert steps[0].layout.extend_lens == (9,) * 6


def test_others_pass_while_a_prompt_to_share_is_computed(checkpoint: Checkpoint) -> None:
    long, short = random_prompts([60, 5])
    with make_llm(checkpoint, page_size=4, chunked_prefill_size=8) as llm:
        with recorded_steps(llm) as steps:
            llm.generate([long, short], [replace(SAMPLED, n=3), SAMPLED])
        assert steps[0].layout.extend_lens == (8, 5)


def test_greedy_completions_are_equal_and_transformers(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    with make_llm(checkpoint) as llm:
        [output] = llm.generate(prompt, replace(GREEDY, n=3))
    wanted = checkpoint.generate(prompt, GREEDY.max_tokens)
    assert [each.token_ids for each in output.outputs] == [wanted] * 3


def test_snapshots_carry_all_and_grow_to_the_end(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20])
    params = replace(SAMPLED, n=3)
    with make_llm(checkpoint) as llm:
        shown = list(llm.generate(prompt, params, stream=True))
        [whole] = llm.generate(prompt, params)
    assert {len(output.outputs) for output in shown} == {3}
    assert [output.finished for output in shown] == [False] * (len(shown) - 1) + [True]
    assert shown[-1].outputs == whole.outputs
    for output in shown:
        for part, final in zip(output.outputs, whole.outputs, strict=True):
            assert part.token_ids == final.token_ids[: len(part.token_ids)]


def test_a_request_ends_when_its_last_completion_does(checkpoint: Checkpoint) -> None:
    """One stops at a stop string, which the host finds; the others go on."""
    [prompt] = random_prompts([20])
    with make_llm(checkpoint) as llm:
        [free] = llm.generate(prompt, replace(SAMPLED, n=3, max_tokens=30))
        stop = free.outputs[1].text[10:14]
        [output] = llm.generate(prompt, replace(SAMPLED, n=3, max_tokens=30, stop=stop))
        assert_idle(llm)
    reasons = [each.finish_reason for each in output.outputs]
    assert reasons[1] == "stop"
    assert "length" in reasons
    for each, whole in zip(output.outputs, free.outputs, strict=True):
        assert each.text == whole.text.split(stop)[0]


@pytest.mark.parametrize("turns", [0, 1, 3, 6])
def test_abort_ends_all(checkpoint: Checkpoint, turns: int) -> None:
    [prompt] = random_prompts([30])
    with make_llm(checkpoint, page_size=4) as llm:
        [tracker] = llm.submit(prompt, replace(SAMPLED, n=4))
        for _ in range(turns):
            llm.engine.step()
        assert llm.abort(tracker.request.request_id)
        assert not llm.abort(tracker.request.request_id)
        scheduler = llm.engine.scheduler
        assert scheduler.num_running == scheduler.num_waiting == 0
        assert [each.finish_reason for each in tracker.snapshot().outputs] == ["abort"] * 4
        assert_idle(llm)


def test_a_broken_prompt_fails_all(tmp_path) -> None:
    def break_head(theirs) -> None:
        theirs.lm_head.weight[:] = float("nan")

    broken = make_checkpoint("llama-gqa2-untied", tmp_path, change=break_head)
    [prompt] = random_prompts([30])
    with make_llm(broken, page_size=4) as llm:
        [output] = llm.generate(prompt, replace(SAMPLED, n=3))
        assert_idle(llm)
    assert [each.finish_reason for each in output.outputs] == ["error"] * 3


def test_prompt_logprobs_are_computed_once_for_all(checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([30])
    params = replace(SAMPLED, n=3, prompt_logprobs=1)
    with make_llm(checkpoint, page_size=4) as llm, recorded_steps(llm) as steps:
        [output] = llm.generate(prompt, params)
    assert sum(span.length for step in steps for span in step.prompt_spans) == 29
    assert len(output.prompt_logprobs) == 30


def test_nothing_is_queued_when_one_completion_cannot_be(checkpoint: Checkpoint) -> None:
    params = replace(SAMPLED, n=3)
    with make_llm(checkpoint) as llm:
        taken = llm.engine.add("a#2", [5, 6], SAMPLED)
        with pytest.raises(RequestError, match="request_id must be new, got 'a#2', which is still"):
            llm.engine.add("a", [5, 6], params)
        assert llm.engine.scheduler.num_waiting == 1
        assert llm.abort("a#2")
        assert taken.is_finished
        assert_idle(llm)
    with make_llm(checkpoint, knobs=Knobs(num_pages=(3,))) as llm:
        with pytest.raises(CapacityError):
            llm.engine.add("a", [5] * 60, params)
        assert_idle(llm)


def test_child_seeds_are_the_outputs_of_the_published_generator() -> None:
    """SplitMix64 of seed 1234567 (Rosetta Code); the first is the seed itself."""
    assert [child_seed(1234567, index) % 2**64 for index in range(3)] == [
        1234567,
        3203168211198807973,
        9817491932198370423,
    ]
