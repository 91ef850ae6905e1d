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
    unmeasured = {name: [f"not measured for {phase} on {gpu}"] for name in ranking.unmeasured}
    if len(ranking.us) < 2:
        first, *others = candidates
        why = f"first of {', '.join(candidates)}, which can run: no measurements of "
        why += f"{', '.join(others if ranking.us else candidates)} for {phase} on {gpu}"
        unmeasured.pop(first, None)
        return Preference(name=first, why=why, passed_over=unmeasured)
    name = _chosen(candidates[0], ranking)
    slower = {
        other: [f"{_us(us)} us for {phase} against {_us(ranking.us[name])} of {name}"]
        for other, us in ranking.us.items()
        if other != name
    }
    why = _why(name, phase, gpu, ranking=ranking, layer=layer)
    return Preference(name=name, why=why, passed_over=slower | unmeasured)


def _chosen(first: str, ranking: Ranking) -> str:
    """The fastest, or `first` unless that is slower by MARGIN."""
    best = next(iter(ranking.us))
    return best if ranking.us[best] <= (1 - MARGIN) * ranking.us[first] else first


def _why(name: str, phase: Measured, gpu: str, *, ranking: Ranking, layer: LayerShape) -> str:
    best, *others = ranking.us
    times = ", ".join(_us(ranking.us[other]) for other in others)
    where = "" if ranking.layer == layer else f" with {ranking.layer}"
    measured = f"(measured{where}: {_us(ranking.us[best])} us against {times})"
    missing = f"; {', '.join(ranking.unmeasured)} not measured" if ranking.unmeasured else ""
    listed = ", ".join(ranking.us)
    if name == best:
        return f"fastest of {listed} for {phase} on {gpu} {measured}{missing}"
    lead = f"{best} is less than {MARGIN:.0%} faster"
    return f"first of {listed} for {phase} on {gpu}, where {lead} {measured}{missing}"


def _us(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
