"""Who `paceline prove` compares with plain decoding: contenders, from what was asked."""

from collections.abc import Mapping
from dataclasses import dataclass

from paceline.core.errors import ConfigError
from paceline.core.options.asked import engine_options
from paceline.core.options.engine_options import OFF, SAMPLE_AND_MATCH
from paceline.plan.speculation import Speculation, without_speculation
from paceline.proof.lossless.drafting import speculation_of, with_drafter


@dataclass(frozen=True, slots=True, kw_only=True)
class Contestant:
    """An engine that should give the text of the reference."""

    label: str  # what is different about it
    options: Mapping[str, object]
    speculation: Speculation | None


def contenders_of(asked: Mapping[str, object], against: str | None) -> list[Contestant]:
    """The drafter asked for, the backend `against`, and both at once where both are named.

    With neither, the drafter the engine would choose for the model, or prompt lookup.  Raises
    ConfigError where nothing is left to compare, for what changes the text by design, and for
    ranks, whose layers are not read.
    """
    _refuse_unread(asked)
    plain = without_speculation(asked)
    is_wanted = against is None or speculation_of(asked) is not None
    drafting = with_drafter(asked) if is_wanted else None
    found = []
    if drafting is not None:
        found.append(_contender("speculation", drafting))
    if against is not None:
        on = {"attention_backend": against}
        found.append(_contender(f"attention {against}", plain | on))
        if drafting is not None:
            found.append(_contender(f"speculation, attention {against}", drafting | on))
    if not found:
        raise ConfigError.about(
            "what to compare",
            expected="a drafter or another attention backend",
            got=f"--speculative-algorithm {OFF} without --against",
            remedy="leave the flag out, or add --against BACKEND",
        )
    return found


def _contender(label: str, options: dict[str, object]) -> Contestant:
    return Contestant(label=label, options=options, speculation=speculation_of(options))


def _refuse_unread(asked: Mapping[str, object]) -> None:
    options = engine_options(asked)
    changed = {
        "--force-accept-len": (options.force_accept_len is not None, "left out"),
        "--speculative-acceptance": (
            options.speculative_acceptance != SAMPLE_AND_MATCH,
            f"{SAMPLE_AND_MATCH}, which alone promises equal text",
        ),
        "--tensor-parallel-size": (
            options.tensor_parallel_size != 1,
            "1: what parts is read from the layers of one process",
        ),
    }
    for flag, (is_set, expected) in changed.items():
        if is_set:
            name = flag.removeprefix("--").replace("-", "_")
            got = getattr(options, name)
            raise ConfigError.about(
                flag, expected=expected, got=got, remedy="remove it from the command"
            )
