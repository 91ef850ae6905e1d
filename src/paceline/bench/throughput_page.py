"""The drawings of `paceline bench throughput`."""

from collections.abc import Mapping
from typing import Any

from paceline.bench.page import Bars, Curves, Drawing
from paceline.bench.throughput_report import QUANTILES
from paceline.bench.throughput_table import PARTS, kind_name


def throughput_drawings(document: Mapping[str, Any]) -> list[Drawing]:
    """Rate over time, waits, steps by kind; the first pass beside a steady one."""
    passes = {"first": document["first"]["details"]}
    if document["median_pass"] is not None:
        passes["steady"] = document["median_pass"]["details"]
    drawn: list[Drawing] = [
        Curves(
            title="Output tokens per second over time [s]",
            curves=[(name, _over_time(within["timeline"])) for name, within in passes.items()],
        ),
        *(
            Curves(
                title=f"{title} [ms] by share of all [%]",
                curves=[(name, _by_share(within[key])) for name, within in passes.items()],
            )
            for title, key in (
                ("Time to first token", "ttft_ms"),
                ("Time between tokens of a request", "inter_token_ms"),
            )
        ),
    ]
    for name, within in passes.items():
        kinds = [(kind_name(row), row) for row in within["kinds"]]
        drawn += [
            Bars(
                title=f"Steps of the {name} pass",
                rows=[(kind, row["steps"]) for kind, row in kinds if row["steps"]],
                form=",.0f",
            ),
            Bars(
                title=f"Where the time of the {name} pass went [s]",
                rows=[
                    (f"{kind}: {part}", row[f"{part}_s"]) for kind, row in kinds for part in PARTS
                ],
                form=",.3f",
            ),
        ]
    return drawn


def _over_time(timeline: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Each slice at its middle."""
    width = timeline["slice_s"]
    return [((index + 0.5) * width, rate) for index, rate in enumerate(timeline["output_tok_s"])]


def _by_share(quantiles: list[float]) -> list[tuple[float, float]]:
    return [(100 * share, value) for share, value in zip(QUANTILES, quantiles, strict=False)]
