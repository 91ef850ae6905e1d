"""Every sampling parameter can be typed, and the API and the command line agree on it."""

from dataclasses import fields

import pytest
from click.testing import CliRunner
from fake_engine import FakeEngine

from paceline.cli.app import app
from paceline.cli.sampling_flags import SAMPLING
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.request.structured import StructuredOutputs, StructureKind


def params_of(*words, verb=("generate", "--prompt", "x"), stdin=None):
    engine = FakeEngine()
    done = CliRunner().invoke(app, [*verb, *words], obj=engine, input=stdin)
    assert done.exit_code == 0, done.output
    return engine.params[0]


def test_every_field_has_a_flag():
    assert SAMPLING.keys() | {"seed"} == {field.name for field in fields(SamplingParams)}


TYPED = {
    "max_tokens": ("--max-tokens 3", 3),
    "temperature": ("--temperature 0.5", 0.5),
    "top_k": ("--top-k 4", 4),
    "top_p": ("--top_p 0.25", 0.25),
    "min_p": ("--min-p 0.125", 0.125),
    "repetition_penalty": ("--repetition-penalty 1.5", 1.5),
    "presence_penalty": ("--presence-penalty -1", -1.0),
    "frequency_penalty": ("--frequency-penalty 2", 2.0),
    "logit_bias": ('--logit-bias {"42":-100,"7":1.5}', ((7, 1.5), (42, -100.0))),
    "min_tokens": ("--min-tokens 2", 2),
    "stop": ("--stop a --stop bc", ("a", "bc")),
    "stop_token_ids": ("--stop-token-id 5 --stop-token-ids 6", (5, 6)),
    "include_stop_str_in_output": ("--include-stop-str-in-output", True),
    "ignore_eos": ("--ignore-eos", True),
    "skip_special_tokens": ("--no-skip-special-tokens", False),
    "n": ("--n 2", 2),
    "logprobs": ("--logprobs 3 --json", 3),
    "prompt_logprobs": ("--prompt-logprobs 0 --json", 0),
    "extra_args": ('--extra-args {"bias":2}', (("bias", 2),)),
    "seed": ("--seed 9", 9),
    "speculative": ("--speculative off", False),
    "structured_outputs": (
        '--structured-outputs {"regex":"a+"}',
        StructuredOutputs(kind=StructureKind.REGEX, text="a+"),
    ),
    "receipt": ("--receipt", True),
    "trace_tokens": ("--trace-tokens", True),
}


@pytest.mark.parametrize("name", [field.name for field in fields(SamplingParams)])
def test_a_flag_sets_its_field_and_no_other(name):
    words, value = TYPED[name]
    params, plain = params_of(*words.split()), params_of()
    assert getattr(params, name) == value
    changed = {f.name for f in fields(params) if getattr(params, f.name) != getattr(plain, f.name)}
    assert changed == {name}


def test_what_is_not_typed_is_as_in_the_api_but_for_two_fields_that_say_why():
    usual = params_of()
    api = SamplingParams(max_tokens=usual.max_tokens, temperature=usual.temperature)
    assert usual == api
    text = " ".join(CliRunner().invoke(app, ["generate", "--help"]).stdout.split())
    assert "[default: 128; 16 in the API: a first look wants some lines]" in text
    assert "[default: 0.0; 1.0 in the API: a command typed twice answers the same]" in text


def test_chat_takes_the_same_but_what_it_could_not_show():
    words = ["--stop", "z", "--presence-penalty", "1", "--max-tokens", "7"]
    params = params_of(*words, verb=("chat",), stdin="a\n")
    assert (params.stop, params.presence_penalty, params.max_tokens) == (("z",), 1.0, 7)
    for flag in ("--n", "--logprobs", "--prompt-logprobs"):
        done = CliRunner().invoke(app, ["chat", flag, "1"], obj=FakeEngine(), input="a\n")
        assert done.exit_code == 2
        assert "No such option" in done.stderr


def test_the_form_of_an_answer_is_typed_in_five_ways(tmp_path):
    schema, grammar = tmp_path / "schema.json", tmp_path / "grammar.lark"
    schema.write_text('{"type": "object"}\n')
    grammar.write_text('start: "a"')
    for words, value in {
        ("--json-schema", str(schema)): ("json", '{"type": "object"}'),
        ("--json-object",): ("json_object", ""),
        ("--regex", "[0-9]+"): ("regex", "[0-9]+"),
        ("--choice", "yes", "--choice", "no"): ("choice", '["yes", "no"]'),
        ("--grammar", str(grammar)): ("grammar", 'start: "a"'),
    }.items():
        asked = params_of(*words).structured_outputs
        assert (asked.kind, asked.text) == value


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("--regex a --choice b", "structured_outputs must be one of json, json_object, regex"),
        (
            '--regex a --structured-outputs {"regex":"b"}',
            "an answer has one form, got --structured",
        ),
    ],
)
def test_two_forms_at_once_are_refused(words, text):
    verb = ["generate", "--prompt", "x", *words.split()]
    done = CliRunner().invoke(app, verb, obj=FakeEngine())
    assert done.exit_code != 0
    assert text in done.output
