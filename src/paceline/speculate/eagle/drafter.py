"""An EAGLE head as it was decided, and what --speculative-algorithm EAGLE and EAGLE3 ask for."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import ModelError
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.locate import BUNDLED_FOLDER, ModelSource
from paceline.models.size import META
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.drafter import Algorithm, Loading
from paceline.speculate.eagle.config import (
    AlgorithmName,
    EagleConfig,
    parse_eagle_config,
    require_match,
    tap_names,
)
from paceline.speculate.eagle.head import EagleHead, build_eagle_head
from paceline.speculate.eagle.loader import load_eagle_head
from paceline.speculate.feature_proposer import FeatureDrafter

BUNDLED_HEAD = BUNDLED_FOLDER / "eagle3"


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleDrafter(FeatureDrafter):
    """A head that continues the target's hidden states."""

    head: EagleConfig

    def load(self, target: CausalLM, limits: RunnerConfig, how: Loading) -> EagleHead:
        assert self.source is not None, self
        bound = limits.kv_len_bound
        return load_eagle_head(self.source, self.head, target, max_positions=bound, **how)

    def empty(self, target: CausalLM, limits: RunnerConfig, dtype: torch.dtype) -> EagleHead:
        bound = limits.kv_len_bound
        return build_eagle_head(
            self.head,
            target,
            parallel=Parallel(),
            placement=Placement(META, dtype, DENSE),
            max_positions=bound,
        )


def eagle_drafter(
    algorithm: str,
    shape: DraftShape,
    head: EagleConfig,
    *,
    target: ModelConfig,
    source: ModelSource | None = None,
) -> EagleDrafter:
    """The drafter that is `head`.  Raises ConfigError for taps that the target does not have."""
    own = head.draft_vocab_size
    return EagleDrafter(
        algorithm=algorithm,
        shape=shape,
        source=source,
        model=head.layer,
        vocab_size=head.layer.vocab_size if own is None else own,
        taps=tap_names(head, target),
        tap_width=head.tap_width,
        from_root=False,
        head=head,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleAlgorithm(Algorithm):
    """EAGLE (and EAGLE-2, whose weights are the same) or EAGLE-3."""

    name: AlgorithmName

    @property
    def bundled(self) -> Path:
        return BUNDLED_HEAD

    def told_by(self, config: Mapping[str, Any]) -> str | None:
        names = [str(name) for name in config.get("architectures") or []]
        is_third = config.get("draft_vocab_size") is not None or any("Eagle3" in n for n in names)
        if is_third or any("Eagle" in name for name in names):
            told = "EAGLE3" if is_third else "EAGLE"
            return f"an {'EAGLE-3' if is_third else told} head" if told == self.name else None
        return None

    def read(
        self,
        options: EngineOptions,
        shape: DraftShape,
        source: ModelSource | None,
        *,
        target: ModelConfig,
        of: ModelSource,
    ) -> EagleDrafter:
        assert source is not None, f"{self.name} has a draft model"
        try:
            head = parse_eagle_config(source.config, self.name)
        except ModelError as error:
            raise ModelError(f"draft model '{source.name}': {error}") from error
        require_match(head, target)
        return eagle_drafter(self.name, shape, head, target=target, source=source)


EAGLE = EagleAlgorithm(name="EAGLE", usual_steps=3)
EAGLE3 = EagleAlgorithm(name="EAGLE3", usual_steps=3, tells_itself=True, is_own=True)
