"""SamplingParams refuses what it cannot honour and keeps what it can."""

import functools
import math
import pickle
from dataclasses import fields

import msgspec
import pytest

from paceline.core.errors import RequestError
from paceline.core.request.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_STOP_IDS,
    SamplerTier,
    SamplingParams,
)

NESTED = functools.reduce(lambda inner, _: [inner], range(2000), [])

WRONG_VALUES = [
    ("structured_outputs", "a", "structured_outputs must be a mapping with one of json, json_obj"),
    ("structured_outputs", {}, "structured_outputs must be one of json, json_object, regex, choi"),
    ("structured_outputs", {"regex": "a", "choice": ["b"]}, "structured_outputs must be one of j"),
    ("structured_outputs", {"regx": "a"}, "a key of structured_outputs must be one of json, jso"),
    ("structured_outputs", {"regex": 3}, "structured_outputs.regex must be a text, got 3"),
    ("structured_outputs", {"regex": ""}, "structured_outputs.regex must be not empty, got an "),
    ("structured_outputs", {"json": 3}, "structured_outputs.json must be a schema or its text, g"),
    ("structured_outputs", {"json": {"a": {3}}}, "structured_outputs.json must be a schema that "),
    ("structured_outputs", {"json_object": 1}, "structured_outputs.json_object must be True, got"),
    ("structured_outputs", {"choice": []}, "structured_outputs.choice must be a list of 1 to 40"),
    ("structured_outputs", {"choice": "a"}, "structured_outputs.choice must be a list of 1 to 40"),
    ("structured_outputs", {"choice": [""]}, "structured_outputs.choice must be of texts that ar"),
    ("structured_outputs", {"grammar": "a" * (1 << 18)}, "structured_outputs.grammar must be at "),
    ("n", 0, "n must be an integer in 1..128, got 0"),
    ("n", 129, "n must be an integer in 1..128, got 129"),
    ("n", None, "n must be an integer in 1..128, got None"),
    ("n", 2.0, "n must be an integer in 1..128, got 2.0"),
    ("max_tokens", 0, "max_tokens must be an integer of at least 1 or None, got 0"),
    ("max_tokens", True, "max_tokens must be an integer of at least 1 or None, got True"),
    ("max_tokens", "5", "max_tokens must be an integer of at least 1 or None, got '5'"),
    ("max_tokens", 5.0, "max_tokens must be an integer of at least 1 or None, got 5.0"),
    ("temperature", math.nan, "temperature must be a finite number in 0..100, got nan"),
    ("temperature", math.inf, "temperature must be a finite number in 0..100, got inf"),
    ("temperature", -0.1, "temperature must be a finite number in 0..100, got -0.1"),
    ("temperature", "1", "temperature must be a finite number in 0..100, got '1'"),
    ("temperature", True, "temperature must be a finite number in 0..100, got True"),
    ("temperature", None, "temperature must be a finite number in 0..100, got None"),
    ("top_k", -2, "top_k must be an integer of at least 1, or None, 0 or -1, got -2; leave it out"),
    ("top_k", False, "top_k must be an integer of at least 1, or None, 0 or -1, got False"),
    ("top_k", 2.0, "top_k must be an integer of at least 1, or None, 0 or -1, got 2.0"),
    ("top_p", 0.0, "top_p must be more than 0, at most 1, got 0.0; use top_k=1"),
    ("top_p", 1.1, "top_p must be a finite number in 0..1, got 1.1"),
    ("min_p", -0.1, "min_p must be a finite number in 0..1, got -0.1"),
    ("repetition_penalty", 0.0, "repetition_penalty must be a finite number in 0.01..100, got 0"),
    ("presence_penalty", 2.5, "presence_penalty must be a finite number in -2..2, got 2.5"),
    ("frequency_penalty", -3, "frequency_penalty must be a finite number in -2..2, got -3"),
    ("min_tokens", -1, "min_tokens must be an integer in 0..2147483647, got -1"),
    ("min_tokens", 10**30, "min_tokens must be an integer in 0..2147483647, got 1000000"),
    ("min_tokens", 17, "min_tokens must be at most max_tokens (16), got 17"),
    ("seed", 2**63, "seed must be an integer in -9223372036854775808..9223372036854775807 or"),
    ("logprobs", 21, "logprobs must be an integer in 0..20 or None, got 21"),
    ("logprobs", True, "logprobs must be an integer in 0..20 or None, got True"),
    ("prompt_logprobs", 21, "prompt_logprobs must be an integer in 0..20 or None, got 21"),
    ("prompt_logprobs", -1, "prompt_logprobs must be an integer in 0..20 or None, got -1"),
    ("prompt_logprobs", True, "prompt_logprobs must be an integer in 0..20 or None, got True"),
    ("extra_args", 3, "extra_args must be a mapping from names to JSON values, got 3; pass what"),
    ("extra_args", ["a"], "extra_args must be a mapping from names to JSON values, got ['a']"),
    ("extra_args", {3: 1}, "a key of extra_args must be a non-empty str, got 3; pass what"),
    ("extra_args", {"": 1}, "a key of extra_args must be a non-empty str, got ''; pass what"),
    ("extra_args", {"a": {1}}, "extra_args['a'] must be a JSON value: null, bool, number, str, "),
    ("extra_args", {"a": [0, b"x"]}, "extra_args['a'][1] must be a JSON value: null, bool, num"),
    ("extra_args", {"a": {"b": {2: 0}}}, "a key of extra_args['a']['b'] must be a non-empty st"),
    ("extra_args", {"a": NESTED}, "extra_args must be at most 32 levels deep, got 'more lev"),
    ("ignore_eos", 1, "ignore_eos must be True or False, got 1"),
    ("skip_special_tokens", None, "skip_special_tokens must be True or False, got None"),
    ("speculative", "off", "speculative must be True or False, got 'off'"),
    ("receipt", 1, "receipt must be True or False, got 1"),
    ("trace_tokens", 1, "trace_tokens must be True or False, got 1"),
    ("stop", "", "stop must be non-empty strings, got ''"),
    ("stop", ["a", 3], "stop must be non-empty strings, got ['a', 3]"),
    ("stop", None, "stop must be non-empty strings, got None"),
    ("stop", [str(i) for i in range(33)], "stop must be at most 32 strings, got 33; give fewer"),
    ("stop", ["a", "b" * 1025], "stop must be at most 1024 characters each, got 1025; shorten it"),
    ("stop_token_ids", [-1], "stop_token_ids must be a sequence of token ids"),
    ("stop_token_ids", "12", "stop_token_ids must be a sequence of token ids"),
    ("stop_token_ids", list(range(MAX_STOP_IDS + 1)), "stop_token_ids must be at most 32 ids"),
    ("logit_bias", [1], "logit_bias must be a mapping from token ids to numbers"),
    ("logit_bias", {"x": 1.0}, "logit_bias must be a mapping from token ids to numbers"),
    ("logit_bias", {-3: 1.0}, "logit_bias must be a mapping from token ids to numbers"),
    ("logit_bias", {3: 101}, "logit_bias[3] must be a finite number in -100..100, got 101"),
    ("logit_bias", {3: math.nan}, "logit_bias[3] must be a finite number in -100..100, got nan"),
    (
        "logit_bias",
        dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1),
        "logit_bias must be at most 300 entries, got 301",
    ),
]


