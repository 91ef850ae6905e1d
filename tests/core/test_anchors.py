"""Places in source text by symbol and syntax."""

import ast
import textwrap

import pytest

from paceline.core.reverts.anchors import AnchorError, replaced, symbols_of

SOURCE = '''\
"""A module."""

LIMIT, STEP = 3, 1


def add(a, b):
    # what it says
    total = (
        a + b  # of both
    )
    return total * 2


class Box:
    size: int = 4

    def grow(self, by):
        if by:
            self.size += by
            self.told()
        return f"{by + 1} wide"

    def fill(self, items):
        def weight(each):
            return each + 1

        return sum(weight(each) for each in items)


if LIMIT:

    @staticmethod
    def late(a, b):
        return a + b

try:
    import gone
except ImportError:
    OTHERWISE = 7
'''


GENERATOR = "(weight(each) for each in items)"
BLOCK = """\
        if by:
            self.size += by
            self.told()
"""


@pytest.mark.parametrize(
    ("symbol", "find", "replace", "old", "new"),
    [
        ("add", "a+b", "a - b", "a + b  # of both", "a - b"),
        ("add", "( a + b )", "b", "a + b  # of both", "b"),
        ("add", "total", "total + 1", "return total * 2", "return (total + 1) * 2"),
        ("add", "total * 2", "total if a else b", "total * 2", "total if a else b"),
        ("LIMIT", "3", "5", "= 3, 1", "= 5, 1"),
        ("OTHERWISE", "7", "8", "= 7", "= 8"),
        ("STEP", "1", "5", "= 3, 1", "= 3, 5"),
        ("Box.size", "4", "5", "= 4", "= 5"),
        ("late", "a + b", "a", "return a + b\n", "return a\n"),
        ("Box.fill.weight", "each + 1", "each", "each + 1", "each"),
        ("Box.fill", GENERATOR, "items", GENERATOR, "(items)"),
        ("Box.grow", "self.told()", "", "self.told()", "pass"),
        ("Box.grow", "self.size += by", "by = 2\nby += 1", "self.size += by", "by = 2; by += 1"),
        ("Box.grow", textwrap.dedent(BLOCK), "self.told()", BLOCK, "        self.told()\n"),
        (
            "Box.grow",
            "self.size += by\nself.told()",
            "",
            BLOCK,
            "        if by:\n            pass\n",
        ),
    ],
)
def test_a_place_is_found_by_its_syntax_and_nothing_else_changes(symbol, find, replace, old, new):
    assert SOURCE.count(old) == 1
    edited = replaced(SOURCE, symbol, find, replace)
    assert ast.dump(ast.parse(edited)) == ast.dump(ast.parse(SOURCE.replace(old, new)))


def test_comments_and_lines_around_stay():
    edited = replaced(SOURCE, "add", "a + b", "a - b").splitlines()
    lines = SOURCE.splitlines()
    assert [i for i, line in enumerate(lines) if edited[i] != line] == [8]
    assert edited[8] == "        (a - b)  # of both"


def test_letters_of_several_bytes_do_not_shift_a_place():
    source = 'def f(a):\n    return "ä€" + a + "ö"\n'
    assert replaced(source, "f", '"ä€" + a', "a") == 'def f(a):\n    return a + "ö"\n'


@pytest.mark.parametrize(
    ("symbol", "find", "text"),
    [
        ("ad", "a + b", "no symbol ad; near it: add"),
        ("zzz", "a + b", "no symbol zzz; near it: nothing like it"),
        ("Box.grow", "by", r"found 2 times in Box.grow: 'by'; near it: line 18: if by:; line 19"),
        ("add", "totals * 2", r"found 0 times in add: 'totals \* 2'; .*line 11: return to"),
        ("add", "qqqq()", "near it: nothing like it"),
        ("Box.grow", "by + 1", "found 0 times"),  # within a formatted string
        ("late", "a - b", "found 0 times in late"),
        ("Box.fill", "each in items", "found 0 times in Box.fill"),
    ],
)
def test_a_place_that_is_not_there_once_is_told_with_what_is(symbol, find, text):
    with pytest.raises(AnchorError, match=text):
        replaced(SOURCE, symbol, find, "0")


def test_symbols_are_what_modules_and_classes_define_and_functions_within():
    names = [name for name, _ in symbols_of(ast.parse(SOURCE))]
    assert names == [
        *("LIMIT", "STEP", "add", "Box", "Box.size", "Box.grow", "Box.fill", "Box.fill.weight"),
        *("late", "OTHERWISE"),
    ]
