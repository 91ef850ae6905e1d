"""Timings in turns: the interval of a median, and sides that answer or end."""

import re
import statistics

import pytest

from in_turns import disagreement
from sides import SOURCES, Side, median_interval

# Of the sign test: the largest d with P(Binomial(n, 1/2) < d) <= 0.025, as tables print it.
RANKS = [(1, 1), (5, 1), (6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (15, 4), (20, 6), (25, 8)]


@pytest.mark.parametrize(("pairs", "rank"), RANKS)
def test_the_interval_of_a_median_is_that_of_the_sign_test(pairs, rank):
    values = [1.0 / (1 + index * 7 % pairs) for index in range(pairs)]
    middle, low, high = median_interval(values)
    assert middle == statistics.median(values)
    assert (low, high) == (sorted(values)[rank - 1], sorted(values)[-rank])


CHILD = """
import json, sys
from pathlib import Path
import paceline
print(json.dumps({"from": str(Path(paceline.__file__).parents[1])}), flush=True)
for line in sys.stdin:
    print(json.dumps({"heard": line.strip()}), flush=True)
    if "end" in line: sys.exit(3)
"""


def test_a_side_runs_over_its_sources_and_answers_line_by_line():
    side = Side(SOURCES, ["-c", CHILD])
    assert side.ready == {"from": str(SOURCES)}
    assert side.ask("one") == {"heard": "one"}
    assert side.ask("end") == {"heard": "end"}
    with pytest.raises(SystemExit, match="a side ended with code 3"):
        side.ask("two")


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ([5, 5, 5], [5, 5, 5], None),
        ([4, 5, 5], [4, 5, 5], "side old says other tokens at time 2 than at first"),
        ([5, 5, 5], [5, 5, 4], "side new says other tokens at time 3 .*enable_prefix_cache"),
        ([5, 5, 5], [4, 4, 4], "sides old and new say different tokens"),
    ],
)
def test_sides_that_differ_are_told_from_one_that_does_not_repeat_itself(old, new, fault):
    found = disagreement({"old": old, "new": new})
    assert found == fault if fault is None else re.match(fault, found)
