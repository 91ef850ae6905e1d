"""Speculation: which drafter an engine runs, and that it fits its model, before a weight is read.

options -> who drafts (named, or told from the draft model, or the bundled head)
        -> how deep and how wide (DraftShape)
        -> the drafter's own configuration, checked against the target's
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import ModelError
from paceline.core.events import Event
from paceline.core.model_config import (
    CacheGroupSpec,
    ModelConfig,
    cache_group_specs,
    draft_group_specs,
)
from paceline.core.options import OFF, SAMPLE_AND_MATCH, EngineOptions
from paceline.models.config import parse_config
from paceline.models.locate import ModelSource
from paceline.models.size import weights_bytes
from paceline.plan.draft_checks import (
    refuse_acceptance,
    refuse_ngram,
    refuse_standalone,
    refuse_topk,
)
from paceline.plan.draft_choice import (
    Chosen,
    Drafter,
    choose_drafter,
    choose_ngram,
    choose_shape,
)
from paceline.speculate.eagle.config import (
    Algorithm,
    EagleConfig,
    parse_eagle_config,
    require_match,
    tap_names,
)
from paceline.speculate.eagle.size import eagle_weights_bytes

_HEADS: dict[str, Algorithm] = {"EAGLE": "EAGLE", "EAGLE3": "EAGLE3"}
_DRAFTING = ("speculative_", "force_accept_len")  # how the names of its options begin
FORCED = "forced_acceptance"  # reason code


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """A drafter, decided and checked."""

    algorithm: str  # one of DRAFT_ALGORITHMS
    shape: DraftShape
    source: ModelSource | None  # of the draft head or model; None: NGRAM has none
    head: EagleConfig | None  # EAGLE and EAGLE3
    draft: ModelConfig | None  # STANDALONE
    taps: tuple[str, ...]  # hidden states of the target that the head reads
    acceptance: str  # SAMPLE_AND_MATCH or REJECTION
    forced: float | None  # tokens per round, whatever was sampled
    ngram: tuple[int, int] | None  # (shortest, longest) end of the text that NGRAM looks for
    chosen: Mapping[str, Chosen]  # option -> what it became, where it was left open

    @property
    def model(self) -> ModelConfig | None:
        """The layers that draft; None: nothing is computed."""
        return self.draft if self.head is None else self.head.layer

    @property
    def tap_width(self) -> int:
        """Elements of the target's hidden states that are kept per token."""
        return 0 if self.head is None else self.head.tap_width

    @property
    def vocab_size(self) -> int:
        """Tokens that the drafter chooses among; 0 without a model."""
        if self.model is None:
            return 0
        own = None if self.head is None else self.head.draft_vocab_size
        return self.model.vocab_size if own is None else own

    @property
    def passes(self) -> int:
        """Calls of the drafter's layers in a round, the one that observes included."""
        if self.model is None:
            return 0
        return 1 + len(self.shape.pass_rows(from_root=self.head is None))

    @property
    def caution(self) -> Event | None:
        """What a reader of its texts must know."""
        if self.forced is None:
            return None
        detail = f"FORCED to {self.forced:g} tokens per round: every text that is drafted is WRONG"
        return Event(FORCED, detail)

    def groups(self, page_size: int) -> tuple[CacheGroupSpec, ...]:
        """The drafter's cache groups, which stand behind the target's."""
        if self.model is None:
            return ()
        return draft_group_specs(self.model, page_size, next_token=self.head is not None)

    def weights_bytes(self, target: ModelConfig, dtype: str) -> int:
        """Bytes of the drafter's own weights in `dtype`."""
        if self.head is not None:
            return eagle_weights_bytes(self.head, target, dtype)
        return 0 if self.draft is None else weights_bytes(self.draft, dtype)

    def __str__(self) -> str:
        shape = self.shape
        form = f"chain of {shape.num_steps} drafts"
        if not shape.is_chain:
            form = f"tree of topk {shape.topk} and depth {shape.num_steps}"
        who = "" if self.source is None else f" by {self.source.name}"
        words = [
            f"{self.algorithm}{who}: a {form}, {shape.num_draft_tokens} tokens verified per "
            "request and round"
        ]
        words += [f"reads {', '.join(self.taps)}"] if self.taps else []
        words += [f"accepts by {self.acceptance}"] if self.acceptance != SAMPLE_AND_MATCH else []
        words += [f"FORCED to {self.forced:g} tokens per round"] if self.forced else []
        return "; ".join(words)

    def to_json(self) -> dict[str, object]:
        """What `paceline explain --json` carries under "speculation"."""
        return {
            "algorithm": self.algorithm,
            "draft_model": None if self.source is None else self.source.name,
            "num_steps": self.shape.num_steps,
            "topk": self.shape.topk,
            "num_draft_tokens": self.shape.num_draft_tokens,
            "taps": list(self.taps),
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
    drafter = choose_drafter(options, source, weights=weights)
    if drafter is None:
        return None
    shape, chosen = choose_shape(options, drafter.algorithm)
    refuse_acceptance(options, drafter.algorithm, shape)
    refuse_ngram(options, drafter.algorithm, shape)
    ngram, ngram_chosen = choose_ngram(options, drafter.algorithm)
    head, draft = _read(drafter, options, target, source)
    plan = Speculation(
        algorithm=drafter.algorithm,
        shape=shape,
        source=drafter.source,
        head=head,
        draft=draft,
        taps=() if head is None else tap_names(head, target),
        acceptance=options.speculative_acceptance,
        forced=options.force_accept_len,
        ngram=ngram,
        chosen={**drafter.chosen, **chosen, **ngram_chosen},
    )
    refuse_topk(shape, plan.vocab_size)
    return plan


def all_groups(
    target: ModelConfig, page_size: int, speculation: Speculation | None
) -> tuple[CacheGroupSpec, ...]:
    """The cache groups of an engine: the target's, then the drafter's."""
    drafts = () if speculation is None else speculation.groups(page_size)
    return (*cache_group_specs(target, page_size), *drafts)


def without_speculation(asked: Mapping[str, object]) -> dict[str, object]:
    """What was asked, with nobody drafting: the same engine, for a comparison."""
    rest = {name: value for name, value in asked.items() if not name.startswith(_DRAFTING)}
    return rest | {"speculative_algorithm": OFF}


def _read(
    drafter: Drafter, options: EngineOptions, target: ModelConfig, source: ModelSource
) -> tuple[EagleConfig | None, ModelConfig | None]:
    """(the head's configuration, a draft model's), checked against the target's."""
    if drafter.source is None:
        return None, None
    try:
        algorithm = _HEADS.get(drafter.algorithm)
        if algorithm is not None:
            head = parse_eagle_config(drafter.source.config, algorithm)
            require_match(head, target)
            return head, None
        draft = parse_config(drafter.source.config, drafter.source.generation_config)
    except ModelError as error:
        raise ModelError(f"draft model '{drafter.source.name}': {error}") from error
    refuse_standalone(options, draft, drafter.source, target=target, of=source)
    if draft.vocab_size != target.vocab_size:
        rows = target.vocab_size
        draft = replace(draft, vocab_size=rows, stored_vocab_size=draft.vocab_size)
    return None, draft
