"""Prompt lookup as it was decided, and what --speculative-algorithm NGRAM asks for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.core.draft_shape import MOST_DRAFT_TOKENS, DraftShape
from paceline.core.errors import ConfigError
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.models.locate import ModelSource
from paceline.speculate.build import DraftPlacement
from paceline.speculate.drafter import Algorithm, Chosen, Drafter
from paceline.speculate.ngram.proposer import NgramProposer

USUAL_LENGTHS = (2, 4)  # one equal token is chance; behind four, most texts go on alike


@dataclass(frozen=True, slots=True, kw_only=True)
class NgramDrafter(Drafter):
    """A search in the request's own text."""

    lengths: tuple[int, int]  # (shortest, longest) end of the text that is looked for

    @property
    def chosen(self) -> Mapping[str, Chosen]:
        why = "shorter ones match by chance, longer ones seldom"
        names = ("speculative_ngram_min", "speculative_ngram_max")
        return {name: (tokens, why) for name, tokens in zip(names, self.lengths, strict=True)}

    def proposer(self, module: Any, place: DraftPlacement) -> NgramProposer:
        low, high = self.lengths
        return NgramProposer(self.shape, min_n=low, max_n=high)


class NgramAlgorithm(Algorithm):
    """No draft model: what is found costs nothing but its verification."""

    def usual_tokens(self, steps: int, topk: int) -> tuple[int, str]:
        tokens = min(1 + topk * steps, MOST_DRAFT_TOKENS)
        return tokens, "a root, and a chain for each of topk"

    def refuse(self, options: EngineOptions, shape: DraftShape) -> None:
        low, high = options.speculative_ngram_min, options.speculative_ngram_max
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

    def read(
        self,
        options: EngineOptions,
        shape: DraftShape,
        source: ModelSource | None,
        *,
        target: ModelConfig,
        of: ModelSource,
    ) -> NgramDrafter:
        low, high = options.speculative_ngram_min, options.speculative_ngram_max
        usual_low, usual_high = USUAL_LENGTHS
        low = min(usual_low, high or usual_low) if low is None else low
        high = max(usual_high, low) if high is None else high
        return NgramDrafter(algorithm=self.name, shape=shape, lengths=(low, high))


NGRAM = NgramAlgorithm(
    name="NGRAM",
    usual_steps=5,  # a search costs no pass
    has_model=False,
    own_options=("speculative_ngram_min", "speculative_ngram_max"),
    others="searches no text",
)
