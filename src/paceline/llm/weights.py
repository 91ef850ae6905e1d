"""The weights of an engine, as they are read from where its model and its drafter were found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.llm.prepare import Prepared
from paceline.models.causal_lm import CausalLM
from paceline.models.loader import load_model
from paceline.models.locate import ModelSource
from paceline.speculate.eagle.config import EagleConfig
from paceline.speculate.eagle.head import EagleHead
from paceline.speculate.eagle.loader import load_eagle_head

M = TypeVar("M", CausalLM, EagleHead)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Modules with weights in them, on the engine's device; see `plan.assemble.Weights`.

    Every method raises WeightsError, naming the tensors or the file at fault.
    """

    prepared: Prepared

    def target(self, config: ModelConfig, *, max_positions: int) -> CausalLM:
        source = self.prepared.source
        return self._load(load_model, source, config, max_positions=max_positions)

    def draft(self, config: ModelConfig, *, max_positions: int) -> CausalLM:
        return self._load(load_model, self._draft_source, config, max_positions=max_positions)

    def head(self, config: EagleConfig, target: CausalLM, *, max_positions: int) -> EagleHead:
        source = self._draft_source
        return self._load(load_eagle_head, source, config, target, max_positions=max_positions)

    def _load(self, load: Callable[..., M], *what: object, max_positions: int) -> M:
        prepared = self.prepared
        return load(
            *what,
            parallel=Parallel(),
            device=prepared.torch_device,
            dtype=prepared.dtype,
            load_format=prepared.options.load_format,
            max_positions=max_positions,
            seed=prepared.options.seed,
        )

    @property
    def _draft_source(self) -> ModelSource:
        speculation = self.prepared.speculation
        assert speculation is not None, "somebody drafts"
        assert speculation.source is not None, speculation
        return speculation.source
