"""Recorded texts of every format, and every way to cut them."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from texts import ALL, Recorded

from paceline.server.tools.feed import Kind
from paceline.server.tools.forms import Form
from paceline.server.tools.speech import Speech, delta_of, message_of


def form_of(recorded: Recorded) -> Form:
    return Form(
        tools=recorded.tools,
        reasoning=recorded.thinks,
        has_begun=recorded.has_begun,
        types=recorded.types,
    )


def said_of(form: Form, parts: list[str]) -> list:
    speech = Speech(form)
    said = [each for part in parts for each in speech.push(part, is_end=False)]
    return said + speech.push("", is_end=True)


def plain(message: dict) -> dict:
    """Without ids, which are drawn."""
    calls = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning_content", ""),
        "calls": calls,
    }


def cut(text: str, borders: list[int]) -> list[str]:
    ends = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[a:b] for a, b in pairwise(ends)]


@pytest.mark.parametrize("recorded", ALL.values(), ids=ALL)
def test_a_recorded_text_is_its_message_whole_and_letter_by_letter(recorded: Recorded) -> None:
    wanted = {
        "content": recorded.content,
        "reasoning": recorded.reasoning,
        "calls": recorded.calls,
    }
    form = form_of(recorded)
    assert plain(message_of(said_of(form, [recorded.text]))) == wanted
    assert plain(message_of(said_of(form, list(recorded.text)))) == wanted


@settings(max_examples=300, deadline=None)
@given(
    recorded=st.sampled_from(list(ALL.values())), borders=st.lists(st.integers(0, 400), max_size=8)
)
def test_every_way_to_cut_a_text_gives_the_same_message(recorded, borders) -> None:
    form = form_of(recorded)
    parts = cut(recorded.text, borders)
    one = plain(message_of(said_of(form, [recorded.text])))
    assert plain(message_of(said_of(form, parts))) == one


MARKS = sorted(
    {
        *("<tool_call>", "</tool_call>", "<think>", "</think>", '{"name": "f", "arguments": '),
        *("<|python_tag|>", "[TOOL_CALLS]", "f[ARGS]", '{"name": "f", "parameters": ', "; "),
        *(
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁calls▁end｜>",
            "<｜tool▁call▁begin｜>",
            "```",
            "```json",
        ),
        *("<｜tool▁call▁end｜>", "function<｜tool▁sep｜>", "f<｜tool▁sep｜>", "f", "<|call|>"),
        *("<|channel|>", "<|message|>", "<|start|>assistant", "<|end|>", "analysis", "final"),
        *("commentary to=functions.f <|constrain|>json",),
        *("<function=f>", "<parameter=a>", "<parameter=n>", "</parameter>", "</function>"),
        *("<function=", "f\n", "<arg_key>a</arg_key>", "<arg_key>n</arg_key>", "<arg_value>"),
        *("</arg_value>", "<arg_key>", "null", "12"),
        *('{"a": "b"}', "}", "{", "]", "[", ",", " ", "\n", "é", "\\", '"', "<", "x", "]}"),
    }
)


@settings(max_examples=500, deadline=None)
@given(
    words=st.lists(st.sampled_from(MARKS), max_size=14),
    borders=st.lists(st.integers(0, 400), max_size=8),
    begun=st.booleans(),
    name=st.sampled_from(sorted({each.tools for each in ALL.values() if each.tools})),
)
def test_no_text_of_marks_is_read_by_where_it_was_cut(words, borders, begun, name) -> None:
    text = "".join(words)
    reasoning = name if name == "harmony" else "think"
    types = {"f": {"n": "integer"}}
    form = Form(tools=name, reasoning=reasoning, has_begun=begun, types=types)
    one = plain(message_of(said_of(form, [text])))
    assert plain(message_of(said_of(form, cut(text, borders)))) == one
    assert plain(message_of(said_of(form, list(text)))) == one


@settings(max_examples=300, deadline=None)
@given(words=st.lists(st.sampled_from(MARKS), max_size=14))
def test_nothing_but_marks_and_blanks_around_them_is_lost(words) -> None:
    """Every letter of what is told stands in the text, in its order."""
    text = "".join(words)
    form = Form(tools="hermes", reasoning="think")
    said = said_of(form, list(text))
    told = [each for each in said if each.kind in (Kind.CONTENT, Kind.REASONING)]
    at = 0
    for each in told:
        at = text.index(each.text, at) + len(each.text)
    if not any(each.kind in (Kind.NAME, Kind.REASONING) for each in said) and "think" not in text:
        assert "".join(each.text for each in told) == text


def test_a_stream_tells_the_name_first_and_arguments_as_they_come() -> None:
    text = ALL["hermes, one"].text
    deltas = [
        delta["tool_calls"][0]
        for each in said_of(Form(tools="hermes"), list(text))
        if (delta := delta_of(each)) is not None
    ]
    first, *rest = deltas
    assert first["function"] == {"name": "get_weather", "arguments": ""}
    assert first["id"].startswith("call_")
    assert [each["index"] for each in deltas] == [0] * len(deltas)
    assert len(rest) == len('{"city": "Paris"}')
    assert "".join(each["function"]["arguments"] for each in rest) == '{"city": "Paris"}'


def test_a_call_that_breaks_off_stays_in_a_stream_as_far_as_it_was_told() -> None:
    """Nothing can be taken back there; the whole answer has it as content."""
    speech = Speech(Form(tools="hermes"))
    text = ALL["malformed, wrong arguments"].text
    deltas = [delta_of(each) for each in speech.push(text, is_end=True)]
    assert [sorted(each) for each in deltas if each] == [
        ["tool_calls"],
        ["tool_calls"],
        ["content"],
    ]
    assert speech.num_called == 0


def test_of_one_call_asked_for_further_ones_are_not_told() -> None:
    recorded = ALL["hermes, words before two"]
    form = Form(tools="hermes", is_one_call=True)
    found = plain(message_of(said_of(form, list(recorded.text))))
    assert found["calls"] == recorded.calls[:1]


@pytest.mark.parametrize("filler", ["x" * 70_000, " " * 70_000, '"' + "y" * 70_000])
def test_what_never_becomes_a_call_is_not_held_for_ever(filler: str) -> None:
    speech = Speech(Form(tools="hermes"))
    speech.push('<tool_call>{"arguments": ' + filler, is_end=False)
    assert len(speech._parser._feed.text) < 70_000 or filler.isspace()
    text = '<tool_call>{"arguments": ' + filler
    assert plain(message_of(said_of(Form(tools="hermes"), [text])))["content"] == text


def test_a_call_that_is_too_long_before_its_name_is_none_however_it_comes() -> None:
    text = '<tool_call>{"arguments": {"x": "' + "y" * 70_000 + '"}, "name": "f"}</tool_call>'
    form = Form(tools="hermes")
    one = plain(message_of(said_of(form, [text])))
    assert one == {"content": text, "reasoning": "", "calls": []}
    assert plain(message_of(said_of(form, cut(text, [1_000, 50_000, 69_000])))) == one
