"""A completion takes in the several tokens of a round as it takes in one at a time."""

import itertools

import pytest

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RowLogprobs
from paceline.engine.answers.completion import Completion
from paceline.engine.answers.outputs import CompletionOutput
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate

TOKENS = (97, 98, 99, 100, 101, 102)
SPLITS = [
    [1, 1, 1, 1, 1, 1],
    [2, 4],
    [3, 3],
    [4, 1, 1],
    [6],
]


class AsciiTokenizer:
    """A token is a character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:
        return chr(token_id)


def complete(
    sizes: list[int], finish: FinishReason | None, **params: object
) -> tuple[CompletionOutput, int | None]:
    """Feed TOKENS in pieces, the last of them with `finish`; (the end, tokens to keep)."""
    request = Request.make(
        "r", [65], SamplingParams(temperature=0.0, logprobs=0, **params), context_len=32
    )
    completion = Completion(request, tokenizer=AsciiTokenizer())
    ends = list(itertools.accumulate(sizes))
    kept = None
    for start, end in zip([0, *ends], ends, strict=False):
        tokens = TOKENS[start:end]
        logprobs = tuple(RowLogprobs(chosen=-float(t), top_ids=(), top_values=()) for t in tokens)
        is_last = end == len(TOKENS)
        found = completion.apply(
            RequestUpdate(request, tokens, logprobs, finish if is_last else None)
        )
        kept = found if found is not None else kept
    return completion.snapshot(), kept


@pytest.mark.parametrize("sizes", SPLITS)
def test_a_stop_string_within_a_round_cuts_behind_the_token_that_completes_it(
    sizes: list[int],
) -> None:
    output, kept = complete(sizes, None, stop="cd")
    assert kept == 4
    assert output.token_ids == TOKENS[:4]
    assert (output.text, output.stop_reason) == ("ab", "cd")
    assert output.finish_reason is FinishReason.STOP
    assert output.logprobs is not None
    assert [row.chosen for row in output.logprobs] == [-97.0, -98.0, -99.0, -100.0]


@pytest.mark.parametrize("sizes", SPLITS)
@pytest.mark.parametrize("include", [True, False])
def test_a_stop_token_at_the_end_of_a_round_is_no_text(sizes: list[int], include: bool) -> None:
    output, _ = complete(sizes, FinishReason.STOP, include_stop_str_in_output=include)
    assert output.token_ids == TOKENS
    assert output.text == ("abcdef" if include else "abcde")
    assert output.stop_reason == 102


@pytest.mark.parametrize("sizes", SPLITS)
def test_tokens_before_logits_that_were_not_finite_are_kept(sizes: list[int]) -> None:
    output, _ = complete(sizes, FinishReason.ERROR)
    assert (output.token_ids, output.text) == (TOKENS, "abcdef")
    assert output.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize("num_drafted", [0, 2, 5])
def test_the_first_tokens_of_a_round_are_the_drafts(num_drafted: int) -> None:
    request = Request.make("r", [65], SamplingParams(temperature=0.0), context_len=32)
    completion = Completion(request, tokenizer=AsciiTokenizer())
    completion.apply(RequestUpdate(request, TOKENS[:1], (), None))
    completion.apply(RequestUpdate(request, TOKENS[1:], (), None, num_drafted=num_drafted))
    is_drafted = completion.snapshot().is_drafted
    assert is_drafted == (False,) + (True,) * num_drafted + (False,) * (5 - num_drafted)


def test_a_stop_string_cuts_where_tokens_came_from_too() -> None:
    request = Request.make("r", [65], SamplingParams(temperature=0.0, stop="cd"), context_len=32)
    completion = Completion(request, tokenizer=AsciiTokenizer())
    completion.apply(RequestUpdate(request, TOKENS, (), None, num_drafted=5))
    assert completion.snapshot().is_drafted == (True,) * 4