@pytest.mark.parametrize(("name", "value", "text"), WRONG_VALUES)
def test_wrong_value_is_refused_with_name_expected_and_got(name, value, text):
    with pytest.raises(RequestError) as caught:
        SamplingParams(**{name: value})
    assert str(caught.value).startswith(text)
    assert "; " in str(caught.value)


def test_every_field_has_a_wrong_value_in_the_table():
    untested = {f.name for f in fields(SamplingParams)} - {name for name, _, _ in WRONG_VALUES}
    assert untested == {"include_stop_str_in_output"}
    with pytest.raises(RequestError, match="include_stop_str_in_output must be True or False"):
        SamplingParams(include_stop_str_in_output=0)


def test_params_are_hashable_and_picklable_and_normalised():
    params = SamplingParams(
        temperature=1, stop="END", stop_token_ids=[7, 3, 7], logit_bias={9: 1, 2: -5}
    )
    assert params.stop == ("END",)
    assert params.stop_token_ids == (7, 3)
    assert params.logit_bias == ((2, -5.0), (9, 1.0))
    assert isinstance(params.temperature, float)
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert SamplingParams(logit_bias=params.logit_bias).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        ({"json": {"type": "object"}}, "json", '{"type": "object"}'),
        ({"json": " {} ", "regex": None}, "json", " {} "),
        ({"json": False}, "json", "false"),
        ({"json_object": True}, "json_object", ""),
        ({"json_object": False, "regex": "a"}, "regex", "a"),
        ({"choice": ("a", "b")}, "choice", '["a", "b"]'),
        ({"choice": '["a"]'}, "choice", '["a"]'),
        ({"grammar": "start: /a/"}, "grammar", "start: /a/"),
    ],
)
def test_the_form_of_an_answer_is_kept_as_plain_text(value, kind, text):
    params = SamplingParams(structured_outputs=value)
    assert (params.structured_outputs.kind, params.structured_outputs.text) == (kind, text)
    assert SamplingParams.from_dict({"structured_outputs": params.structured_outputs}) == params
    packed = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(packed, type=SamplingParams) == params


def test_extra_args_are_kept_hashable_by_name_at_any_depth():
    given = {"b": [1, {"d": None, "c": (True,)}], "a": "text", "e": {}}
    params = SamplingParams(extra_args=given)
    kept = (("a", "text"), ("b", (1, (("c", (True,)), ("d", None)))), ("e", ()))
    assert params.extra_args == kept
    assert hash(params) == hash(pickle.loads(pickle.dumps(params)))
    assert SamplingParams(extra_args=params.extra_args) == params
    assert SamplingParams.from_dict({"extra_args": given, "n": 2}).extra_args == kept


