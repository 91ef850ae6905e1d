"""The soak of a server in its short form, and that it would see what it looks for."""

import pytest

import soak
from soak import OPEN, Soak, Tally

NO_CLOCK = {"max_gap_s": float("inf"), "max_growth_mib": float("inf")}  # of a run of seconds


def test_rude_clients_change_no_text_and_nothing_of_them_stays(monkeypatch):
    monkeypatch.setattr(soak, "PROMPTS", soak.PROMPTS[::3])  # calm texts were half of the time
    monkeypatch.setattr(soak, "TOKENS", (1, 7, 24))
    words = ("bundled", "--dtype", "float32", "--max-model-len", "1024", "--threads", "1")
    tally = soak.soak(1.0, (*words, "--enforce-eager"))
    assert not tally.faults(**NO_CLOCK)
    assert not tally.leaked
    assert tally.places == OPEN
    assert all(tally.sent[kind] for kind in ("leaves", "half a body", "big body", "burst"))


def tallied(**found):
    calm = {"compared": 9, "gaps": 9, "places": OPEN, "rss_mib": [100.0] * 30}
    return Tally(**{**calm, **found})


@pytest.mark.parametrize(
    ("found", "text"),
    [
        ({"wrong_texts": ["'x' x 7"]}, "wrong text: 'x' x 7"),
        ({"failed": ["whole: 500: no"]}, "failed: whole: 500: no"),
        ({"leaked": {"requests_running": 2.0}}, "leaked: requests_running is 2"),
        ({"places": OPEN - 1}, f"places: {OPEN - 1} of {OPEN} requests were taken at once"),
        ({"compared": 0}, "0 texts compared, 9 gaps: nothing was shown"),
        ({"largest_gap_s": 1.5}, "gap: 1.50 s, at most 1"),
        ({"rss_mib": [100.0] * 20 + [190.0] * 10}, "memory: 90 MiB more, at most 64"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_each_fault_is_told(found, text):
    assert tallied(**found).faults(max_gap_s=1.0, max_growth_mib=64.0) == [text]
    assert not tallied().faults(max_gap_s=1.0, max_growth_mib=64.0)


def test_memory_before_the_middle_is_no_growth():
    assert tallied(rss_mib=[10.0] * 14 + [100.0] * 16).growth_mib == 0.0


def test_a_text_that_is_another_is_seen():
    run = Soak("http://127.0.0.1:1/v1", "m", seconds=1.0)
    run._texts = {("a", 7): "abc"}
    run._compare(("a", 7), "abc")
    run._compare(("a", 7), "ab", is_whole=False)
    assert not run.tally.wrong_texts
    run._compare(("a", 7), "ab")
    run._compare(("a", 7), "b", is_whole=False)
    assert len(run.tally.wrong_texts) == 2
