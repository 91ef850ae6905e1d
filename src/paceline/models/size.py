"""How many parameters a model has, from its configuration alone.  Imports no torch."""

from paceline.core.errors import ModelError, message
from paceline.core.model_config import ModelConfig
from paceline.core.options import ELEMENT_BYTES
from paceline.models.registry import architecture


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights in `dtype` ("bfloat16", "float16" or "float32")."""
    if dtype not in ELEMENT_BYTES:
        raise ModelError(
            message(
                "dtype",
                expected=f"one of {', '.join(ELEMENT_BYTES)}",
                got=repr(dtype),
                remedy="choose with --dtype",
            )
        )
    return parameter_count(config) * ELEMENT_BYTES[dtype]


def parameter_count(config: ModelConfig) -> int:
    """All parameters; a tied head counts once."""
    table = config.vocab_size * config.hidden_size
    tables = table if config.tie_word_embeddings else 2 * table
    return tables + config.num_layers * _layer_parameters(config) + config.hidden_size


def _layer_parameters(config: ModelConfig) -> int:
    facts = architecture(config.model_type)
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out_columns = config.num_heads * config.v_head_dim
    weights = (q_rows + kv_rows + out_columns + 3 * inner) * hidden
    biases = (
        config.attention_bias * (q_rows + kv_rows)
        + config.attention_out_bias * hidden
        + config.mlp_bias * (2 * inner + hidden)
    )
    norms = facts.layer_norms * hidden + facts.qk_norm * 2 * config.head_dim
    return weights + biases + norms
