"""A small model as decided to draft, and what --speculative-algorithm STANDALONE asks for."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import ConfigError, ModelError
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource
from paceline.models.size import empty_model
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.build import DraftPlacement, draft_cache, draft_passes
from paceline.speculate.drafter import Algorithm, Drafter, Loading
from paceline.speculate.standalone.proposer import StandaloneProposer
from paceline.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneDrafter(Drafter):
    """A language model with the target's tokens."""

    model: ModelConfig

    def load(self, target: CausalLM, limits: RunnerConfig, how: Loading) -> CausalLM:
        assert self.source is not None, self
        config, bound = self._within(limits), limits.kv_len_bound
        return load_model(self.source, config, max_positions=bound, **how)

    def empty(self, target: CausalLM, limits: RunnerConfig, dtype: torch.dtype) -> CausalLM:
        config, bound = self._within(limits), limits.kv_len_bound
        return empty_model(config, dtype=dtype, max_positions=bound)

    def proposer(self, module: CausalLM, place: DraftPlacement) -> StandaloneProposer:
        cache = draft_cache(self.model, self.pass_rows, place, sinks=module.attention_sinks())
        passes = draft_passes(cache, self.shape, self.pass_rows, place)
        return StandaloneProposer(self.shape, module, cache=cache, passes=passes)

    def _within(self, limits: RunnerConfig) -> ModelConfig:
        return replace(self.model, max_position=limits.context_len)


class StandaloneAlgorithm(Algorithm):
    """A model of the target's family."""

    def told_by(self, config: Mapping[str, Any]) -> str | None:
        layers = config.get("num_hidden_layers")
        return "a whole model" if isinstance(layers, int) and layers > 1 else None

    def read(
        self,
        options: EngineOptions,
        shape: DraftShape,
        source: ModelSource | None,
        *,
        target: ModelConfig,
        of: ModelSource,
    ) -> StandaloneDrafter:
        assert source is not None, f"{self.name} has a draft model"
        try:
            model = parse_config(source.config, source.generation_config)
        except ModelError as error:
            raise ModelError(f"draft model '{source.name}': {error}") from error
        _refuse_other_tokens(options, model, source, target=target, of=of)
        if model.vocab_size != target.vocab_size:
            rows = target.vocab_size
            model = replace(model, vocab_size=rows, stored_vocab_size=model.vocab_size)
        return StandaloneDrafter(
            algorithm=self.name,
            shape=shape,
            source=source,
            model=model,
            vocab_size=model.vocab_size,
        )


STANDALONE = StandaloneAlgorithm(name="STANDALONE", usual_steps=3)


def _refuse_other_tokens(
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