@pytest.mark.parametrize("value", [0, -1, None])
def test_every_way_to_say_no_top_k_is_the_same_parameters(value):
    assert SamplingParams(top_k=value) == SamplingParams()


def test_from_dict_accepts_the_alias_and_json_bias_keys():
    params = SamplingParams.from_dict({"max_new_tokens": 3, "logit_bias": {"42": 2}})
    assert params.max_tokens == 3
    assert params.logit_bias == ((42, 2.0),)


def test_from_dict_refuses_an_unknown_field_and_names_the_closest():
    text = r"sampling field must be one of .*temperature.*, got 'temprature'; did you mean temper"
    with pytest.raises(RequestError, match=text):
        SamplingParams.from_dict({"temprature": 1.0})
    with pytest.raises(RequestError, match=r"got 'best_of'; remove it"):
        SamplingParams.from_dict({"best_of": 2})


def test_from_dict_refuses_a_field_given_under_two_names():
    both = {"max_tokens": 3, "max_new_tokens": 3}
    for given in (both, dict(reversed(both.items()))):
        with pytest.raises(
            RequestError, match="max_tokens must be given once, got also as max_new"
        ):
            SamplingParams.from_dict(given)


def test_from_dict_refuses_a_bias_key_that_is_no_token_id():
    with pytest.raises(RequestError, match=r"got the key '-3'"):
        SamplingParams.from_dict({"logit_bias": {"-3": 1.0}})


@pytest.mark.parametrize(
    ("values", "tier"),
    [
        ({"temperature": 0}, SamplerTier.GREEDY),
        ({"temperature": 1e-60}, SamplerTier.GREEDY),  # 0 as float32
        ({"temperature": 0, "top_k": 3, "top_p": 0.5}, SamplerTier.GREEDY),
        ({}, SamplerTier.BY_ROW),
        ({"temperature": 0, "repetition_penalty": 1.1}, SamplerTier.BY_ROW),
        ({"temperature": 0, "presence_penalty": 0.1}, SamplerTier.BY_ROW),
        ({"frequency_penalty": 0.1}, SamplerTier.BY_ROW),
        ({"logit_bias": {1: 1.0}}, SamplerTier.BY_ROW),
        ({"temperature": 0, "min_tokens": 1}, SamplerTier.BY_ROW),
        ({"temperature": 0, "extra_args": {"a": 1}}, SamplerTier.PLUG_INS),
        ({"temperature": 0, "n": 3, "prompt_logprobs": 2}, SamplerTier.GREEDY),
    ],
)
def test_tier_is_the_narrowest_that_honours_the_request(values, tier):
    assert SamplingParams(**values).sampler_tier is tier


def test_stop_ids_include_end_tokens_unless_ignored():
    assert SamplingParams(stop_token_ids=(5, 2)).all_stop_ids((2, 9)) == (5, 2, 9)
    assert SamplingParams(stop_token_ids=(5,), ignore_eos=True).all_stop_ids((2,)) == (5,)


def test_stop_ids_that_do_not_fit_with_the_end_tokens_are_refused():
    params = SamplingParams(stop_token_ids=tuple(range(MAX_STOP_IDS)))
    with pytest.raises(RequestError, match="at most 32 ids with the model's 1 end tokens, got 33"):
        params.all_stop_ids((99,))


def test_ids_outside_the_vocabulary_are_refused():
    SamplingParams(stop_token_ids=(9,), logit_bias={9: 1.0}).check_vocabulary(10)
    with pytest.raises(RequestError, match=r"stop_token_ids must be token ids below .* 9, got \[9"):
        SamplingParams(stop_token_ids=(9,)).check_vocabulary(9)
    with pytest.raises(RequestError, match=r"logit_bias must be token ids below .* 9, got \[9"):
        SamplingParams(logit_bias={9: 1.0}).check_vocabulary(9)


@pytest.mark.parametrize("key", [7, None, ("top_k",), b"top_k"])
def test_a_field_whose_name_is_no_text_is_refused(key):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({key: 1})
    assert f"got {key!r}; " in str(caught.value)


@pytest.mark.parametrize(("word", "value"), [("on", True), ("off", False), (False, False)])
def test_speculation_is_switched_by_a_word_or_a_bool(word, value):
    assert SamplingParams.from_dict({"speculative": word}).speculative is value


@pytest.mark.parametrize("value", ["no", "", 0, None, ["on"]])
def test_another_word_for_speculation_is_refused(value):
    with pytest.raises(RequestError) as caught:
        SamplingParams.from_dict({"speculative": value})
    assert str(caught.value) == (
        f'speculative must be "on", "off" or a bool, got {value!r}; leave it out for on'
    )


@pytest.mark.parametrize("depth", [3, 15, 16, 20])
def test_extra_args_that_are_taken_are_taken_again(depth):
    """A process decodes what another has frozen."""
    nested = functools.reduce(lambda inner, _: {"x": inner}, range(depth), 1)
    try:
        once = SamplingParams(extra_args={"a": nested})
    except RequestError:
        assert depth > 15
        return
    assert depth <= 15
    assert SamplingParams(extra_args=once.extra_args) == once
