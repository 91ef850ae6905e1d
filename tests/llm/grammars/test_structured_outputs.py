"""Answers are of the form that was asked for, at any temperature, and with drafts say the same."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from schemas import REFUSED, SCHEMAS

from paceline.core.errors import ModelError, RequestError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.request.structured import structured_outputs
from paceline.engine.answers.outputs import CompletionOutput, RequestOutput
from paceline.engine.request import FinishReason
from paceline.llm.llm import LLM

FORM = structured_outputs({"regex": "[a-c]+"})
HOT = SamplingParams(temperature=1.5, n=2, max_tokens=120)
WORLD: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_num_seqs": 32,
    "max_model_len": 256,
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "chain": {"speculative_algorithm": "NGRAM"},
    "branches": {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2},
    "tree": {"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 3},
}
FORMS: list[dict[str, Any] | None] = [
    None,
    {"json": SCHEMAS["all at once"]},
    {"regex": "(ab|c){4,12}-[0-9]{2}"},
    {"choice": ["yes", "no", "perhaps"]},
    {"grammar": 'start: "x" | "(" start "," start ")"'},
    {"json_object": True},
]
PROMPT = "def answer():\n    return "


@pytest.fixture(scope="module")
def llm() -> Any:
    """The bundled model, without drafts."""
    with LLM("bundled", **WORLD, speculative_algorithm="off") as made:
        yield made


@pytest.fixture(scope="module")
def answers(llm: LLM) -> dict[str, list[CompletionOutput]]:
    wanted = [
        replace(HOT, seed=seed, structured_outputs={"json": schema})
        for seed, schema in enumerate(SCHEMAS.values())
    ]
    outputs = llm.generate([PROMPT] * len(wanted), wanted)
    return {name: output.outputs for name, output in zip(SCHEMAS, outputs, strict=True)}


def test_there_are_sixty_schemas_that_jsonschema_takes_for_such() -> None:
    assert len(SCHEMAS) >= 60
    for schema in SCHEMAS.values():
        jsonschema.validators.validator_for(schema).check_schema(schema)


@pytest.mark.parametrize("name", SCHEMAS)
def test_hot_answers_are_valid_json_of_their_schema(
    answers: dict[str, list[CompletionOutput]], name: str
) -> None:
    texts = [each.text for each in answers[name] if is_whole(each)]
    assert texts, [each.text for each in answers[name]]
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    for answer in answers[name]:
        assert answer.finish_reason in (FinishReason.STOP, FinishReason.LENGTH), answer.error


def is_whole(answer: CompletionOutput) -> bool:
    """A number of many digits is one wherever max_tokens cut it."""
    text = answer.text.removeprefix("-")
    is_number = text[:1].isdigit() and text[-1:].isdigit()
    return answer.finish_reason is FinishReason.STOP or is_number


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_part(llm: LLM, name: str) -> None:
    schema, part = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, SamplingParams(structured_outputs={"json": schema}))
    assert str(caught.value).startswith("structured_outputs.json must be a form that can be foll")
    assert part in str(caught.value)


@pytest.mark.parametrize(
    "drafter",
    [pytest.param(name, marks=() if name == "branches" else pytest.mark.slow) for name in DRAFTERS],
)
def test_with_drafts_an_answer_is_the_same(llm: LLM, drafter: str) -> None:
    """Alone and beside one without a form; what a schema forces is drafted and accepted."""
    wanted = [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=24, structured_outputs=form)
        for seed, form in enumerate(FORMS)
        for temperature in (0.0, 1.2)
    ]
    plain = [tokens_of(output) for output in llm.generate([PROMPT] * len(wanted), wanted)]
    options = WORLD | DRAFTERS[drafter] | {"speculative_max_batch": 32}
    with LLM("bundled", **options) as drafting:
        beside = drafting.generate([PROMPT] * len(wanted), wanted)
        alone = [drafting.generate(PROMPT, params)[0] for params in wanted[2::3]]
    assert beside[0].metrics.rounds > 0
    assert [tokens_of(output) for output in beside] == plain
    assert [tokens_of(output) for output in alone] == plain[2::3]
    assert {output.metrics.fallbacks for output in alone} == {("grammar",)}
    for output in beside:
        accepted = sum(output.metrics.accepted_by_position)
        assert output.metrics.drafted_tokens >= accepted >= output.metrics.forced_tokens
    assert sum(output.metrics.forced_tokens for output in beside[2:]) > 10
    assert beside[0].metrics.forced_tokens == 0


def tokens_of(output: RequestOutput) -> tuple[int, ...]:
    return output.outputs[0].token_ids


def test_a_form_and_a_grammar_exclude_each_other(llm: LLM) -> None:
    grammar = llm.admission.structures.grammar(FORM)
    with pytest.raises(RequestError, match="grammar must be left out beside structured_outputs"):
        llm.generate(PROMPT, SamplingParams(structured_outputs=FORM), grammar=grammar)


def test_without_a_tokenizer_there_is_no_form(llm: LLM) -> None:
    bare = replace(llm.admission, tokenizer=None, structures=None)
    with pytest.raises(ModelError, match="tokenizer must be a model with"):
        bare.admit([[1, 2]], SamplingParams(structured_outputs=FORM))


def test_the_text_of_a_form_stays_behind_where_requests_are_queued(llm: LLM) -> None:
    [tracker] = llm.submit(PROMPT, SamplingParams(structured_outputs=FORM))
    assert tracker.request.constraint is not None
    assert tracker.request.params.structured_outputs is None
    llm.abort(tracker.request.request_id)


def test_a_mask_that_takes_too_long_ends_its_request_alone(llm: LLM) -> None:
    heavy = {"regex": "(a?){5000}a{5000}x"}
    params = [SamplingParams(temperature=0.0, structured_outputs=form) for form in (heavy, None)]
    bad, good = llm.generate([PROMPT] * 2, params)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert str(bad.outputs[0].error).startswith("structured_outputs.regex must be a form that")
    assert good.outputs[0].error is None
