"""A request with a grammar says what the grammar allows, and nothing changes for any other."""

from dataclasses import replace
from typing import Any

import pytest
from grammar_turns import Turns
from llm_cases import (
    EOS,
    GREEDY,
    VOCAB,
    Checkpoint,
    Tokens,
    assert_idle,
    llm_of,
    make_llm,
    random_prompts,
    recorded_steps,
    text_of,
    tokens_of,
)

from covers import Cell
from paceline.core.errors import RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.request import FinishReason
from paceline.llm.llm import LLM

TURNS = Turns([range(10, 20), range(40, 90, 7), (1, 159)], length=20)
ENDS = Turns([range(10, 20), range(40, 90, 7)], length=9, end=EOS[1])
ALL = Turns([range(VOCAB)], length=10**6)
PROMPTS = random_prompts((20, 9, 14, 31))
OF_EACH = [None, TURNS, None, ENDS]
PARAMS = {
    "greedy": GREEDY,
    "drawn": SamplingParams(seed=5, max_tokens=30, ignore_eos=True),
    "filters": SamplingParams(seed=6, temperature=1.3, top_p=0.8, top_k=7, min_p=0.01),
    "processors": SamplingParams(
        temperature=0.0,
        max_tokens=30,
        min_tokens=9,
        logit_bias={12: 5.0, 100: 100.0, EOS[1]: 50.0},
        repetition_penalty=1.3,
        frequency_penalty=0.5,
    ),
    "scored": SamplingParams(seed=8, temperature=0.7, top_p=0.9, logprobs=5, max_tokens=12),
}
CELLS: dict[str, Cell] = {
    "eager": {"enforce_eager": True},
    "recorded": {},
    "twin": {"overlap": False},
    "chunked": {"chunked_prefill_size": 7, "page_size": 4},
    "tight": {"pool": "tight"},
    "deferred": {"stream": "deferred"},
    "deferred-eager": {"stream": "deferred", "enforce_eager": True},
    "one-row": {"max_num_seqs": 1},
}


@pytest.fixture(scope="module")
def llm(checkpoint: Checkpoint) -> Any:
    with make_llm(checkpoint, sanitize=True) as made:
        yield made
        assert_idle(made)


def params_of(name: str) -> list[SamplingParams]:
    """With a seed for each prompt."""
    params = PARAMS[name]
    return [replace(params, seed=100 + index) for index in range(len(PROMPTS))]


def assert_obeys(output: RequestOutput, grammar: Turns) -> None:
    [answer] = output.outputs
    assert answer.error is None
    assert grammar.takes(answer.token_ids), answer.token_ids


def test_greedy_answers_are_those_of_transformers_with_the_same_sets(
    checkpoint: Checkpoint, llm: LLM
) -> None:
    outputs = llm.generate(PROMPTS, GREEDY, grammar=TURNS)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        start = len(prompt)

        def allowed(batch: int, ids: Any, start: int = start) -> list[int]:
            return sorted(TURNS.allowed(len(ids) - start))

        theirs = checkpoint.generate(prompt, TURNS.length, prefix_allowed_tokens_fn=allowed)
        assert output.outputs[0].token_ids == theirs


@pytest.fixture(scope="module")
def answers(llm: LLM) -> dict[str, list[Tokens]]:
    """By the names of parameters: of a sanitized, recorded, overlapped engine."""
    told = {}
    for name in PARAMS:
        free = tokens_of(llm.generate(PROMPTS, params_of(name)))
        outputs = llm.generate(PROMPTS, params_of(name), grammar=OF_EACH)
        told[name] = tokens_of(outputs)
        assert told[name][::2] == free[::2], name
        assert_obeys(outputs[1], TURNS)
        assert_obeys(outputs[3], ENDS)
    return told


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "deferred-eager" else ())
        for name in CELLS
    ],
)
def test_others_say_what_they_say_alone_in_every_form_of_the_engine(
    checkpoint: Checkpoint, answers: dict[str, list[Tokens]], cell: str
) -> None:
    with llm_of(checkpoint, CELLS[cell], tight_pages={16: (7,)}, margin=0) as other:
        for name, expected in answers.items():
            outputs = other.generate(PROMPTS, params_of(name), grammar=OF_EACH)
            assert tokens_of(outputs) == expected, name
            preemptions = sum(output.metrics.preemptions for output in outputs)
            assert preemptions > 0 or cell != "tight" or name != "greedy"
        assert_idle(other)


