"""config.json of models with routed experts, and what only those models spell."""

from typing import Any

from paceline.core.model_config import MoEConfig
from paceline.models.config_windows import read_windows
from paceline.models.fields import Fields

_GPT_OSS_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}


def read_qwen3_experts(fields: Fields) -> MoEConfig | None:
    """Each decoder_sparse_step-th layer has experts, but those of mlp_only_layers."""
    num_layers = fields.integer("num_hidden_layers")
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        fields.fail("mlp_only_layers", "a list of layer numbers", dense)
    layers = tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))
    fields.choice("hidden_act", ("silu",), "silu")
    moe = MoEConfig(
        layers=layers,
        num_experts=_num_experts(fields),
        experts_per_token=_experts_per_token(fields, 8),
        intermediate_size=fields.integer("moe_intermediate_size", 768),
        renormalize=fields.flag("norm_topk_prob", False),
        bias=False,
    )
    return moe if any(layers) else None


def read_gpt_oss_experts(fields: Fields) -> MoEConfig:
    """Every layer has experts, with biases and the clamped gate."""
    fields.choice("hidden_act", ("silu",), "silu")
    return MoEConfig(
        layers=(True,) * fields.integer("num_hidden_layers"),
        num_experts=_num_experts(fields),
        experts_per_token=_experts_per_token(fields, 4),
        intermediate_size=fields.integer("intermediate_size"),
        renormalize=True,
        bias=True,
        swiglu_alpha=fields.number("swiglu_alpha", 1.702),
        swiglu_limit=fields.number("swiglu_limit", 7.0),
        swiglu_up_offset=1.0,
    )


def gpt_oss_fields(fields: Fields) -> Fields:
    """With the rope that transformers takes where the file has none."""
    return fields.defaulting({"rope_theta": 150_000.0, "rope_parameters": _GPT_OSS_ROPE})


def gpt_oss_windows(fields: Fields) -> tuple[int | None, ...]:
    """[num_layers] every other layer windowed, the first too."""
    window = fields.integer("sliding_window", 128)
    return read_windows(fields, window=window, default=lambda layer: layer % 2 == 0)


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


def _num_experts(fields: Fields) -> int:
    """Under either of its two names."""
    count: int = fields.integer("num_experts", fields.integer("num_local_experts", 128))
    return count


def _experts_per_token(fields: Fields, default: int) -> int:
    count: int = fields.integer("num_experts_per_tok", default)
    if count > _num_experts(fields):
        fields.fail("num_experts_per_tok", f"at most num_experts {_num_experts(fields)}", count)
    return count
