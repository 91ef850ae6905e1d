"""config.json and generation_config.json -> ModelConfig.  Imports no torch.

What a file asks for and we do not do is refused by name; what it leaves out is what the model's own
configuration class in transformers takes (`Architecture.defaults`).
"""

from collections.abc import Mapping
from typing import Any

from paceline.core.dtypes import DTYPES
from paceline.core.errors import ModelError
from paceline.core.model.config import ModelConfig
from paceline.core.model.rope import RopeKind
from paceline.models.config_layers import with_layers
from paceline.models.fields import Fields
from paceline.models.quantized.config import read_quantization
from paceline.models.registry import ARCHITECTURES

# model_type -> that of its text_config
_MULTIMODAL = {entry.text_of: name for name, entry in ARCHITECTURES.items() if entry.text_of}
MOST_LAYERS = 10_000  # a list per layer is built from the number before anything else is known


def parse_config(
    config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None
) -> ModelConfig:
    """The model's shape.  End tokens of both files count.

    Raises ModelError for an unknown model_type or an unsupported feature.
    """
    text = _text_config(config)
    fields = Fields(text)
    read_quantization(config)
    fields.refuse("draft_vocab_size", "pass a draft head with --speculative-draft-model-path")
    model_type = text.get("model_type")
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        known = ", ".join(sorted({*ARCHITECTURES, *_MULTIMODAL}))
        raise ModelError.about(
            "config.json: model_type",
            expected=f"one of {known}",
            got=repr(model_type),
            remedy="use a model of a supported architecture",
        )
    file = ARCHITECTURES[model_type]
    fields = fields.behind(file.defaults)
    layers = fields.get("num_hidden_layers")
    if isinstance(layers, int) and layers > MOST_LAYERS:
        fields.fail("num_hidden_layers", f"at most {MOST_LAYERS}", layers)
    parsed = file.read(fields)
    common: dict[str, Any] = {
        "model_type": model_type,
        "eos_token_ids": _eos_token_ids(text, generation_config or {}),
        "dtype": _dtype(fields),
    }
    return _checked(ModelConfig(**common, **with_layers(parsed)), fields)


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model's part; outer fields of a multimodal file count where it is silent."""
    outer_type = config.get("model_type")
    if not isinstance(outer_type, str) or outer_type not in _MULTIMODAL:
        return config
    inner = Fields(config).nested("text_config")
    shared = ("eos_token_id", "tie_word_embeddings", "dtype", "torch_dtype")
    outer = {name: config[name] for name in shared if config.get(name) is not None}
    model_type = _MULTIMODAL[outer_type]
    if inner.get("model_type", model_type) != model_type:
        expected = f"{model_type}, in a file of {outer_type}"
        Fields(config).fail("text_config.model_type", expected, inner["model_type"])
    return {**inner, **outer, "model_type": model_type}


def _eos_token_ids(*files: Mapping[str, Any]) -> tuple[int, ...]:
    """End tokens of all files, in order, each once."""
    ids: dict[int, None] = {}
    for file in files:
        found = file.get("eos_token_id")
        for token in found if isinstance(found, list) else [found]:
            if isinstance(token, int):
                ids[token] = None
    return tuple(ids)


def _dtype(fields: Fields) -> str:
    name = "dtype" if fields.get("dtype") is not None else "torch_dtype"
    stored = fields.get(name)
    if isinstance(stored, str) and stored.removeprefix("torch.") in DTYPES:
        return stored.removeprefix("torch.")
    return fields.choice(name, DTYPES, "float32")


def _checked(config: ModelConfig, fields: Fields) -> ModelConfig:
    if any(layer.attends and layer.causal for layer in config.layers):
        remedy = "this model_type is served as a causal model"
        fields.refuse("use_bidirectional_attention", remedy)
        if not fields.flag("is_causal", True):
            fields.fail("is_causal", "true, or absent", False, remedy=remedy)
    for heads in config.heads:
        if heads.num_heads % heads.num_kv_heads:
            expected = f"a divisor of num_attention_heads {heads.num_heads}"
            fields.fail("num_key_value_heads", expected, heads.num_kv_heads)
        if heads.head_dim % 2:
            fields.fail("head_dim", "even", heads.head_dim)
    for rope, turned in config.ropes:
        factors = {"short_factor": rope.short_factors, "long_factor": rope.long_factors}
        for name, given in factors.items():
            if rope.kind is RopeKind.LONGROPE and 2 * len(given) != turned:
                expected = f"a list of {turned // 2}, one for each pair that rope turns"
                fields.fail(f"rope_parameters: {name}", expected, f"{len(given)} numbers")
    return config
