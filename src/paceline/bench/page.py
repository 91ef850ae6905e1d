"""A bench's document as one self-contained page: bars and curves in SVG, with numbers."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any, Protocol

_BAR_HEIGHT, _ROW_HEIGHT = 18, 26  # pixels
_LABEL_WIDTH, _BAR_WIDTH, _NUMBER_WIDTH = 220, 520, 120
_CURVE_HEIGHT, _LINE_HEIGHT = 200, 20
_COLOURS = ("#d4764a", "#4a7fd4", "#4aa36b", "#8a5cc2")  # of curves, in order
_STYLE = """
body { font: 14px/1.5 system-ui, sans-serif; margin: 2rem; color: #1c1c1e; background: #fff; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
svg { max-width: 100%; } text { font: 13px system-ui, sans-serif; fill: currentColor; }
rect { fill: #4a7fd4; } polyline { fill: none; stroke-width: 2; } pre { white-space: pre-wrap; }
@media (prefers-color-scheme: dark) { body { color: #ececf0; background: #1c1c1e; } }
"""


class Drawing(Protocol):
    """What a page shows."""

    def svg(self) -> str:
        """With its title; empty when there is nothing to draw."""
        ...


class Report(Protocol):
    """What a bench found."""

    @property
    def is_cut(self) -> bool:
        """Whether Ctrl-C ended it early."""
        ...

    def to_json(self) -> dict[str, Any]:
        """The document."""
        ...

    def table(self) -> str:
        """For people."""
        ...

    def drawings(self) -> Sequence[Drawing]:
        """For a page."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Bars:
    """A bar for each row, all to one scale that begins at 0."""

    title: str  # with the unit
    rows: Sequence[tuple[str, float]]  # what, how much
    form: str = ",.1f"  # of a number

    def svg(self) -> str:
        return _bars_svg(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """A curve for each name, all to one scale that begins at 0 on both axes."""

    title: str  # with the units
    curves: Sequence[tuple[str, Sequence[tuple[float, float]]]]  # name, its points (x, y)

    def svg(self) -> str:
        return _curves_svg(self)


def profile_bars(document: Mapping[str, Any]) -> list[Bars]:
    """Of a profile of steps, by role, or of rounds, by segment; what the device waits is a part."""
    forced = document.get("forced_tokens_per_round")
    word = "" if forced is None else f"FORCED to {forced:g} tokens per round: "
    rows = [(row["role"], row["us_per_step"]) for row in document.get("roles", ())]
    rows += [(row["segment"], row["us_per_round"]) for row in document.get("segments", ())]
    waits = [(f"idle {where}", document[f"idle_{where}_us"]) for where in ("within", "between")]
    rows += [(name, wait) for name, wait in waits if wait is not None]
    return [Bars(title=f"{word}Where a step's time goes [µs]", rows=rows)]


def page(title: str, document: Mapping[str, Any], drawings: Sequence[Drawing]) -> str:
    """The whole page, the document below its drawings.  title: with the device."""
    drawn = "".join(each.svg() for each in drawings)
    whole = escape(json.dumps(document, indent=1))
    versions = ", ".join(f"{name} {found}" for name, found in document["versions"].items() if found)
    cut = "<p>Interrupted: this is what there was.</p>\n" if "interrupted" in document else ""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style></head><body>\n"
        f"<h1>{escape(title)}</h1>\n"
        f"<p>{escape(versions)}</p>\n{cut}{drawn}"
        f"<details><summary>the whole document</summary><pre>{whole}</pre></details>\n"
        "</body></html>\n"
    )


def bars(title: str, rows: Sequence[tuple[str, object]], field: str, *, form: str = ",.1f") -> Bars:
    """Of the rows whose `field` is a number, and not None."""
    numbers = ((name, getattr(row, field)) for name, row in rows)
    found = [(name, number) for name, number in numbers if number is not None]
    return Bars(title=title, rows=found, form=form)


def _bars_svg(bars: Bars) -> str:
    if not bars.rows:
        return ""
    longest = max(value for _, value in bars.rows) or 1.0
    width = _LABEL_WIDTH + _BAR_WIDTH + _NUMBER_WIDTH
    drawn = "".join(
        _bar(
            name,
            f"{value:{bars.form}}",
            top=index * _ROW_HEIGHT,
            width=_BAR_WIDTH * value / longest,
        )
        for index, (name, value) in enumerate(bars.rows)
    )
    height = len(bars.rows) * _ROW_HEIGHT
    return (
        f"<h2>{escape(bars.title)}</h2>\n"
        f'<svg role="img" width="{width}" height="{height}" viewBox="0 0 {width} {height}">\n'
        f"{drawn}</svg>\n"
    )


def _bar(name: str, number: str, *, top: int, width: float) -> str:
    line = top + _BAR_HEIGHT - 4  # of the text
    return (
        f'<text x="{_LABEL_WIDTH - 8}" y="{line}" text-anchor="end">{escape(name)}</text>'
        f'<rect x="{_LABEL_WIDTH}" y="{top}" width="{width:.1f}" height="{_BAR_HEIGHT}"/>'
        f'<text x="{_LABEL_WIDTH + width + 8:.1f}" y="{line}">{number}</text>\n'
    )


def _curves_svg(drawing: Curves) -> str:
    curves = [(name, points) for name, points in drawing.curves if points]
    if not curves:
        return ""
    most_x = max(x for _, points in curves for x, _ in points) or 1.0
    most_y = max(y for _, points in curves for _, y in points) or 1.0
    left, width, bottom = 80, _BAR_WIDTH, _CURVE_HEIGHT + _LINE_HEIGHT
    drawn = [
        f'<text x="{left - 8}" y="{_LINE_HEIGHT}" text-anchor="end">{most_y:,.5g}</text>',
        f'<text x="{left - 8}" y="{bottom}" text-anchor="end">0</text>',
        f'<text x="{left + width}" y="{bottom + _LINE_HEIGHT}" text-anchor="end">'
        f"{most_x:,.5g}</text>",
    ]
    for index, (name, points) in enumerate(curves):
        colour = _COLOURS[index % len(_COLOURS)]
        places = " ".join(
            f"{left + width * x / most_x:.1f},{bottom - _CURVE_HEIGHT * y / most_y:.1f}"
            for x, y in points
        )
        line = (index + 1) * _LINE_HEIGHT
        drawn += [
            f'<polyline points="{places}" stroke="{colour}"/>',
            f'<text x="{left + width + 16}" y="{line}" style="fill:{colour}">{escape(name)}</text>',
        ]
    size = left + width + _NUMBER_WIDTH, bottom + 2 * _LINE_HEIGHT
    return (
        f"<h2>{escape(drawing.title)}</h2>\n"
        f'<svg role="img" width="{size[0]}" height="{size[1]}" viewBox="0 0 {size[0]} {size[1]}">\n'
        + "\n".join(drawn)
        + "</svg>\n"
    )
