"""The document of `paceline bench throughput` for people: a table, and the drawings of a page."""

from collections.abc import Mapping
from typing import Any

from paceline.bench.page import Bars, Curves, Drawing
from paceline.bench.throughput_report import QUANTILES
from paceline.engine.acceptance import drafter_words

PARTS = ("schedule", "launch", "wait", "process", "text")
_WAITS = ("p50", "p90", "p99", "max")


def table(document: Mapping[str, Any]) -> str:
    """The document for people."""
    ready = document["ready_s"]
    told = "unknown" if ready is None else f"{ready:.2f} s"
    rows = [
        f"{document['model']} ({document['dtype']}) on {document['device']['name']}",
        f"boot {document['boot_s']:.2f} s, ready {told} after process start, kernel cache "
        f"{document['kernel_cache']}",
        f"attention {document['attention']['name']} ({document['attention']['why']})",
        *_drafter(document),
        *_traffic(document["traffic"], document["options"]),
        *_check(document["check"]),
        *_rates(document),
        "",
        "first pass, beside steady turns of the same steps",
        *_within(document["first"], document["device"]["type"]),
    ]
    middle = document["median_pass"]
    if middle is not None:
        rows += ["", "the steady pass of middle length"]
        rows += _within(middle, document["device"]["type"])
    return "\n".join(rows)


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


def kind_name(row: Mapping[str, Any]) -> str:
    """Of a row by kind of step, such as "decode graph"."""
    return str(row["kind"]) if row["kind"] == row["run"] else f"{row['kind']} {row['run']}"


def _drafter(document: Mapping[str, Any]) -> list[str]:
    plan = document["speculation"]
    if plan is None:
        return []
    forced = plan["forced_tokens_per_round"]
    word = "" if forced is None else f"; FORCED to {forced:g} tokens per round, the texts are wrong"
    return [f"speculation {drafter_words(plan)}{word}"]


def _traffic(traffic: Mapping[str, Any], options: Mapping[str, Any]) -> list[str]:
    rate, scale = traffic["request_rate"], traffic["scaled_by"]
    shared = traffic["shared_prefix_len"]
    sent = "at once" if rate is None else f"at {rate:g} per second"
    return [
        f"{traffic['num_requests']} requests {sent}, "
        + (f"{shared} tokens shared and " if shared else "")
        + f"prompts {_lengths(traffic['input_len'])}, outputs {_lengths(traffic['output_len'])}"
        + (f" (the usual lengths x {scale:.3f}, to fit the context)" if scale is not None else ""),
        f"temperature {traffic['temperature']:g}, top-p {traffic['top_p']:g}, "
        f"at most {options['max_num_seqs']} run; prefix cache "
        f"{'on' if options['enable_prefix_cache'] else 'off'}, where passes find "
        f"{traffic['found_in_cache']}",
    ]


def _lengths(told: Mapping[str, Any]) -> str:
    if told["least"] == told["most"]:
        return str(told["least"])
    return f"{told['least']}-{told['most']} (mean {told['mean']:.0f})"


def _check(check: Mapping[str, Any]) -> list[str]:
    count = check["equal"] + check["differ"]
    words = f"check: counts are exact; sent twice, {check['equal']} of {count} answers are equal"
    if check["differ"]:
        steps = "the same" if check["same_steps"] else "other"
        words += (
            f", {check['differ']} differ, computed in {steps} steps: the {check['judged_ties']} "
            "looked into are ties"
        )
    return [words]


def _rates(document: Mapping[str, Any]) -> list[str]:
    first, steady = document["first"], document["steady"]
    rows = [
        "",
        f"{'pass':<10}{'s':>9}{'output tok/s':>14}{'total tok/s':>13}{'decode tok/s':>14}"
        + "".join(f"{f'ttft {name}':>11}" for name in _WAITS)
        + "".join(f"{f'itl {name}':>10}" for name in _WAITS),
        _rate("first", first),
        f"{'check':<10}{document['check']['repeat_seconds']:>9.2f}",
        *(_rate(f"steady {n}", row) for n, row in enumerate(document["passes"], 1)),
    ]
    if steady is not None:
        rate = steady["output_tok_s"]
        rows.append(
            f"median {rate['median']:.1f} output tok/s, spread {rate['spread']:.1%}, total "
            f"{steady['total_tok_s']['median']:.1f}; the first took {first['to_steady']:.2f} x "
            f"the steady {steady['seconds']['median']:.2f} s  (waits in ms)"
        )
    return rows


def _rate(name: str, row: Mapping[str, Any]) -> str:
    return (
        f"{name:<10}{row['seconds']:>9.2f}{row['output_tok_s']:>14.1f}{row['total_tok_s']:>13.1f}"
        f"{_number(row['decode_tok_s']):>14}"
        + "".join(f"{row['ttft_ms'][each]:>11.1f}" for each in _WAITS)
        + "".join(f"{_number((row['inter_token_ms'] or {}).get(each)):>10}" for each in _WAITS)
    )


def _within(part: Mapping[str, Any], device: str) -> list[str]:
    within = part["details"]
    where = "a CPU runs a step in its launch" if device == "cpu" else "seconds"
    rows = [
        f"{'step':<16}{'steps':>7}{'tokens':>9}{'padded':>9}{'waste':>7}"
        + "".join(f"{name:>10}" for name in PARTS)
        + f"{'all s':>9}  ({where})",
        *map(_kind, within["kinds"]),
        f"{'outside turns':<98}{part['outside_s']:>9.3f}",
    ]
    excess = within["excess_ms"]
    if excess is not None:
        rows.append(
            f"turns beyond their steady time: p50 {excess['p50']:.1f} ms, p90 {excess['p90']:.1f}, "
            f"p99 {excess['p99']:.1f}, max {excess['max']:.1f}"
        )
    return [*rows, "longest turns", *map(_turn, within["longest"])]


def _kind(row: Mapping[str, Any]) -> str:
    padded = row["padded_tokens"]
    waste = f"{1 - row['tokens'] / padded:.1%}" if padded else "-"
    return (
        f"{kind_name(row):<16}{row['steps']:>7}{row['tokens']:>9}{padded:>9}{waste:>7}"
        + "".join(f"{row[f'{part}_s']:>10.3f}" for part in PARTS)
        + f"{row['seconds']:>9.3f}"
    )


def _turn(row: Mapping[str, Any]) -> str:
    beyond = "" if row["excess_ms"] is None else f" ({row['excess_ms']:.1f} beyond)"
    parts = " ".join(f"{part} {row[f'{part}_ms']:.1f}" for part in PARTS)
    return (
        f"  {row['ms']:.1f} ms{beyond} at {row['began_s']:.2f} s: {parts}; "
        f"launched {_step(row['launched'])}, received {_step(row['received'])}"
    )


def _step(step: Mapping[str, Any] | None) -> str:
    if step is None:
        return "nothing"
    return (
        f"{step['kind']} {step['run']} {step['rows']} x {step['tokens']} tokens "
        f"(padded {step['padded_rows']} x {step['padded_tokens']})"
    )


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _over_time(timeline: Mapping[str, Any]) -> list[tuple[float, float]]:
    """Each slice at its middle."""
    width = timeline["slice_s"]
    return [((index + 0.5) * width, rate) for index, rate in enumerate(timeline["output_tok_s"])]


def _by_share(quantiles: list[float]) -> list[tuple[float, float]]:
    return [(100 * share, value) for share, value in zip(QUANTILES, quantiles, strict=False)]
