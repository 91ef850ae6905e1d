"""Speculation: which drafter an engine runs, and that it fits its model, before a weight is read.

options -> who drafts (named, or told from the draft model, or the bundled head)
        -> how deep and how wide (DraftShape)
        -> the drafter, read and checked against the target by its own folder
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.events import Event
from paceline.core.model.cache_groups import CacheGroupSpec, cache_group_specs, in_format
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import OFF, SAMPLE_AND_MATCH, EngineOptions, known
from paceline.models.locate import ModelSource
from paceline.plan.contradictions import (
    refuse_acceptance,
    refuse_axes,
    refuse_strays,
    refuse_topk,
)
from paceline.plan.draft_choice import choose_drafter, choose_shape
from paceline.speculate.drafter import Chosen, Drafter

_DRAFTING = ("speculative_", "force_accept_len")  # how the names of its options begin
FORCED = "forced_acceptance"  # reason code


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A drafter, decided and checked, and what becomes of its drafts."""

    drafter: Drafter
    acceptance: str  # SAMPLE_AND_MATCH or REJECTION
    forced: float | None  # tokens per round, whatever was sampled
    chosen: Mapping[str, Chosen]  # option -> what it became, where it was left open

    @property
    def shape(self) -> DraftShape:
        return self.drafter.shape

    @property
    def caution(self) -> Event | None:
        """What a reader of its texts must know."""
        if self.forced is None:
            return None
        detail = f"FORCED to {self.forced:g} tokens per round: every text that is drafted is WRONG"
        return Event(FORCED, detail)

    def __str__(self) -> str:
        drafter, shape = self.drafter, self.shape
        form = f"chain of {shape.num_steps} drafts"
        if not shape.is_chain:
            form = f"tree of topk {shape.topk} and depth {shape.num_steps}"
        who = "" if drafter.source is None else f" by {drafter.source.name}"
        words = [
            f"{drafter.algorithm}{who}: a {form}, {shape.num_draft_tokens} tokens verified per "
            "request and round"
        ]
        words += [f"reads {', '.join(drafter.taps)}"] if drafter.taps else []
        words += [f"accepts by {self.acceptance}"] if self.acceptance != SAMPLE_AND_MATCH else []
        words += [f"FORCED to {self.forced:g} tokens per round"] if self.forced else []
        return "; ".join(words)

    def to_json(self) -> dict[str, object]:
        """What `paceline explain --json` carries under "speculation"."""
        drafter = self.drafter
        return {
            "algorithm": drafter.algorithm,
            "draft_model": None if drafter.source is None else drafter.source.name,
            "num_steps": self.shape.num_steps,
            "topk": self.shape.topk,
            "num_draft_tokens": self.shape.num_draft_tokens,
            "taps": list(drafter.taps),
            "acceptance": self.acceptance,
            "forced_tokens_per_round": self.forced,
        }


def plan_speculation(
    options: EngineOptions, target: ModelConfig, source: ModelSource, *, weights: bool
) -> Speculation | None:
    """The drafter that `options` ask for, for the model `target` from `source`; None: none drafts.

    weights=False does not download those of a hub draft model.  Raises ConfigError for what
    contradicts itself or the target, ModelError for a draft model that cannot be found or read.
    """
    choice = choose_drafter(options, source, weights=weights)
    if choice is None:
        return None
    algorithm = choice.algorithm
    shape, chosen = choose_shape(options, algorithm)
    refuse_acceptance(options, algorithm, shape)
    refuse_strays(options, algorithm)
    algorithm.refuse(options, shape)
    drafter = algorithm.read(options, shape, choice.source, target=target, of=source)
    refuse_topk(shape, drafter.vocab_size)
    refuse_axes(drafter.model, target)
    return Speculation(
        drafter=drafter,
        acceptance=options.speculative_acceptance,
        forced=options.force_accept_len,
        chosen={**choice.chosen, **chosen, **drafter.chosen},
    )


def shape_of(speculation: Speculation | None) -> DraftShape:
    """Of an engine's rounds."""
    return NO_DRAFTS if speculation is None else speculation.shape


def target_groups(target: ModelConfig, options: EngineOptions) -> tuple[CacheGroupSpec, ...]:
    """The cache groups of a model under resolved options."""
    groups = cache_group_specs(
        target, known(options.page_size), state_every=options.state_checkpoint_every
    )
    return _in_formats(groups, options)


def draft_groups(drafter: Drafter, options: EngineOptions) -> tuple[CacheGroupSpec, ...]:
    """A drafter's cache groups under resolved options."""
    return _in_formats(drafter.groups(known(options.page_size)), options)


def _in_formats(
    groups: Sequence[CacheGroupSpec], options: EngineOptions
) -> tuple[CacheGroupSpec, ...]:
    return tuple(
        in_format(group, known(options.dtype), known(options.kv_cache_dtype)) for group in groups
    )


def all_groups(
    target: ModelConfig, options: EngineOptions, speculation: Speculation | None
) -> tuple[CacheGroupSpec, ...]:
    """The cache groups of an engine under resolved options: the target's, then the drafter's."""
    groups = target_groups(target, options)
    if speculation is None:
        return groups
    return (*groups, *draft_groups(speculation.drafter, options))


def without_speculation(asked: Mapping[str, object]) -> dict[str, object]:
    """What was asked, with nobody drafting: the same engine, for a comparison."""
    rest = {name: value for name, value in asked.items() if not name.startswith(_DRAFTING)}
    return rest | {"speculative_algorithm": OFF}
