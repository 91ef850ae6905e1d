"""The layer behind a model's last as it was decided: what --speculative-algorithm MTP asks for."""

from dataclasses import dataclass

import torch

from paceline.core.draft_shape import DraftShape
from paceline.core.model.config import ModelConfig
from paceline.core.options.engine_options import EngineOptions
from paceline.core.parallel import Parallel
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.causal_lm import CausalLM
from paceline.models.locate import ModelSource
from paceline.models.registry import architecture
from paceline.models.size import META
from paceline.models.weight_files import are_all_here
from paceline.runner.runner_config import RunnerConfig
from paceline.speculate.drafter import Algorithm, Loading
from paceline.speculate.feature_proposer import FeatureDrafter
from paceline.speculate.mtp.head import MtpHead, build_mtp_head
from paceline.speculate.mtp.layout import Layout, layout_of, read_next_token
from paceline.speculate.mtp.loader import load_mtp_head, require_layer


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpDrafter(FeatureDrafter):
    """The layer behind the target's last."""

    source: ModelSource  # the target's
    model: ModelConfig
    layout: Layout
    place: str  # how the names of its tensors begin

    def load(self, target: CausalLM, limits: RunnerConfig, how: Loading) -> MtpHead:
        return load_mtp_head(
            self.source,
            self.model,
            self.layout,
            target,
            place=self.place,
            max_positions=limits.kv_len_bound,
            how=how,
        )

    def empty(self, target: CausalLM, limits: RunnerConfig, dtype: torch.dtype) -> MtpHead:
        return build_mtp_head(
            self.model,
            target,
            parallel=Parallel(),
            placement=Placement(META, dtype, DENSE),
            max_positions=limits.kv_len_bound,
        )


class MtpAlgorithm(Algorithm):
    """Layers that the target's own checkpoint has."""

    def read(
        self,
        options: EngineOptions,
        shape: DraftShape,
        source: ModelSource | None,
        *,
        target: ModelConfig,
        of: ModelSource,
    ) -> MtpDrafter:
        assert source is None, f"{self.name} has no draft model of its own"
        layout = layout_of(target)
        model = read_next_token(of.config, layout)
        place = str(architecture(target.model_type).predicts).format(target.num_layers)
        if options.load_format != "dummy" and of.folder is not None and are_all_here(of.folder):
            require_layer(of, target.model_type, layout, place)
        return MtpDrafter(
            algorithm=self.name,
            shape=shape,
            source=of,
            model=model,
            vocab_size=target.vocab_size,
            taps=("final",),
            tap_width=target.hidden_size,
            from_root=False,
            layout=layout,
            place=place,
        )


MTP = MtpAlgorithm(name="MTP", usual_steps=3, is_within=True)
