"""Sampling parameters through the whole engine."""

from dataclasses import replace

import pytest
from llm_cases import (
    CONTEXT,
    EOS,
    GREEDY,
    Checkpoint,
    Tokens,
    assert_idle,
    llm_of,
    make_llm,
    random_prompts,
    shared_prompts,
    text_of,
    tokens_of,
)

from cache_probe import cached_len
from covers import Cell
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RowLogprobs
from paceline.engine.answers.completion import Completion
from paceline.engine.request import Request
from paceline.engine.scheduler import RequestUpdate
from paceline.llm.llm import LLM

SEEDED = [
    SamplingParams(temperature=0.8, top_p=0.9, seed=1, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=1.3, top_k=20, seed=2, max_tokens=28, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.02, seed=3, max_tokens=28, ignore_eos=True),
    SamplingParams(
        temperature=0.9, seed=4, max_tokens=28, ignore_eos=True, presence_penalty=0.7,
        frequency_penalty=0.3, repetition_penalty=1.2, logit_bias={9: 4.0, 30: -100.0},
    ),
    replace(GREEDY, max_tokens=28, logprobs=3),
    SamplingParams(temperature=2.0, seed=-6, max_tokens=28, min_tokens=28),
]  # fmt: skip


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> LLM:
    return make_llm(checkpoint, enable_prefix_cache=False)


@pytest.fixture(scope="module")
def alone(checkpoint: Checkpoint) -> list[Tokens]:
    """Each seeded request by itself, eager, without a cache."""
    with make_llm(checkpoint, enable_prefix_cache=False, enforce_eager=True) as llm:
        pairs = zip(shared_prompts(), SEEDED, strict=True)
        return [tokens_of(llm.generate(prompt, params))[0] for prompt, params in pairs]


def one(llm: LLM, prompt, params: SamplingParams):
    """The completion of one request."""
    [output] = llm.generate(prompt, params)
    return output.outputs[0]


VARIANTS: dict[str, Cell] = {
    "batched": {},
    "eager": {"enforce_eager": True},
    "chunked": {"chunked_prefill_size": 7, "page_size": 1},
    "twin": {"overlap": False},
    "preempted": {"pool": "tight"},
    "preempted-twin": {"pool": "tight", "overlap": False, "chunked_prefill_size": 7},
    "deferred-poisoned": {"stream": "deferred", "pool": "tight"},
}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_seeded_answer_never_changes(
    checkpoint: Checkpoint, alone: list[Tokens], name: str
) -> None:
    with llm_of(checkpoint, VARIANTS[name], tight_pages={16: (13,)}, margin=0) as llm:
        prompts = shared_prompts()
        together = llm.generate(prompts, SEEDED)
        again = llm.generate(prompts[::-1], SEEDED[::-1])[::-1]  # from the cache, other rows
        assert_idle(llm)
    assert tokens_of(together) == alone
    assert tokens_of(again) == alone
    preemptions = sum(output.metrics.preemptions for output in together)
    assert (preemptions > 0) == (VARIANTS[name].get("pool") == "tight")


def test_different_seeds_differ_and_equal_seeds_agree(llm: LLM) -> None:
    [prompt] = random_prompts([12])
    params = [SamplingParams(seed=seed, max_tokens=20, ignore_eos=True) for seed in (1, 2, 3, 1)]
    *different, again = tokens_of(llm.generate([prompt] * 4, params))
    assert len(set(different)) == 3
    assert again == different[0]


def test_requests_without_a_seed_differ_and_the_engine_seed_repeats_them(
    checkpoint: Checkpoint,
) -> None:
    [prompt] = random_prompts([12])
    params = SamplingParams(max_tokens=20, ignore_eos=True)
    runs = []
    for seed in (7, 7, 1000):
        with make_llm(checkpoint, seed=seed) as llm:
            runs.append(tokens_of(llm.generate([prompt] * 3, params)))
    assert len(set(runs[0])) == 3
    assert runs[0] == runs[1]
    assert not set(runs[0]) & set(runs[2])


