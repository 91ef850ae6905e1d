"""ModernBERT (model_type modernbert): gated feed-forward, norms before each block, rope, and two
of three layers see their neighbours alone; of heads a classifier's is read."""

from typing import Any

from paceline.core.model.config import HIDDEN_ACTS, Heads, LayerSpec, ModelConfig
from paceline.core.model.encoder import HEAD_ACTS, EncoderConfig, HeadStage
from paceline.core.modes import POOLS, Pooling
from paceline.models.architecture import Architecture, Classifier
from paceline.models.config_bert import UNUSED
from paceline.models.config_rope import LAYER_TYPES, read_dual_rope
from paceline.models.fields import Fields

_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50368,
    "hidden_size": 768,
    "intermediate_size": 1152,
    "num_hidden_layers": 22,
    "num_attention_heads": 12,
    "hidden_activation": "gelu",
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "norm_bias": False,
    "attention_bias": False,
    "mlp_bias": False,
    "local_attention": 128,
    "classifier_pooling": "cls",
    "classifier_activation": "gelu",
}


def _read(fields: Fields) -> dict[str, Any]:
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
    dim, num = hidden // heads, fields.integer("num_hidden_layers")
    full, local = read_dual_rope(
        fields.without("rope_theta").without("rope_local_base_freq"),  # Gemma's, which it ignores
        full_theta=fields.number("global_rope_theta", 160_000.0),
        sliding_theta=fields.number("local_rope_theta", 10_000.0),
    )
    # The width of a window, of which half lies on each side, its ends included; or that half.
    window = fields.integer("sliding_window", fields.integer("local_attention") // 2) + 1

    def spec(kind: str) -> LayerSpec:
        is_full = kind == LAYER_TYPES[0]
        return LayerSpec(
            heads=Heads(heads, heads, dim, dim),
            scale=dim**-0.5,
            window=None if is_full else window,
            rope=full if is_full else local,
            rotary_dim=dim,
            causal=False,
        )

    bias = fields.flag("attention_bias", False)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "layers": tuple(map(spec, _layer_types(fields, num))),
        "max_position": fields.integer("max_position_embeddings"),
        "rms_norm_eps": fields.number("norm_eps"),
        "hidden_act": HIDDEN_ACTS[fields.choice("hidden_activation", tuple(HIDDEN_ACTS))],
        "attention_bias": bias,
        "attention_out_bias": bias,
        "mlp_bias": fields.flag("mlp_bias", False),
        "encoder": EncoderConfig(norm_bias=fields.flag("norm_bias", False)),
        "tie_word_embeddings": False,
        "ends": POOLS,
        "pooling": Pooling.MEAN,  # as sentence-transformers, where no file says another
    }


def _layer_types(fields: Fields, num: int) -> list[str]:
    """[num]"""
    every, given = fields.integer("global_attn_every_n_layers", 3), fields.get("layer_types")
    if given is None:
        return [LAYER_TYPES[bool(layer % every)] for layer in range(num)]
    if not isinstance(given, list) or len(given) != num or set(given) - set(LAYER_TYPES):
        fields.fail("layer_types", f"{num} of {' and '.join(LAYER_TYPES)}", given)
    return given


def _classify(fields: Fields, num_labels: int) -> Classifier:
    dense = HeadStage(
        name="head.dense",
        width=fields.integer("hidden_size"),
        bias=fields.flag("classifier_bias", False),
        act=fields.choice("classifier_activation", HEAD_ACTS),
        norm="head.norm",
        norm_bias=fields.flag("norm_bias", False),
    )
    pooling = Pooling(fields.choice("classifier_pooling", (Pooling.CLS, Pooling.MEAN)))
    return Classifier(pooling, (dense, HeadStage(name="classifier", width=num_labels)))


def _build(config: ModelConfig, **where: Any) -> Any:
    from paceline.models.modernbert_stack import build_modernbert

    return build_modernbert(config, **where)


ARCHITECTURE = Architecture(
    read=_read,
    build=_build,
    classify=_classify,
    defaults=_DEFAULTS,
    renamed=(("model.", ""),),
    ignored=(*UNUSED, r"^(head|decoder)\."),
)
