"""How many parameters a model has, from its configuration alone.  Imports no torch."""

from paceline.core.errors import ModelError
from paceline.core.model_config import ModelConfig, MoEConfig
from paceline.core.options import ELEMENT_BYTES
from paceline.models.eagle_config import EagleConfig
from paceline.models.registry import QKNorm, architecture


def weights_bytes(config: ModelConfig, dtype: str) -> int:
    """Bytes of all weights in `dtype` ("bfloat16", "float16" or "float32")."""
    return parameter_count(config) * _element_bytes(dtype)


def eagle_weights_bytes(config: EagleConfig, target: ModelConfig, dtype: str) -> int:
    """Bytes of all weights of a draft head in `dtype`, and of its map to the target's tokens."""
    offsets = 8 * (config.draft_vocab_size or 0)
    return eagle_parameter_count(config, target) * _element_bytes(dtype) + offsets


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


def eagle_parameter_count(config: EagleConfig, target: ModelConfig) -> int:
    """All parameters of a draft head; what it shares with the target counts as the target's."""
    layer, hidden = config.layer, config.hidden_size
    blocks = layer.num_layers * (_attention_parameters(layer) + _dense_parameters(layer))
    bias = config.fc_bias * hidden
    if config.version == 1:  # fc takes embedding and feature; its layer has no input norm
        return blocks + 2 * hidden * hidden + bias - hidden
    rows = layer.num_heads * layer.head_dim
    rows += layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
    first = (rows + 1) * hidden  # twice as wide an input, a norm more
    tables = (config.draft_vocab_size or 0) + target.vocab_size * config.has_own_embedding
    fusion = config.fuses_taps * (config.tap_width * hidden + bias)
    fusion += config.fc_norm * config.tap_width
    return blocks + first + tables * hidden + fusion + hidden


def _element_bytes(dtype: str) -> int:
    if dtype not in ELEMENT_BYTES:
        raise ModelError.about(
            "dtype",
            expected=f"one of {', '.join(ELEMENT_BYTES)}",
            got=repr(dtype),
            remedy="choose with --dtype",
        )
    return ELEMENT_BYTES[dtype]


def _attention_parameters(config: ModelConfig) -> int:
    """A layer but its feed-forward block."""
    facts = architecture(config.model_type)
    hidden = config.hidden_size
    q_rows = config.num_heads * config.head_dim
    kv_rows = config.num_kv_heads * (config.head_dim + config.v_head_dim)
    out_columns = config.num_heads * config.v_head_dim
    weights = (q_rows + kv_rows + out_columns) * hidden
    biases = config.attention_bias * (q_rows + kv_rows) + config.attention_out_bias * hidden
    norms = facts.layer_norms * hidden
    if facts.qk_norm is not QKNorm.NONE:
        heads = config.num_heads + config.num_kv_heads if facts.qk_norm is QKNorm.ROW else 2
        norms += heads * config.head_dim
    return weights + biases + norms + config.attention_sinks * config.num_heads


def _dense_parameters(config: ModelConfig) -> int:
    hidden, inner = config.hidden_size, config.intermediate_size
    return 3 * inner * hidden + config.mlp_bias * (2 * inner + hidden)


def _sparse_parameters(hidden: int, moe: MoEConfig) -> int:
    """Router and experts of a layer, the shared one and its gate included."""
    inner = moe.intermediate_size
    router = hidden + moe.bias
    expert = 3 * inner * hidden + moe.bias * (2 * inner + hidden)
    shared = 0 if moe.shared_size is None else 3 * moe.shared_size * hidden + hidden
    return moe.num_experts * (router + expert) + shared
