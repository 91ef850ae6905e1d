"""Which options draft, for tools that compare an engine with and without speculation."""

from collections.abc import Mapping

from paceline.core.options.asked import engine_options
from paceline.core.options.engine_options import OFF
from paceline.plan.speculation import Speculation, plan_speculation
from paceline.plan.target import find_target

ALWAYS = "NGRAM"  # needs no draft model


def speculation_of(asked: Mapping[str, object]) -> Speculation | None:
    """Who drafts with these options; None: nobody.  Raises ConfigError, ModelError."""
    options = engine_options(asked)
    has_weights = options.load_format != "dummy"
    target = find_target(options, weights=has_weights)
    return plan_speculation(options, target.config, target.source, weights=has_weights)


def with_drafter(asked: Mapping[str, object]) -> dict[str, object] | None:
    """What was asked, with its drafter by name: one that is named drafts for every request.

    Prompt lookup where nobody would draft; None: drafting is off.
    """
    if engine_options(asked).speculative_algorithm == OFF:
        return None
    found = speculation_of(asked)
    drafter = ALWAYS if found is None else found.drafter.algorithm
    return {**asked, "speculative_algorithm": drafter}
