"""Every way in which checkpoints store experts fills the same weights; MXFP4 is refused."""

from pathlib import Path
from typing import Any

import pytest
import tiny_checkpoints
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from paceline.core.errors import ModelError, WeightsError
from paceline.core.model.rope import RopeKind
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate

QWEN, GPT_OSS = "qwen3_moe-normalised-dense-layer", "gpt-oss-sinks-alternating-windows"
QWEN_CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
GPT_OSS_CONFIG = QWEN_CONFIG | {"model_type": "gpt_oss", "num_key_value_heads": 4}


def load(folder: Path) -> CausalLM:
    source = locate(str(folder))
    return load_model(
        source,
        parse_config(source.config, source.generation_config),
        parallel=Parallel(),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )


def stored(folder: Path) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def stack(folder: Path) -> transformers.PreTrainedModel:
    """Save the qwen model in transformers' own format, all experts in one tensor."""
    model = tiny_checkpoints.make(QWEN)
    model.save_pretrained(folder, save_original_format=False)
    return model


def test_experts_are_read_from_their_own_tensors_and_from_stacks_alike(tmp_path: Path) -> None:
    tiny_checkpoints.save(QWEN, tmp_path / "each")
    stack(tmp_path / "stacked")
    assert stored(tmp_path / "each")["model.layers.0.mlp.experts.5.up_proj.weight"].dim() == 2
    assert stored(tmp_path / "stacked")["model.layers.0.mlp.experts.gate_up_proj"].dim() == 3
    each, stacked = load(tmp_path / "each"), load(tmp_path / "stacked")
    for ours, theirs in zip(each.parameters(), stacked.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_each_expert_has_its_own_gate_up_and_down(tmp_path: Path) -> None:
    theirs = tiny_checkpoints.save(QWEN, tmp_path).model.layers[2].mlp.experts
    block = load(tmp_path).decoder.layers[2].mlp
    gate, up = theirs.gate_up_proj.chunk(2, dim=1)
    assert torch.equal(block.gate_up[:, ::2], gate)
    assert torch.equal(block.gate_up[:, 1::2], up)
    assert torch.equal(block.down, theirs.down_proj)


def test_a_stack_of_another_shape_is_named(tmp_path: Path) -> None:
    stack(tmp_path)
    tensors = stored(tmp_path)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(6, 40, 3)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"0\.down_proj.* must be .*\[40, 28\], got F32 \[40, 3"):
        load(tmp_path)


def test_a_stack_with_too_few_experts_is_refused(tmp_path: Path) -> None:
    stack(tmp_path)
    tensors = stored(tmp_path)
    tensors["model.layers.0.mlp.experts.down_proj"] = torch.zeros(5, 40, 28)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(WeightsError, match=r"1 missing \(model.*experts\.5\.down_proj\.weight\)"):
        load(tmp_path)


def test_gpt_oss_is_read_as_it_is_stored(tmp_path: Path) -> None:
    theirs = tiny_checkpoints.save(GPT_OSS, tmp_path).model.layers[1]
    layer = load(tmp_path).decoder.layers[1]
    assert torch.equal(layer.mlp.gate_up, theirs.mlp.experts.gate_up_proj.mT)
    assert torch.equal(layer.mlp.down_bias, theirs.mlp.experts.down_proj_bias)
    assert torch.equal(layer.mlp.router.bias, theirs.mlp.router.bias)
    assert torch.equal(layer.attention.sinks, theirs.self_attn.sinks)


def test_sinks_are_given_to_the_backend_in_float32(tmp_path: Path) -> None:
    theirs = tiny_checkpoints.save(GPT_OSS, tmp_path)
    sinks = load(tmp_path).attention_sinks()
    assert [tensor.dtype for tensor in sinks] == [torch.float32] * 3
    assert torch.equal(sinks[2], theirs.model.layers[2].self_attn.sinks)


def test_which_layers_have_experts_is_as_in_transformers() -> None:
    for sparse in (
        {},
        {"decoder_sparse_step": 2},
        {"mlp_only_layers": [0, 3]},
        {"decoder_sparse_step": 2, "mlp_only_layers": [1]},
    ):
        settings = QWEN_CONFIG | sparse
        moe = parse_config(settings).moe
        with torch.device("meta"):
            config = transformers.AutoConfig.for_model(**settings)
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        assert moe is not None
        for ours, layer in zip(moe.layers, theirs.model.layers, strict=True):
            assert ours == hasattr(layer.mlp, "experts")


def test_a_model_whose_layers_are_all_dense_has_no_experts() -> None:
    assert parse_config(QWEN_CONFIG | {"mlp_only_layers": [0, 1, 2, 3]}).moe is None


def test_gpt_oss_is_read_with_the_defaults_of_transformers() -> None:
    config = parse_config(GPT_OSS_CONFIG)
    theirs = transformers.GptOssConfig(
        **{key: value for key, value in GPT_OSS_CONFIG.items() if key != "model_type"}
    )
    assert config.moe is not None
    assert all(layer.sinks for layer in config.layers)
    assert config.moe.swiglu_alpha == theirs.swiglu_alpha
    assert config.moe.swiglu_limit == theirs.swiglu_limit
    assert config.heads[0].head_dim == theirs.head_dim
    assert config.rms_norm_eps == theirs.rms_norm_eps
    assert config.attention_bias == config.attention_out_bias == theirs.attention_bias
    ((rope, _),) = config.ropes
    assert rope.kind is RopeKind.YARN
    assert rope.theta == theirs.rope_parameters["rope_theta"]
    assert rope.factor == theirs.rope_parameters["factor"]
    assert rope.truncate is theirs.rope_parameters["truncate"] is False
    windows = [theirs.sliding_window if "sliding" in kind else None for kind in theirs.layer_types]
    assert [layer.window for layer in config.layers] == windows


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "more experts per token than experts": (
        {"num_experts_per_tok": 9},
        "num_experts_per_tok must be at most num_experts 8, got 9",
    ),
    "another activation": ({"hidden_act": "gelu_pytorch_tanh"}, "hidden_act must be one of silu"),
    "layers as words": (
        {"mlp_only_layers": ["first"]},
        r"mlp_only_layers must be a list of layer numbers, got \['first'\]",
    ),
}


@pytest.mark.parametrize("case", sorted(REFUSED))
def test_experts_we_cannot_do_are_refused_by_name(case: str) -> None:
    change, text = REFUSED[case]
    with pytest.raises(ModelError, match=text):
        parse_config(QWEN_CONFIG | change)
