"""Gemma (model_type gemma): a pre-norm decoder whose norms multiply by 1 + weight, with embeddings
times sqrt(hidden_size).  Its "gelu" always meant the approximation by tanh."""

from typing import TYPE_CHECKING, Any

from paceline.core.model.config import ModelConfig, NormKind
from paceline.models.architecture import Architecture, prenorm
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_windows import uniform_windows
from paceline.models.fields import Fields

if TYPE_CHECKING:
    from paceline.models.causal_lm import CausalLM


def _read(fields: Fields) -> dict[str, Any]:
    shared = read_prenorm(fields)
    act = "gelu_pytorch_tanh" if shared["hidden_act"] == "gelu" else shared["hidden_act"]
    if fields.get("hidden_activation") not in (None, act):
        fields.fail("hidden_activation", f"hidden_act, {act}", fields.get("hidden_activation"))
    return shared | {
        "hidden_act": act,
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, None),
        "norm": NormKind.UNIT_OFFSET,
    }


def _build(config: ModelConfig, **where: Any) -> "CausalLM":
    from paceline.layers.embedding import root_scale

    scale = root_scale(config.hidden_size, where["placement"].dtype)
    return prenorm(config, embedding_scale=scale, **where)


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    defaults={
        "max_position_embeddings": 8192,
        "num_key_value_heads": 16,
        "head_dim": 256,
        "hidden_act": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
    },
)