@pytest.mark.parametrize(
    "params",
    [
        pytest.param(name, marks=() if name in ("drawn", "processors") else pytest.mark.slow)
        for name in PARAMS
    ],
)
def test_a_grammar_of_every_token_changes_nothing(llm: LLM, params: str) -> None:
    wanted = params_of(params)
    bound = llm.generate(PROMPTS, wanted, grammar=ALL)
    for one, other in zip(bound, llm.generate(PROMPTS, wanted), strict=True):
        [answer], [free] = one.outputs, other.outputs
        assert (answer.token_ids, answer.text) == (free.token_ids, free.text)
        assert (answer.finish_reason, answer.stop_reason) == (free.finish_reason, free.stop_reason)


def test_log_probabilities_are_of_what_the_model_would_say_unasked(llm: LLM) -> None:
    params = replace(GREEDY, logprobs=5, max_tokens=1)
    [free] = llm.generate([PROMPTS[0]], params)
    [bound] = llm.generate([PROMPTS[0]], params, grammar=TURNS)
    [one], [other] = bound.outputs[0].logprobs, free.outputs[0].logprobs
    assert one.top_ids == other.top_ids
    assert one.top_values == other.top_values
    assert one.token_id == bound.outputs[0].token_ids[0] != other.token_id
    assert one.chosen < other.chosen


def test_a_grammar_that_is_done_stops_behind_its_last_token(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[0]], replace(GREEDY, min_tokens=46), grammar=TURNS)
    [answer] = output.outputs
    assert len(answer.token_ids) == TURNS.length
    assert answer.text == text_of(answer.token_ids)  # the last one is no stop token
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, None)


def test_an_end_token_that_is_allowed_ends_as_ever(llm: LLM) -> None:
    params = replace(GREEDY, ignore_eos=False)
    [output] = llm.generate([PROMPTS[0]], params, grammar=ENDS)
    [answer] = output.outputs
    assert answer.token_ids[-1] == EOS[1]
    assert answer.text == text_of(answer.token_ids[:-1])
    assert (answer.finish_reason, answer.stop_reason) == (FinishReason.STOP, EOS[1])


def test_max_tokens_ends_it_in_the_middle(llm: LLM) -> None:
    [output] = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=4), grammar=TURNS)
    assert len(output.outputs[0].token_ids) == 4
    assert output.outputs[0].finish_reason is FinishReason.LENGTH


def test_each_completion_has_a_fork_and_the_callers_object_stays_as_it_is(llm: LLM) -> None:
    params = SamplingParams(seed=3, n=3, max_tokens=30, ignore_eos=True)
    [output] = llm.generate([PROMPTS[0]], params, grammar=TURNS)
    answers = [each.token_ids for each in output.outputs]
    assert len(set(answers)) == 3
    assert all(TURNS.takes(answer) and len(answer) == TURNS.length for answer in answers)
    assert TURNS.said == ()


def test_a_prefix_hit_begins_where_the_grammar_does(llm: LLM) -> None:
    prompt = random_prompts((50,), seed=9)
    first, second = (llm.generate(prompt, GREEDY, grammar=TURNS)[0] for _ in range(2))
    assert second.metrics.cached_tokens > first.metrics.cached_tokens
    assert first.outputs[0] == second.outputs[0]


