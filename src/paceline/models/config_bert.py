"""What config.json files of BERT and its kin say: learned positions, norms behind each block."""

from typing import Any

from paceline.core.model.config import HIDDEN_ACTS, Heads, LayerSpec, ModelConfig
from paceline.core.model.encoder import EncoderConfig, HeadStage
from paceline.core.modes import POOLS, Pooling
from paceline.models.architecture import COMPUTED, Architecture, Classifier
from paceline.models.fields import Fields

# What stands in the checkpoints of a body and its heads beside the body.
UNUSED = (*COMPUTED, r"(^|\.)position_ids$", r"^(\w+\.)?pooler\.", r"^(cls|lm_head)\.")
DEFAULTS: dict[str, Any] = {
    "vocab_size": 30522,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "intermediate_size": 3072,
    "hidden_act": "gelu",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 0,
}
# Norms of checkpoints that were first TensorFlow's.
_RENAMED = (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias"))


def read_bert(fields: Fields, *, first: int = 0) -> dict[str, Any]:
    """first: row of the table of positions that position 0 has."""
    if fields.get("position_embedding_type") not in (None, "absolute"):
        fields.fail("position_embedding_type", "'absolute'", fields.get("position_embedding_type"))
    fields.refuse("is_decoder", "only the encoder is supported")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        fields.fail("num_attention_heads", f"a divisor of hidden_size {hidden}", heads)
    dim = hidden // heads
    spec = LayerSpec(heads=Heads(heads, heads, dim, dim), scale=dim**-0.5, causal=False)
    gelu = tuple(name for name, kind in HIDDEN_ACTS.items() if kind.startswith("gelu"))
    act = fields.choice("hidden_act", gelu)
    return {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": fields.integer("intermediate_size"),
        "layers": (spec,) * fields.integer("num_hidden_layers"),
        "max_position": fields.integer("max_position_embeddings") - first,
        "rms_norm_eps": fields.number("layer_norm_eps"),
        "hidden_act": HIDDEN_ACTS[act],
        "attention_bias": True,
        "attention_out_bias": True,
        "tie_word_embeddings": False,
        "encoder": EncoderConfig(
            position_rows=fields.integer("max_position_embeddings"),
            first_position=first,
            token_types=fields.integer("type_vocab_size"),
        ),
        "ends": POOLS,
        "pooling": Pooling.MEAN,  # as sentence-transformers, where no file says another
    }


def build(config: ModelConfig, **where: Any) -> Any:
    """where: as of `build_encoder`."""
    from paceline.models.bert_stack import build_bert

    return build_bert(config, **where)


def bert_family(
    prefix: str,
    *,
    defaults: dict[str, Any],
    after_pad: bool,
    head: tuple[str, str],
    model_type: str | None = None,
) -> Architecture:
    """A model with BERT's encoder.  prefix: of its tensors in checkpoints with a head.  after_pad:
    positions begin behind the padding token's.  head: names of a classifier's two products."""

    def classify(fields: Fields, num_labels: int) -> Classifier:
        dense = HeadStage(name=head[0], width=fields.integer("hidden_size"), act="tanh")
        return Classifier(Pooling.CLS, (dense, HeadStage(name=head[1], width=num_labels)))

    def read(fields: Fields) -> dict[str, Any]:
        first = fields.integer("pad_token_id", minimum=0) + 1 if after_pad else 0
        return read_bert(fields, first=first)

    return Architecture(
        read=read,
        build=build,
        classify=classify,
        defaults=defaults,
        renamed=((prefix, ""), *_RENAMED),
        ignored=UNUSED,
        model_type=model_type,
    )
