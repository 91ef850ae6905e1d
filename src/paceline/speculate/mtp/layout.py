"""Where checkpoints keep the layer that predicts a token further, and its config.  No torch.

DeepSeek-V3, section 2.2 (arXiv:2412.19437), and its released weights: the layer is stored as one
more of the model, `model.layers.N`, with two norms and a projection in front and a norm behind.
Qwen3-Next's, which attends, is stored apart, below `mtp`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from paceline.core.errors import ConfigError
from paceline.core.model.config import ModelConfig
from paceline.models.config import parse_config
from paceline.models.fields import Fields

LAYER = "layer"  # begins our names of the decoder layer's tensors
OTHER_DRAFTERS = "name NGRAM, or a draft model with --speculative-draft-model-path"  # a remedy
_COUNT = "num_nextn_predict_layers"


@dataclass(frozen=True, slots=True)
class Layout:
    """Of one family."""

    alone: Mapping[str, Any]  # fields that make its config.json one of this layer alone
    names: Mapping[str, str]  # modules beside the decoder layer, as stored -> as we name them
    shared: tuple[str, ...] = ()  # how names of copies of the target's tensors begin
    layer: str = ""  # how names of the decoder layer's tensors begin

    def names_of(self, names: Mapping[str, str], place: str) -> dict[str, str]:
        """Our name -> stored name, of the tensors of the layer that the target has not.

        names: as of `canonical_names`; place: how those of this layer begin."""
        own = {self._canonical(name, place): stored for name, stored in names.items()}
        return {name: stored for name, stored in own.items() if name is not None}

    def _canonical(self, name: str, place: str) -> str | None:
        own = name.removeprefix(place)
        if own == name or own.startswith(self.shared):
            return None
        module, _, last = own.rpartition(".")
        if module in self.names:
            return f"{self.names[module]}.{last}"
        return f"{LAYER}.{own.removeprefix(self.layer)}"


_DEEPSEEK = Layout(
    alone=MappingProxyType({"num_hidden_layers": 1, "first_k_dense_replace": 0}),
    names=MappingProxyType(
        {
            "enorm": "embedding_norm",
            "hnorm": "feature_norm",
            "eh_proj": "fc",
            "shared_head.norm": "norm",
        }
    ),
    shared=("embed_tokens.", "shared_head.head."),
)
_GLM = replace(_DEEPSEEK, alone={**_DEEPSEEK.alone, "mlp_layer_types": ["sparse"]})
_QWEN_NEXT = Layout(
    alone=MappingProxyType(
        {"num_hidden_layers": 1, "layer_types": ["full_attention"], "mlp_only_layers": []}
    ),
    names=MappingProxyType(
        {
            "pre_fc_norm_embedding": "embedding_norm",
            "pre_fc_norm_hidden": "feature_norm",
            "fc": "fc",
            "norm": "norm",
        }
    ),
    layer="layers.0.",
)
LAYOUTS: Mapping[str, Layout] = MappingProxyType(
    {"deepseek_v3": _DEEPSEEK, "glm4_moe_lite": _GLM, "qwen3_next": _QWEN_NEXT}  # by model_type
)


def layout_of(target: ModelConfig) -> Layout:
    """Raises ConfigError for a family whose models have no such layer."""
    if target.model_type not in LAYOUTS:
        raise ConfigError.about(
            "speculative_algorithm",
            expected=f"MTP of a model of type {' or '.join(LAYOUTS)}",
            got=f"MTP, of {target.model_type}",
            remedy=OTHER_DRAFTERS,
        )
    return LAYOUTS[target.model_type]


def read_next_token(config: Mapping[str, Any], layout: Layout) -> ModelConfig:
    """The layer as a model of its own.  config: the target's config.json.

    Raises ConfigError where there is no layer, or are several, each for a draft of its own.
    """
    count = Fields(config).integer(_COUNT, 1, minimum=0)
    if count != 1:
        raise ConfigError.about(
            f"config.json: {_COUNT}",
            expected="1, for MTP: one layer, which reads its own output for later drafts",
            got=count,
            remedy=OTHER_DRAFTERS,
        )
    # The head is the target's, so that of this model is none.
    return replace(parse_config({**config, **layout.alone}), ends=frozenset())
