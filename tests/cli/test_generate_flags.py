"""The flags of `generate` beside the engine's: completions, prompt scores, processor arguments."""

import json
from dataclasses import replace
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.engine.answers.token_logprobs import TokenLogprobs

SCHEMA = json.loads((Path(__file__).parents[2] / "docs" / "schemas" / "generate.json").read_text())


class ManyCompletions(FakeEngine):
    """Answers with params.n completions, and scores the prompt when asked."""

    def _output(self, request_id, count, params, finished=True):
        output = super()._output(request_id, count, params, finished)
        row = TokenLogprobs(
            token_id=7, chosen=-1.5, top_ids=(4,), top_values=(-0.5,), tokenizer=None
        )
        return replace(
            output,
            outputs=tuple(replace(output.outputs[0], index=i) for i in range(params.n)),
            prompt_logprobs=None if params.prompt_logprobs is None else (None, row),
        )


def run(*words, engine=None):
    return CliRunner().invoke(app, ["generate", "--prompt", "hi ", *words], obj=engine)


def test_several_completions_are_printed_one_after_another():
    done = run("--n", "2", "--echo", "--max-tokens", "2", engine=ManyCompletions())
    assert done.exit_code == 0, done.output
    assert done.stdout == "hi one two \nhi one two \n"
    assert "completion 0\ncompletion 1\n" in done.stderr


def test_the_document_of_several_completions_fits_its_schema():
    done = run("--n", "2", "--prompt-logprobs", "1", "--json", engine=ManyCompletions())
    document = json.loads(done.stdout.splitlines()[-1])
    jsonschema.validate(document, SCHEMA)
    assert [each["text"] for each in document["completions"]] == [document["text"]] * 2
    scored = {
        "token_id": 7,
        "token": "",
        "chosen": -1.5,
        "top_ids": [4],
        "top_tokens": [""],
        "top_values": [-0.5],
    }
    assert document["prompt_logprobs"] == [None, scored]


def test_a_failed_completion_is_an_error():
    done = run("--n", "2", engine=ManyCompletions(finish_reason="error"))
    assert done.exit_code == 1
    assert "logits held NaN" in done.stderr


def test_arguments_of_processors_reach_the_parameters_and_names_the_engine():
    engine = ManyCompletions()
    words = ["--logits-processor", "a:B", "--logits_processor", "c:D"]
    done = run(*words, "--extra-args", '{"x": [1, 2.5], "w": {"k": null}}', engine=engine)
    assert done.exit_code == 0, done.output
    assert engine.asked == {"logits_processors": ("a:B", "c:D")}
    assert engine.params[0].extra_args == (("w", (("k", None),)), ("x", (1, 2.5)))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--n", "0"], "RequestError: n must be an integer in 1..128, got 0"),
        (["--n", "129"], "RequestError: n must be an integer in 1..128, got 129"),
        (["--prompt-logprobs", "3"], "--prompt-logprobs shows in the JSON document only: add --j"),
        (["--echo", "--json"], "--echo shows beside the text only: drop --json or --echo"),
        (["--extra-args", "{x"], "Invalid value for '--extra-args': '{x' is not JSON"),
        (["--extra-args", "[1]"], "RequestError: extra_args must be a mapping from names to JSON"),
    ],
)
def test_what_cannot_be_honoured_is_refused(words, text):
    engine = ManyCompletions()
    done = run(*words, engine=engine)
    assert done.exit_code == 2
    assert text in done.stderr
    assert not engine.prompts
