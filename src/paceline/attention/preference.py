"""Which of several backends that can run auto prefers: the measured fastest, if by enough."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.attention.measurements import LayerShape, Measured, Ranking, Table, fastest

# Another than the first must be this much faster: it brings a library's planning on the host, or a
# second backend for the other phase, which attention alone does not show.
MARGIN = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """A backend, why, and why not the others."""

    name: str
    why: str
    passed_over: Mapping[str, list[str]]  # name -> reasons


def prefer(
    candidates: Sequence[str], phase: Measured, gpu: str, *, layer: LayerShape, table: Table
) -> Preference:
    """Choose among `candidates`, the preferred one first, all of which can run."""
    ranking = fastest(gpu, phase, layer, candidates, table=table)
    kind = phase if layer.chunk is None else f"{phase} of chunks"
    what = f"{kind} on {gpu}"
    unmeasured = {name: [f"not measured for {what}"] for name in ranking.unmeasured}
    if len(ranking.us) < 2:
        first, *others = candidates
        why = f"first of {', '.join(candidates)}, which can run: no measurements of "
        why += f"{', '.join(others if ranking.us else candidates)} for {what}"
        unmeasured.pop(first, None)
        return Preference(name=first, why=why, passed_over=unmeasured)
    name = _chosen(candidates[0], ranking)
    slower = {
        other: [f"{_us(us)} us for {kind} against {_us(ranking.us[name])} of {name}"]
        for other, us in ranking.us.items()
        if other != name
    }
    why = _why(name, what, ranking=ranking, layer=layer)
    return Preference(name=name, why=why, passed_over=slower | unmeasured)


def prefer_for_all(
    candidates: Sequence[str],
    phase: Measured,
    gpu: str,
    *,
    layers: Sequence[LayerShape],
    table: Table,
) -> Preference:
    """As `prefer`, for a model with several kinds of layers, which one backend serves: the first,
    unless the same other is preferred for each kind."""
    found = [prefer(candidates, phase, gpu, layer=each, table=table) for each in layers]
    names = {each.name for each in found}
    name = found[0].name if len(names) == 1 else candidates[0]
    passed_over: dict[str, list[str]] = {}
    for layer, each in zip(layers, found, strict=True):
        alone = {} if each.name == name else {each.name: [f"preferred for {layer} alone"]}
        for other, reasons in (dict(each.passed_over) | alone).items():
            listed = passed_over.setdefault(other, [])
            listed += [reason for reason in reasons if reason not in listed]
    passed_over.pop(name, None)
    whys = dict.fromkeys(each.why for each in found if each.name == name)
    otherwise = f"first of {', '.join(candidates)}: no other is preferred for all its layers"
    return Preference(name=name, why="; ".join(whys) or otherwise, passed_over=passed_over)


def _chosen(first: str, ranking: Ranking) -> str:
    """The fastest, or `first` unless that is slower by MARGIN."""
    best = next(iter(ranking.us))
    return best if ranking.us[best] <= (1 - MARGIN) * ranking.us[first] else first


def _why(name: str, what: str, *, ranking: Ranking, layer: LayerShape) -> str:
    best, *others = ranking.us
    times = ", ".join(_us(ranking.us[other]) for other in others)
    where = "" if ranking.layer == layer else f" with {ranking.layer}"
    measured = f"(measured{where}: {_us(ranking.us[best])} us against {times})"
    missing = f"; {', '.join(ranking.unmeasured)} not measured" if ranking.unmeasured else ""
    listed = ", ".join(ranking.us)
    if name == best:
        return f"fastest of {listed} for {what} {measured}{missing}"
    lead = f"{best} is less than {MARGIN:.0%} faster"
    return f"first of {listed} for {what}, where {lead} {measured}{missing}"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
