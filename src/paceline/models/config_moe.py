"""config.json of models with routed experts, and what only those models spell."""

from dataclasses import replace
from typing import Any

from paceline.core.model_config import MoEConfig, NormKind
from paceline.models.config_prenorm import attention_biases, read_prenorm
from paceline.models.config_windows import read_windows, switched_window, uniform_windows
from paceline.models.fields import Fields

_SILU = ("silu", "swish")
_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_qwen3_moe(fields: Fields) -> dict[str, Any]:
    """Qwen 3 with experts; one window for all layers."""
    fields.refuse("layer_types", "qwen3_moe has one kind of layer; use a model of another type")
    shared = read_prenorm(fields)
    return shared | {
        **attention_biases(fields),
        "layer_windows": uniform_windows(shared, switched_window(fields)),
        "moe": _qwen_experts(fields),
    }


def read_qwen2_moe(fields: Fields) -> dict[str, Any]:
    """Qwen 2 with experts; a switched-on window is in every other lower layer, the first too."""
    first_full = fields.integer("max_window_layers", minimum=0)
    is_used = fields.flag("use_sliding_window", False)
    experts = _qwen_experts(fields)
    if experts is not None:
        shared_size = fields.integer("shared_expert_intermediate_size")
        experts = replace(experts, shared_size=shared_size)
    return read_prenorm(fields) | {
        "attention_bias": fields.flag("qkv_bias", True),
        "layer_windows": read_windows(
            fields,
            window=switched_window(fields),
            default=lambda layer: is_used and layer % 2 == 0 and layer < first_full,
        ),
        "moe": experts,
    }


def read_mixtral(fields: Fields) -> dict[str, Any]:
    """Mistral with experts in every layer; one window for all layers."""
    fields.refuse("layer_types", "mixtral has one kind of layer; use a model of another type")
    shared, window = read_prenorm(fields), fields.integer("sliding_window", None)
    fields.choice("hidden_act", _SILU, "silu")
    experts = MoEConfig(
        layers=(True,) * shared["num_layers"],
        num_experts=_num_experts(fields),
        experts_per_token=_experts_per_token(fields),
        intermediate_size=shared["intermediate_size"],
        renormalize=True,
        bias=False,
    )
    return shared | {"layer_windows": uniform_windows(shared, window), "moe": experts}


def read_gpt_oss(fields: Fields) -> dict[str, Any]:
    """Experts in every layer, sinks, and a window in every other layer, the first too."""
    # Where the file has no rope, its class takes this one.
    fields = fields.defaulting({"rope_theta": 150_000.0, "rope_parameters": _GPT_OSS_ROPE})
    window = fields.integer("sliding_window", None)
    return read_prenorm(fields) | {
        **attention_biases(fields, default=True),
        "layer_windows": read_windows(fields, window=window, default=lambda layer: layer % 2 == 0),
        "attention_sinks": True,
        "norm": NormKind.WIDE,
        "moe": _gpt_oss_experts(fields),
    }


def refuse_mxfp4(fields: Fields) -> None:
    """Raise ModelError for gpt-oss as released: 4-bit experts with shared exponents."""
    quantization: dict[str, Any] = fields.nested("quantization_config")
    if quantization.get("quant_method") == "mxfp4":
        fields.fail(
            "quantization_config",
            "absent: MXFP4 weights are not supported",
            "mxfp4",
            remedy="use a bfloat16 copy: load it in transformers with "
            "quantization_config=Mxfp4Config(dequantize=True) and save_pretrained it",
        )


def _qwen_experts(fields: Fields) -> MoEConfig | None:
    """Each decoder_sparse_step-th layer has experts, but those of mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.fail("mlp_only_layers", "a list of layer numbers", dense)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    fields.choice("hidden_act", _SILU, "silu")
    moe = MoEConfig(
        layers=layers,
        num_experts=_num_experts(fields),
        experts_per_token=_experts_per_token(fields),
        intermediate_size=fields.integer("moe_intermediate_size"),
        renormalize=fields.flag("norm_topk_prob", False),
        bias=False,
    )
    return moe if any(layers) else None


def _gpt_oss_experts(fields: Fields) -> MoEConfig:
    """Every layer has experts, with biases and the clamped gate."""
    fields.choice("hidden_act", _SILU, "silu")
    return MoEConfig(
        layers=(True,) * fields.integer("num_hidden_layers"),
        num_experts=_num_experts(fields),
        experts_per_token=_experts_per_token(fields),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        bias=True,
        swiglu_alpha=fields.number("swiglu_alpha"),
        swiglu_limit=fields.number("swiglu_limit"),
        swiglu_up_offset=1.0,
    )


def _num_experts(fields: Fields) -> int:
    """Under either of its two names; the class default is behind one of them."""
    name = "num_local_experts" if fields.get("num_experts") is None else "num_experts"
    count: int = fields.integer(name)
    return count


def _experts_per_token(fields: Fields) -> int:
    count: int = fields.integer("num_experts_per_tok")
    if count > _num_experts(fields):
        fields.fail("num_experts_per_tok", f"at most num_experts {_num_experts(fields)}", count)
    return count
