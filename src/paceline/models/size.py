"""How many parameters a model has, from its configuration alone.  Imports no torch."""

from paceline.core.errors import ModelError, message
from paceline.core.model_config import ModelConfig, MoEConfig
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
    moe = config.moe
    sparse = sum(moe.layers) if moe is not None else 0
    blocks = (config.num_layers - sparse) * _dense_parameters(config)
    if moe is not None:
        blocks += sparse * _sparse_parameters(config.hidden_size, moe)
    return tables + blocks + config.num_layers * _attention_parameters(config) + config.hidden_size


def _attention_parameters(config: ModelConfig) -> int:
    """A layer but its feed-forward block."""
    facts = architecture(config.model_type)
    hidden = config.hidden_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out_columns = config.num_heads * config.v_head_dim
    weights = (q_rows + kv_rows + out_columns) * hidden
    biases = config.attention_bias * (q_rows + kv_rows) + config.attention_out_bias * hidden
    norms = facts.layer_norms * hidden + facts.qk_norm * 2 * config.head_dim
    return weights + biases + norms + config.attention_sinks * config.num_heads


def _dense_parameters(config: ModelConfig) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    return 3 * inner * hidden + config.mlp_bias * (2 * inner + hidden)


def _sparse_parameters(hidden: int, moe: MoEConfig) -> int:
    """Router and experts of a layer."""
    inner = moe.intermediate_size
    router = hidden + moe.bias
    expert = 3 * inner * hidden + moe.bias * (2 * inner + hidden)
    return moe.num_experts * (router + expert)
