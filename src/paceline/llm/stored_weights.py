"""StoredWeights: modules filled from where a model and its drafter were found."""

from dataclasses import dataclass

from torch import nn

from paceline.core.model.config import ModelConfig
from paceline.core.parallel import ALONE, Parallel
from paceline.kernels.all_reduce import Exchange
from paceline.llm.prepare import Prepared
from paceline.models.causal_lm import CausalLM
from paceline.models.loader import load_model
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.drafter import Drafter, Loading


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Modules whose weights are read from where the model and its drafter were found; see
    `plan.assemble.Weights`.  Every method raises WeightsError, naming the tensors or the file
    at fault.
    """

    prepared: Prepared
    exchange: Exchange | None

    def target(self, config: ModelConfig, *, max_positions: int) -> CausalLM:
        """The rank's part."""
        parallel = self.prepared.parallel
        return load_model(
            self.prepared.source,
            config,
            max_positions=max_positions,
            exchange=self.exchange,
            packings=self.prepared.packings,
            progress=None if parallel.rank == 0 else False,
            **self._loading(parallel),
        )

    def draft(self, drafter: Drafter, target: CausalLM, limits: RunnerConfig) -> nn.Module | None:
        """All of it on every rank: its steps are small, and wait for nobody."""
        return drafter.load(target, limits, self._loading(ALONE))

    def _loading(self, parallel: Parallel) -> Loading:
        prepared = self.prepared
        return Loading(
            parallel=parallel,
            device=prepared.torch_device,
            dtype=prepared.dtype,
            load_format=prepared.options.load_format,
            seed=prepared.options.seed,
        )
