"""Draft checks: what a drafter and its settings may not be, refused before anything is loaded."""

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import ConfigError
from paceline.core.model_config import ModelConfig
from paceline.core.options import REJECTION, SAMPLE_AND_MATCH, EngineOptions
from paceline.speculate.drafter import Algorithm
from paceline.speculate.registry import ALGORITHMS


def refuse_acceptance(options: EngineOptions, algorithm: Algorithm, shape: DraftShape) -> None:
    """Raise ConfigError for a rule of acceptance that these drafts cannot have."""
    if options.speculative_acceptance == REJECTION:
        lacks = None
        if not algorithm.has_model:
            lacks = f"{algorithm.name}, whose drafts have no probabilities"
        elif not shape.is_chain:
            lacks = f"a tree of topk {shape.topk}: it is defined for chains"
        elif options.force_accept_len is not None:
            lacks = "--force-accept-len, which forces what is accepted"
        if lacks is not None:
            raise ConfigError.about(
                "speculative_acceptance",
                expected=f"{SAMPLE_AND_MATCH} with {lacks}",
                got=REJECTION,
                remedy=f"leave --speculative-acceptance out, which is {SAMPLE_AND_MATCH}",
            )
    most = 1 + min(shape.num_steps, shape.num_draft_tokens - 1)
    forced = options.force_accept_len
    if forced is not None and forced > most:
        raise ConfigError.about(
            "force_accept_len",
            expected=f"from 1 to {most}: a path of {most - 1} drafts and the token behind it",
            got=f"{forced:g}",
            remedy="lower --force-accept-len or raise --speculative-num-steps",
        )


def refuse_strays(options: EngineOptions, algorithm: Algorithm) -> None:
    """Raise ConfigError for a setting that another algorithm alone has."""
    for other in ALGORITHMS.values():
        if other.name == algorithm.name:
            continue
        for name in other.own_options:
            value = getattr(options, name)
            if value is not None:
                raise ConfigError.about(
                    name,
                    expected=f"left out with {algorithm.name}, which {other.others}",
                    got=value,
                    remedy=f"remove --{name.replace('_', '-')}, or name {other.name}",
                )


def refuse_axes(drafter: ModelConfig | None, target: ModelConfig) -> None:
    """Raise ConfigError for a drafter that cannot turn by the target's positions."""
    if drafter is not None and drafter.rope.axes != target.rope.axes:
        raise ConfigError.about(
            "speculative_draft_model_path",
            expected=f"a draft model whose rope has as many axes as the target's, "
            f"{target.rope.axes}",
            got=drafter.rope.axes,
            remedy="take one that was trained for this model, or --speculative-algorithm NGRAM",
        )


def refuse_topk(shape: DraftShape, vocab_size: int) -> None:
    """Raise ConfigError for more branches than the drafter has tokens; vocab_size 0: no model."""
    if vocab_size and shape.topk > vocab_size:
        raise ConfigError.about(
            "speculative_eagle_topk",
            expected=f"at most {vocab_size}, the draft model's vocabulary",
            got=shape.topk,
            remedy="lower --speculative-eagle-topk",
        )
