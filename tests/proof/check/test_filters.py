"""The language of --filter, against Python's own operators."""

import itertools

import pytest

from paceline.core.errors import ConfigError
from paceline.proof.check.filters import parse_filter

CELL = "dense/fa4/target_verify/cuda_graph/tree_topk2_p16"


@pytest.mark.parametrize(
    ("text", "is_wanted"),
    [
        ("verify", True),
        ("VERIFY", True),
        ("decode", False),
        ("verify and not triton", True),
        ("verify and not fa4", False),
        ("not verify or fa4", True),
        ("not (verify or fa4)", False),
        ("(decode or verify)and(fa4)", True),
        ("dense/*/target_verify/*", True),
        ("verify*", False),
        ("*topk?_p16", True),
        ("*topk[48]*", False),
        ("not not verify", True),
        ("dense/fa4", True),
    ],
)
def test_an_expression_says_of_a_cell_whether_it_is_wanted(text, is_wanted):
    assert parse_filter(text)(CELL) is is_wanted


def test_precedence_is_that_of_python():
    texts = ["{} or {} and {}", "not {} and {} or {}", "{} and not {} or not {}"]
    texts += ["({} or {}) and {}", "not ({} or {}) or {}", "{} and ({} or not {})"]
    for text, values in itertools.product(texts, itertools.product((True, False), repeat=3)):
        words = ["fa4" if value else "absent" for value in values]
        assert parse_filter(text.format(*words))(CELL) is bool(eval(text.format(*values)))


@pytest.mark.parametrize(
    ("text", "expected", "column"),
    [
        ("", "a word, not or ( at column 1, got the end", 0),
        ("verify and", "a word, not or ( at column 11, got the end", 10),
        ("verify triton", "and, or, or the end at column 8, got 'triton'", 7),
        ("and verify", "a word, not or ( at column 1, got 'and'", 0),
        ("verify or or fa4", "a word, not or ( at column 11, got 'or'", 10),
        ("(verify or fa4", "and, or, or ) at column 15, got the end", 14),
        ("verify)", "and, or, or the end at column 7, got ')'", 6),
        ("not ()", "a word, not or ( at column 6, got ')'", 5),
    ],
)
def test_a_bad_expression_is_refused_with_a_caret_under_the_place(text, expected, column):
    with pytest.raises(ConfigError) as refused:
        parse_filter(text)
    first, shown, caret = str(refused.value).split("\n")
    assert expected in first
    assert "as in 'verify and not triton'" in first
    assert (shown, caret) == (f"  {text}", " " * (column + 2) + "^")
