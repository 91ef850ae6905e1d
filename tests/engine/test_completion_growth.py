"""A completion's growths: pieces that, joined, are its snapshot, each told once."""

import pytest

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import RowLogprobs
from paceline.engine.answers.completion import Completion
from paceline.engine.answers.outputs import CompletionOutput
from paceline.engine.request import FinishReason, Request
from paceline.engine.scheduler import RequestUpdate


class AsciiTokenizer:
    """A token is a character."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return "".join(map(chr, token_ids))

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str:
        return chr(token_id)


def make(**params: object) -> tuple[Completion, Request]:
    wanted = SamplingParams(temperature=0.0, logprobs=0, **params)
    request = Request.make("r", [65], wanted, context_len=32)
    return Completion(request, tokenizer=AsciiTokenizer()), request


def update(request: Request, text: str, finish: FinishReason | None = None) -> RequestUpdate:
    rows = tuple(RowLogprobs(chosen=-float(ord(t)), top_ids=(), top_values=()) for t in text)
    return RequestUpdate(request, tuple(map(ord, text)), rows, finish)


def test_each_growth_tells_what_is_new() -> None:
    completion, request = make(stop="xyz")
    found = []
    for text, finish in (("ab", None), ("cx", None), ("d", None), ("xy", FinishReason.LENGTH)):
        assert completion.apply(update(request, text, finish)) is None
        growth = completion.growth(CompletionOutput)
        rows = [row.token_id for row in growth.logprobs]
        assert rows == list(growth.token_ids) == list(map(ord, text))
        found.append((growth.num_tokens_before, growth.num_chars_before, growth.text))
        assert growth.finish_reason is finish
        assert completion.growth(CompletionOutput) is None
    assert found == [(0, 0, "ab"), (2, 2, "c"), (4, 3, "xd"), (5, 5, "xy")]


def test_what_was_held_back_is_told_when_the_length_is_reached() -> None:
    completion, request = make(stop="xyz")
    completion.apply(update(request, "axy", FinishReason.LENGTH))
    assert completion.snapshot().text == completion.growth(CompletionOutput).text == "axy"


def test_what_was_held_back_is_told_at_an_abort() -> None:
    completion, request = make(stop="xyz")
    completion.apply(update(request, "axy"))
    assert completion.growth(CompletionOutput).text == "a"
    completion.finish(FinishReason.ABORT)
    completion.finish(FinishReason.LENGTH)
    growth = completion.growth(CompletionOutput)
    assert (growth.text, growth.token_ids, growth.finish_reason) == ("xy", (), "abort")


@pytest.mark.parametrize("finish", [None, FinishReason.LENGTH, FinishReason.STOP])
def test_the_scheduler_is_told_of_a_stop_that_it_has_not_seen(finish: FinishReason | None) -> None:
    completion, request = make(stop="bc")
    kept = completion.apply(update(request, "abcd", finish))
    assert kept == (3 if finish is None else None)
    output = completion.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "bc")
    assert completion.apply(update(request, "e")) is None
    assert completion.snapshot() == output


class ByteTokenizer:
    """A token is a byte."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> None:
        """None is said to stand for itself."""


def test_a_stop_string_that_the_end_completes_is_the_reason() -> None:
    """The byte of a character that never became whole is shown, and found, at the end alone."""
    wanted = SamplingParams(temperature=0.0, stop="\ufffd")
    request = Request.make("r", [65], wanted, context_len=32)
    completion = Completion(request, tokenizer=ByteTokenizer())
    assert completion.apply(RequestUpdate(request, (97,), (), None)) is None
    assert completion.apply(RequestUpdate(request, (0xE2,), (), FinishReason.LENGTH)) is None
    output = completion.snapshot()
    assert (output.text, output.finish_reason, output.stop_reason) == ("a", "stop", "\ufffd")
