"""Draft checks: what a drafter and its settings may not be, refused before anything is loaded."""

from pathlib import Path

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import ConfigError
from paceline.core.model_config import ModelConfig
from paceline.core.options import REJECTION, SAMPLE_AND_MATCH, EngineOptions
from paceline.models.locate import ModelSource
from paceline.text.tokenizer import Tokenizer


def refuse_acceptance(options: EngineOptions, algorithm: str, shape: DraftShape) -> None:
    """Raise ConfigError for a rule of acceptance that these drafts cannot have."""
    if options.speculative_acceptance == REJECTION:
        lacks = None
        if algorithm == "NGRAM":
            lacks = "NGRAM, whose drafts have no probabilities"
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


def refuse_ngram(options: EngineOptions, algorithm: str, shape: DraftShape) -> None:
    """Raise ConfigError for lengths that NGRAM cannot look for, or that nobody looks for."""
    low, high = options.speculative_ngram_min, options.speculative_ngram_max
    if algorithm != "NGRAM":
        for name, value in (("speculative_ngram_min", low), ("speculative_ngram_max", high)):
            if value is not None:
                raise ConfigError.about(
                    name,
                    expected=f"left out with {algorithm}, which searches no text",
                    got=value,
                    remedy=f"remove --{name.replace('_', '-')}, or name NGRAM",
                )
        return
    if low is not None and high is not None and low > high:
        raise ConfigError.about(
            "speculative_ngram_min",
            expected=f"at most {high}, the longest",
            got=low,
            remedy="lower --speculative-ngram-min or raise --speculative-ngram-max",
        )
    most = 1 + shape.topk * shape.num_steps
    if shape.num_draft_tokens > most:
        raise ConfigError.about(
            "speculative_num_draft_tokens",
            expected=f"at most {most}: a root, and {shape.topk} chains of {shape.num_steps}, "
            "which do not branch again",
            got=shape.num_draft_tokens,
            remedy="lower --speculative-num-draft-tokens, or raise --speculative-num-steps or "
            "--speculative-eagle-topk",
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


def refuse_standalone(
    options: EngineOptions,
    draft: ModelConfig,
    source: ModelSource,
    *,
    target: ModelConfig,
    of: ModelSource,
) -> None:
    """Raise ConfigError for a draft model whose tokens are not the target's (from `of`).

    Where the two tokenizers are one, the vocabularies may be padded to different sizes.
    """
    is_dummy = options.load_format == "dummy"
    nothing_to_compare = is_dummy or (source.tokenizer is None and of.tokenizer is None)
    if nothing_to_compare and draft.vocab_size != target.vocab_size:
        raise ConfigError.about(
            f"vocab_size of draft model '{source.name}'",
            expected=f"{target.vocab_size}, that of '{of.name}'",
            got=draft.vocab_size,
            remedy="name a smaller model of the same family, or NGRAM",
        )
    if is_dummy:
        return
    found = _tokenizer_difference(source.tokenizer, of.tokenizer)
    if found is not None:
        raise ConfigError.about(
            f"tokenizer of draft model '{source.name}'",
            expected=f"that of '{of.name}'",
            got=found,
            remedy="name a smaller model of the same family, or NGRAM",
        )


def _tokenizer_difference(draft: Path | None, target: Path | None) -> str | None:
    """How two tokenizer.json differ in what their ids mean; None: they do not.

    Two models without one are given token ids, and nothing can be compared.
    """
    if draft is None and target is None:
        return None
    if draft is None or target is None:
        return (
            "no tokenizer.json" if draft is None else "one where the target has no tokenizer.json"
        )
    if draft.read_bytes() == target.read_bytes():
        return None
    ours, theirs = (Tokenizer.from_folder(path.parent).tokens for path in (draft, target))
    different = sorted(id for id in {*ours, *theirs} if ours.get(id) != theirs.get(id))
    if not different:
        return None
    first = different[0]
    return (
        f"one that differs in {len(different)} ids: {first} is {ours.get(first)!r}, there "
        f"{theirs.get(first)!r}"
    )
