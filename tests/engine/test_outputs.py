"""Outputs are frozen snapshots whose document is plain JSON."""

import json
from dataclasses import FrozenInstanceError

import pytest

from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.outputs import (
    CompletionOutput,
    RequestMetrics,
    RequestOutput,
    joined,
)
from paceline.engine.answers.token_logprobs import TokenLogprobs


def _metrics(**times) -> RequestMetrics:
    return RequestMetrics.from_times(
        arrival_s=10.0,
        prompt_tokens=3,
        cached_tokens=1,
        preemptions=2,
        **({"acceptance": Acceptance()} | times),
    )


def _output(completion: CompletionOutput, metrics: RequestMetrics | None) -> RequestOutput:
    return RequestOutput(
        request_id="r",
        prompt="p",
        prompt_token_ids=(1, 2, 3),
        outputs=(completion,),
        finished=True,
        metrics=metrics,
    )


def test_decode_rate_counts_the_tokens_after_the_first():
    metrics = _metrics(first_token_s=10.5, last_token_s=12.5, output_tokens=5)
    assert (metrics.ttft_s, metrics.latency_s, metrics.decode_tok_s) == (0.5, 2.5, 2.0)


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ({"first_token_s": None, "last_token_s": None, "output_tokens": 0}, (None, None, None)),
        ({"first_token_s": 11.0, "last_token_s": 11.0, "output_tokens": 1}, (1.0, 1.0, None)),
    ],
)
def test_what_could_not_be_measured_is_none(times, expected):
    metrics = _metrics(**times)
    assert (metrics.ttft_s, metrics.latency_s, metrics.decode_tok_s) == expected


def test_counts_of_rounds_are_those_of_all_completions():
    first, second = Acceptance(), Acceptance()
    for emitted in (3, 1):
        first.note(drafted=5, emitted=emitted, num_steps=2)
    second.note(drafted=5, emitted=2, num_steps=2)
    second.note(drafted=5, emitted=0, num_steps=2)  # failed
    second.fallbacks.add("host_plan_sync")
    rounds = Acceptance.total([first, second, Acceptance()])
    metrics = _metrics(first_token_s=10.5, last_token_s=12.5, output_tokens=8, acceptance=rounds)
    assert (metrics.rounds, metrics.drafted_tokens, metrics.tokens_per_round) == (3, 15, 2.0)
    assert metrics.accepted_by_position == (2, 1)
    assert metrics.fallbacks == ("host_plan_sync",)


def test_without_speculation_its_counts_are_none_or_zero():
    metrics = _metrics(first_token_s=10.5, last_token_s=12.5, output_tokens=2)
    assert (metrics.rounds, metrics.drafted_tokens, metrics.tokens_per_round) == (0, 0, None)
    assert metrics.accepted_by_position == metrics.fallbacks == ()


def test_the_document_is_json_with_the_documented_keys():
    metrics = _metrics(first_token_s=10.5, last_token_s=12.5, output_tokens=2)
    completion = CompletionOutput(text="é", token_ids=(4, 5), finish_reason="stop", stop_reason=5)
    document = json.loads(json.dumps(_output(completion, metrics).as_document()))
    assert list(document) == ["text", "token_ids", "finish_reason", "metrics"]
    assert document["token_ids"] == [4, 5]
    assert document["metrics"]["preemptions"] == 2


def test_the_document_of_a_failed_request_names_the_error():
    completion = CompletionOutput(
        text="", token_ids=(), finish_reason="error", error="logits held NaN"
    )
    document = _output(completion, None).as_document()
    assert document["error"] == "logits held NaN"
    assert document["metrics"] is None


def test_outputs_cannot_be_changed():
    output = _output(CompletionOutput(text="", token_ids=()), None)
    with pytest.raises(FrozenInstanceError):
        output.finished = False


def _growth(index: int, text: str, before: int, **more) -> RequestOutput:
    piece = CompletionOutput(
        index=index,
        num_chars_before=before,
        num_tokens_before=before,
        text=text,
        token_ids=tuple(map(ord, text)),
        logprobs=None,
        finish_reason=None,
    )
    settings = {"finished": False, "metrics": None, "prompt_logprobs": None} | more
    return RequestOutput(
        request_id="r", prompt=None, prompt_token_ids=(1, 2), outputs=(piece,), **settings
    )


def test_joined_growths_begin_where_the_first_does_and_keep_what_came_once():
    scored = (None, None)
    whole = joined(
        [
            _growth(1, "ab", 3),
            _growth(0, "x", 0, prompt_logprobs=scored),
            _growth(1, "c", 5),
            _growth(0, "y", 1, finished=True),
        ]
    )
    assert [(piece.index, piece.text) for piece in whole.outputs] == [(0, "xy"), (1, "abc")]
    assert [piece.num_chars_before for piece in whole.outputs] == [0, 3]
    assert [piece.num_tokens_before for piece in whole.outputs] == [0, 3]
    assert whole.outputs[1].token_ids == (97, 98, 99)
    assert (whole.finished, whole.prompt_logprobs) == (True, scored)


def test_the_rank_of_a_token_counts_from_the_likeliest():
    row = TokenLogprobs(
        token_id=7, chosen=-3.0, top_ids=(4, 5), top_values=(-0.5, -1.0), tokenizer=None
    )
    assert [(token, row[token].rank) for token in row] == [(7, None), (4, 1), (5, 2)]
    assert [row[token].logprob for token in row] == [-3.0, -0.5, -1.0]
    with pytest.raises(KeyError):
        row[6]
