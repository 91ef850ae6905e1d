"""Benches as pages: every number is there, to one scale, and nothing is fetched."""

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace

import pytest

from paceline.attention.measurements import Measurement
from paceline.bench.attention import AttentionReport, ContenderResult
from paceline.bench.backends import BackendsReport
from paceline.bench.latency import LatencyReport, LatencyResult
from paceline.bench.page import Bars, page, profile_bars
from paceline.bench.paired_runs import SpeedUp
from paceline.bench.speculative import PromptResult, SpeculativeReport
from paceline.engine.acceptance import Acceptance

RESULTS = Path(__file__).parents[2] / "docs/results"


def drawn_latency(document):
    return LatencyReport.drawings(results_of(document["results"], LatencyResult))


def results_of(rows, kind):
    """As much of a report as its drawings read."""
    found = [kind(**row) for row in rows]
    return SimpleNamespace(results=found, rows=found)


def drawn_speculative(document):
    prompts = [row | {"acceptance": acceptance(row)} for row in document["prompts"]]
    return SpeculativeReport(
        prepared=None,
        dtype="float32",
        forced=document["forced"],
        texts=None,
        output_len=document["output_len"],
        acceptance=acceptance(document),
        plain_tok_s=document["plain_tok_s"],
        speculative_tok_s=document["speculative_tok_s"],
        speed_up=SpeedUp(**document["speed_up"]),
        prompts=tuple(PromptResult(**row) for row in prompts),
        is_cut=False,
    ).drawings()


def acceptance(document):
    told = document["acceptance"]
    accepted = [round(share * told["rounds"]) for share in told["accepted_by_position"]]
    return Acceptance(rounds=told["rounds"], drafted=told["drafted_tokens"], accepted=accepted)


def drawn_attention(document):
    return AttentionReport.drawings(results_of(document["results"], ContenderResult))


def drawn_backends(document):
    return BackendsReport.drawings(results_of(document["rows"], Measurement))


RECORDS = [
    ("h200-bench-latency-llama-3.1-8b.json", drawn_latency),
    ("h200-bench-latency-round-chain.json", drawn_latency),
    ("cpu-bench-speculative-chain.json", drawn_speculative),
    ("h200-bench-attention.json", drawn_attention),
    ("h200-bench-attention-backends.json", drawn_backends),
    ("h200-profile-decode-batch-1.json", profile_bars),
    ("h200-profile-round-chain-batch-1.json", profile_bars),
]
DOCUMENT = {"versions": {"torch": "2", "triton": None}}


def record(name):
    return json.loads((RESULTS / name).read_text())


def drawings(text):
    """(texts, widths of bars) of each drawing."""
    found = []
    for piece in text.split("<svg")[1:]:
        svg = ET.fromstring("<svg" + piece.partition("</svg>")[0] + "</svg>")
        widths = [float(bar.get("width")) for bar in svg.iter("rect")]
        found.append(([each.text for each in svg.iter("text")], widths))
    return found


@pytest.mark.parametrize(("name", "bars_of"), RECORDS)
def test_every_number_of_a_record_is_drawn_and_written(name, bars_of):
    document = record(name)
    bars = [each for each in bars_of(document) if each.rows]
    drawn = drawings(page("paceline bench", document, bars))
    assert len(drawn) == len(bars) > 0
    for each, (texts, widths) in zip(bars, drawn, strict=True):
        numbers = [f"{value:{each.form}}" for _, value in each.rows]
        assert texts[0::2] == [row for row, _ in each.rows]
        assert texts[1::2] == numbers
        scale = max(widths) / max(value for _, value in each.rows)
        assert widths == pytest.approx([scale * value for _, value in each.rows], abs=0.06)


def test_a_latency_page_shows_each_batch():
    titles = {bars.title: dict(bars.rows) for bars in drawn_latency(record(RECORDS[0][0]))}
    assert titles["Decode rate of the whole batch [tokens/s]"]["batch 1"] == pytest.approx(258.3918)
    assert titles["Tokens per round of one request"] == {}


def test_an_acceptance_page_shows_each_position():
    first = drawn_speculative(record("cpu-bench-speculative-chain.json"))[0]
    assert [name for name, _ in first.rows] == ["draft 1", "draft 2", "draft 3"]
    assert first.rows[0][1] == pytest.approx(74.806, abs=0.001)


def test_a_profile_page_shows_the_whole_step():
    (steps,) = profile_bars(record("h200-profile-decode-batch-1.json"))
    assert {"attention", "idle within", "idle between"} < dict(steps.rows).keys()
    (rounds,) = profile_bars(record("h200-profile-round-chain-batch-1.json"))
    assert rounds.title.startswith("FORCED to 3 tokens per round: ")
    assert [name for name, _ in rounds.rows][:3] == ["derive", "propose", "verify"]


def test_forced_acceptance_is_said_over_every_drawing():
    document = record("cpu-bench-speculative-chain.json") | {"forced": 2.5}
    bars = drawn_speculative(document)
    assert all(each.title.startswith("FORCED to 2.5 tokens per round: ") for each in bars)


def test_a_page_is_whole_and_alone():
    bars = [Bars(title="<b> [ms]", rows=[("a<b", 0.0)]), Bars(title="none", rows=[])]
    text = page("paceline bench x on <gpu>", DOCUMENT | {"interrupted": True}, bars)
    assert "<h1>paceline bench x on &lt;gpu&gt;</h1>" in text
    assert "<h2>&lt;b&gt; [ms]</h2>" in text
    assert "Interrupted: this is what there was." in text
    assert "none" not in text.partition("<details>")[0].partition("<body>")[2]
    assert "torch 2" in text
    assert "triton None" not in text
    assert drawings(text) == [(["a<b", "0.0"], [0.0])]
    assert "http" not in text
    assert "<script" not in text
