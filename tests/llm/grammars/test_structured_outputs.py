"""Answers are of the form that was asked for, at any temperature, and with drafts say the same."""

import json
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from schemas import REFUSED, SCHEMAS

from paceline.core.errors import RequestError
from paceline.core.sampling_params import SamplingParams
from paceline.engine.outputs import CompletionOutput
from paceline.engine.request import FinishReason
from paceline.llm.llm import LLM

HOT = SamplingParams(temperature=2.0, n=2, max_tokens=120)
PROMPT = "def answer():\n    return "


@pytest.fixture(scope="module")
def llm() -> Any:
    """The bundled model, without drafts."""
    with LLM("bundled", dtype="float32", threads=1, max_num_seqs=32, max_model_len=256) as made:
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
    return answer.finish_reason is FinishReason.STOP or answer.text[-1:].isdigit()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_followed_is_refused_with_its_part(llm: LLM, name: str) -> None:
    schema, part = REFUSED[name]
    with pytest.raises(RequestError) as caught:
        llm.generate(PROMPT, SamplingParams(structured_outputs={"json": schema}))
    assert str(caught.value).startswith("structured_outputs.json must be a form that can be foll")
    assert part in str(caught.value)
