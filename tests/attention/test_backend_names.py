"""The names of composed backends: what is written is what is read."""

import pytest

from paceline.attention.names import Cascade, Name, Pair, parse, singles


@pytest.mark.parametrize(
    ("name", "parsed", "inside"),
    [
        ("a", "a", ("a",)),
        ("", "", ("",)),
        ("a+b", Pair("a", "b"), ("a", "b")),
        ("a+b+c", Pair("a", Pair("b", "c")), ("a", "b", "c")),
        ("cascade(a)", Cascade("a"), ("a",)),
        ("cascade(a+b)", Cascade(Pair("a", "b")), ("a", "b")),
        ("cascade(a)+b", Pair(Cascade("a"), "b"), ("a", "b")),
        ("cascade(a)+cascade(b)", Pair(Cascade("a"), Cascade("b")), ("a", "b")),
        ("cascade(cascade(a))", Cascade(Cascade("a")), ("a",)),
        ("cascade(a", "cascade(a", ("cascade(a",)),
        ("a)", "a)", ("a)",)),
    ],
)
def test_a_name_is_read_as_it_is_written(name: str, parsed: Name, inside: tuple[str, ...]) -> None:
    assert parse(name) == parsed
    assert str(parsed) == name
    assert singles(parsed) == inside