def test_a_greedy_row_is_the_same_beside_sampled_rows(llm: LLM, checkpoint: Checkpoint) -> None:
    """The step runs the widest sampler any row needs."""
    prompts = shared_prompts()[:3]
    theirs = checkpoint.generate(prompts[0], 30)
    greedy = replace(GREEDY, max_tokens=30)
    for other in SEEDED:
        outputs = llm.generate(prompts, [greedy, other, other])
        assert outputs[0].outputs[0].token_ids == theirs


def test_penalised_greedy_tokens_are_transformers(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    params = replace(GREEDY, repetition_penalty=1.4)
    theirs = checkpoint.generate(prompt, GREEDY.max_tokens, repetition_penalty=1.4)
    assert one(llm, prompt, params).token_ids == theirs
    assert theirs != checkpoint.generate(prompt, GREEDY.max_tokens)


def test_top_k_one_is_greedy(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    params = SamplingParams(temperature=5.0, top_k=1, seed=9, max_tokens=20, ignore_eos=True)
    assert one(llm, prompt, params).token_ids == checkpoint.generate(prompt, 20)


def test_a_bias_forces_and_forbids_a_token(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    forced = SamplingParams(temperature=1.0, logit_bias={77: 100.0}, max_tokens=8)
    assert one(llm, prompt, forced).token_ids == (77,) * 8
    first = checkpoint.generate(prompt, 1)[0]
    forbidden = replace(GREEDY, logit_bias={first: -100.0})
    assert first not in one(llm, prompt, forbidden).token_ids


def test_logprobs_are_there_exactly_when_asked_for(llm: LLM) -> None:
    """Rows of one batch each get what they asked for."""
    wanted = [None, 0, 1, 5, 20, None]
    params = [SamplingParams(seed=0, max_tokens=6, ignore_eos=True, logprobs=n) for n in wanted]
    for number, output in zip(wanted, llm.generate(shared_prompts(), params), strict=True):
        found = output.outputs[0].logprobs
        if number is None:
            assert found is None
            continue
        assert len(found) == 6
        for row, token in zip(found, output.outputs[0].token_ids, strict=True):
            assert len(row.top_ids) == len(row.top_values) == number
            assert sorted(row.top_values, reverse=True) == list(row.top_values)
            assert all(row.chosen <= best for best in row.top_values[:1])
            assert row.chosen in row.top_values or token not in row.top_ids


@pytest.fixture(scope="module")
def ending(checkpoint: Checkpoint) -> tuple[list[int], Tokens]:
    """A prompt whose greedy answer holds an end token at index 1..20, and that answer."""
    for prompt in random_prompts([10] * 300, seed=8):
        answer = checkpoint.generate(prompt, 40)
        at = next((i for i, token in enumerate(answer) if token in EOS), 0)
        if 1 <= at <= 20:
            return prompt, answer
    raise AssertionError("no prompt ends")


def first_end(answer: Tokens) -> int:
    return next(i for i, token in enumerate(answer) if token in EOS)


def test_an_end_token_stops(llm: LLM, ending: tuple[list[int], Tokens]) -> None:
    prompt, answer = ending
    at = first_end(answer)
    found = one(llm, prompt, replace(GREEDY, ignore_eos=False))
    assert found.token_ids == answer[: at + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", answer[at])


def test_an_ignored_end_token_is_a_token(llm: LLM, ending: tuple[list[int], Tokens]) -> None:
    prompt, answer = ending
    found = one(llm, prompt, replace(GREEDY, max_tokens=40))
    assert found.token_ids == answer
    assert (found.finish_reason, found.stop_reason) == ("length", None)


def test_min_tokens_holds_the_end_back_as_transformers_does(
    llm: LLM, checkpoint: Checkpoint, ending: tuple[list[int], Tokens]
) -> None:
    prompt, answer = ending
    least = first_end(answer) + 5
    found = one(llm, prompt, replace(GREEDY, max_tokens=40, ignore_eos=False, min_tokens=least))
    theirs = checkpoint.generate(prompt, 40, eos_token_id=list(EOS), min_new_tokens=least)
    assert found.token_ids == theirs
    assert len(theirs) >= least
    assert not set(theirs[:least]) & set(EOS)


def test_a_stop_id_stops_and_is_kept(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    answer = checkpoint.generate(prompt, 30)
    at = answer.index(answer[11])
    found = one(llm, prompt, replace(GREEDY, stop_token_ids=(159, answer[11])))
    assert found.token_ids == answer[: at + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", answer[11])


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_across_tokens_cuts_text_and_tokens(
    checkpoint: Checkpoint, overlap: bool, include: bool
) -> None:
    """The string is the second half of one token and the first half of the next."""
    [prompt] = random_prompts([20], seed=4)
    answer = checkpoint.generate(prompt, 30)
    text = text_of(answer)
    start = next(i for i in range(13, 60, 2) if text.find(text[i : i + 2]) == i)
    stop = text[start : start + 2]
    params = replace(GREEDY, stop=(stop, "never?"), include_stop_str_in_output=include, logprobs=1)
    with make_llm(checkpoint, overlap=overlap) as llm:
        found = one(llm, prompt, params)
        assert_idle(llm)
        kept = [*prompt, *answer[: (start + 1) // 2 + 1]]
        cached = cached_len(llm.engine.scheduler._cache, [*kept, *answer[(start + 1) // 2 + 1 :]])
    assert found.text == text[: start + 2 * include]
    assert found.token_ids == answer[: (start + 1) // 2 + 1]
    assert len(found.logprobs) == len(found.token_ids)
    assert (found.finish_reason, found.stop_reason) == ("stop", stop)
    assert cached <= len(kept)


def test_tokens_that_came_behind_a_stop_string_are_dropped(llm: LLM) -> None:
    """An update may bring several tokens; the scheduler is told how many count."""
    params = replace(GREEDY, stop=text_of((11, 12))[1:3], logprobs=0)
    request = Request.make("r", [4, 5], params, context_len=CONTEXT)
    completion = Completion(request, tokenizer=llm.tokenizer)
    rows = tuple(RowLogprobs(chosen=-float(i), top_ids=(), top_values=()) for i in range(5))
    assert completion.apply(RequestUpdate(request, (10, 11, 12, 13, 14), rows, None)) == 3
    found = completion.snapshot()
    assert found.token_ids == (10, 11, 12)
    assert [each.chosen for each in found.logprobs] == [row.chosen for row in rows[:3]]
    assert [each.token_id for each in found.logprobs] == [10, 11, 12]
    assert found.text == text_of((10, 11))[:3]


def test_a_stop_string_is_never_shown_in_part(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([20], seed=4)
    text = text_of(checkpoint.generate(prompt, 30))
    stop = text[13:18]
    before = text[: text.find(stop)]
    shown = list(llm.generate(prompt, replace(GREEDY, stop=stop), stream=True))
    assert shown[-1].outputs[0].text == before
    assert all(before.startswith(output.outputs[0].text) for output in shown)


def test_max_tokens_is_exact_and_none_means_the_context(llm: LLM) -> None:
    [prompt] = random_prompts([20], seed=4)
    for number in (1, 2, 33):
        found = one(llm, prompt, replace(GREEDY, max_tokens=number))
        assert (len(found.token_ids), found.finish_reason) == (number, "length")
    for number in (None, 10_000):
        found = one(llm, prompt, replace(GREEDY, max_tokens=number))
        assert (len(found.token_ids), found.finish_reason) == (CONTEXT - 20, "length")


def test_the_longest_prompt_gets_one_token(llm: LLM, checkpoint: Checkpoint) -> None:
    [prompt] = random_prompts([CONTEXT - 1])
    found = one(llm, prompt, replace(GREEDY, max_tokens=None))
    assert found.token_ids == checkpoint.generate(prompt, 1)
    assert found.finish_reason == "length"