def test_steps_without_its_rows_know_of_no_masks_and_others_go_on(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        llm.generate(PROMPTS, GREEDY)
        with recorded_steps(llm) as steps:
            outputs = llm.generate(PROMPTS[:2], GREEDY, grammar=[None, TURNS])
        keys = llm.engine._runner._graphs.graphs
    masked = [step.masks is not None for step in steps]
    # Whoever has no grammar has a token in every step; the other in every second.
    assert len(steps) <= GREEDY.max_tokens + 2
    assert masked[: 2 * TURNS.length] == [True, False] * TURNS.length
    assert not any(masked[2 * TURNS.length :])
    for step in steps:
        if step.masks is not None:
            assert [mask.row for mask in step.masks] == [len(step.layout.rows) - 1]
    assert {key.masked for key in keys} == {False, True}
    assert outputs[0].metrics.fallbacks == ()
    assert outputs[1].metrics.fallbacks == ("grammar",)


def test_an_abort_in_the_middle_leaves_nothing(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint, sanitize=True) as llm:
        free = tokens_of(llm.generate([PROMPTS[0]], GREEDY))
        ours, bound = llm.submit(PROMPTS[:2], GREEDY, [None, TURNS])
        while bound.num_tokens < 5:
            llm.engine.step()
        assert llm.abort(bound.request.request_id)
        while not ours.is_finished:
            llm.engine.step()
        assert [ours.snapshot().outputs[0].token_ids] == free
        assert TURNS.takes(bound.snapshot().outputs[0].token_ids)
        assert_idle(llm)


class DeadEnd(Turns):
    """Allows nothing behind its last token, and does not end there."""

    @property
    def is_done(self) -> bool:
        return False


class Raises(Turns):
    def accept(self, token: int) -> None:
        super().accept(token)
        if len(self.said) == 4:
            raise KeyError("no such state")


class Early(Turns):
    """Allows an end token alone behind its last token."""


FAULTS: dict[str, tuple[Turns, SamplingParams, int, str]] = {
    "dead end": (
        DeadEnd([range(10, 20)], length=6),
        GREEDY,
        6,
        "grammar must be to allow a token behind 6 of them, got none; let it be done there",
    ),
    "raises": (
        Raises([range(10, 20)], length=6),
        GREEDY,
        4,
        r"grammar must be to follow the request token by token, got KeyError('no such state')",
    ),
    "min_tokens": (
        Turns([range(10, 20)], length=6, end=EOS[0]),
        SamplingParams(temperature=0.0, min_tokens=9),
        6,
        "got none but end tokens before min_tokens (9); lower min_tokens",
    ),
}


@pytest.mark.parametrize(
    ("fault", "overlap"),
    [
        pytest.param(
            fault, overlap, marks=() if overlap == (fault != "raises") else pytest.mark.slow
        )
        for fault in FAULTS
        for overlap in (True, False)
    ],
)
def test_a_grammar_that_fails_ends_its_own_request_alone(
    checkpoint: Checkpoint, fault: str, overlap: bool
) -> None:
    grammar, params, num_said, text = FAULTS[fault]
    with make_llm(checkpoint, sanitize=True, overlap=overlap) as llm:
        free = tokens_of(llm.generate(PROMPTS, GREEDY))
        wanted = [GREEDY, params, GREEDY, GREEDY]
        outputs = llm.generate(PROMPTS, wanted, grammar=[None, grammar, None, None])
        assert_idle(llm)
        answer = outputs[1].outputs[0]
        assert answer.finish_reason is FinishReason.ERROR
        assert answer.error is not None
        assert text in answer.error
        assert len(answer.token_ids) == num_said
        assert grammar.takes(answer.token_ids)
        assert tokens_of(outputs[::2]) == free[::2]
        assert tokens_of([outputs[3]]) == [free[3]]


@pytest.mark.parametrize(
    ("grammar", "text"),
    [
        (DeadEnd([()], length=1), "grammar must be to allow a token behind 0 of them, got none"),
        ({"json": {}}, "grammar must be an object with fork, fill, accept and is_done, got dict"),
        (Turns, "grammar must be an object with fork, fill, accept and is_done, got type"),
        ([TURNS], "grammar must be one for all or one for each of 2 prompts, got 1"),
    ],
    ids=["empty", "no grammar", "class", "count"],
)
def test_what_is_no_grammar_is_refused_before_anything_runs(
    llm: LLM, grammar: Any, text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        llm.generate(PROMPTS[:2], GREEDY, grammar=grammar)
    assert not llm.engine.has_work


def test_a_wrong_grammar_among_several_is_an_output_where_errors_are_wanted(llm: LLM) -> None:
    outputs = llm.generate(PROMPTS[:2], GREEDY, grammar=[7, TURNS], return_errors=True)
    assert outputs[0].outputs[0].finish_reason is FinishReason.ERROR
    assert_obeys(outputs[1], TURNS)


def test_bits_behind_the_vocabulary_say_nothing(checkpoint: Checkpoint) -> None:
    from paceline.engine.grammar import Constraint

    class Beyond(Turns):
        def fill(self, words: Any) -> None:
            words[-1] = -1

    kept = Constraint(Beyond([()], length=9), vocab_size=70, stop_ids=(), min_tokens=0)
    assert kept.words == bytes(8) + b"\x3f\0\0\0"


def test_a_token_that_a_processor_brought_back_ends_its_request(checkpoint: Checkpoint) -> None:
    """Unmasked by force."""
    from paceline.engine.grammar import Constraint

    kept = Constraint(TURNS, vocab_size=VOCAB, stop_ids=(), min_tokens=0)
    with pytest.raises(RequestError, match="token 0 of a request with a grammar must be one that"):
        kept.accept([99])


def test_a_real_tokenizer_says_digits_alone() -> None:
    with LLM("bundled", threads=1, max_num_seqs=2, max_model_len=64) as llm:
        texts = [llm.tokenizer.decode([token]) for token in range(llm.prepared.config.vocab_size)]
        digits = [token for token, text in enumerate(texts) if text.isascii() and text.isdigit()]
        grammar = Turns([digits], length=7)
        prompts = ["def fibonacci(n):", "def fibonacci(n):"]
        params = SamplingParams(temperature=0.0, max_tokens=12)
        free = tokens_of(llm.generate(prompts[:1], params))
        outputs = llm.generate(prompts, params, grammar=[None, grammar])
    assert tokens_of(outputs[:1]) == free
    assert outputs[1].outputs[0].text.isdigit()
    assert len(outputs[1].outputs[0].token_ids) == 7
