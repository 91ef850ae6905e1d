"""Timings in turns: the interval of a median, and sides that answer or end."""

import statistics

import pytest

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
