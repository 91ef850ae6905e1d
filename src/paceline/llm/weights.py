"""The weights of an engine, as they are read from where its model and its drafter were found."""

from dataclasses import dataclass

from torch import nn

from paceline.core.model_config import ModelConfig
from paceline.core.parallel import Parallel
from paceline.llm.prepare import Prepared
from paceline.models.causal_lm import CausalLM
from paceline.models.loader import load_model
from paceline.runner.build import RunnerConfig
from paceline.speculate.drafter import Drafter, Loading


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Modules with weights in them, on the engine's device; see `plan.assemble.Weights`.

    Every method raises WeightsError, naming the tensors or the file at fault.
    """

    prepared: Prepared

    def target(self, config: ModelConfig, *, max_positions: int) -> CausalLM:
        return load_model(
            self.prepared.source, config, max_positions=max_positions, **self._loading
        )

    def draft(self, drafter: Drafter, target: CausalLM, limits: RunnerConfig) -> nn.Module | None:
        return drafter.load(target, limits, self._loading)

    @property
    def _loading(self) -> Loading:
        prepared = self.prepared
        return Loading(
            parallel=Parallel(),
            device=prepared.torch_device,
            dtype=prepared.dtype,
            load_format=prepared.options.load_format,
            seed=prepared.options.seed,
        )
