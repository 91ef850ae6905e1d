"""What a quantised checkpoint must not say, before weights are read, and must not lack."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from test_quantized_checkpoints import quantise, save
from torch import Tensor

from paceline.core.errors import ModelError, WeightsError
from paceline.core.parallel import Parallel
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.quantized.compressed_tensors import _PRESETS
from paceline.models.quantized.config import read_quantization

CT: dict[str, Any] = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
W4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}


def ct(weights: dict[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": W4 | (weights or {})}
    return CT | {"config_groups": {"group_0": group}} | more


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"quant_method": "bitsandbytes"},
            r"one of fp8, .*got 'bitsandbytes'",
        ),
        ({"bits": 4}, r"quant_method must be one of .*got None"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, r"fmt must be None or 'e4m3'.*got 'e5m2'"),
        (
            {"quant_method": "fp8", "weight_block_size": [128]},
            r"weight_block_size must be two positive integers, got \[128\]",
        ),
        ({"quant_method": "awq", "version": "gemv"}, r"version must be 'gemm', got 'gemv'"),
        ({"quant_method": "awq", "bits": 3}, r"bits must be 4 or None, got 3"),
        ({"quant_method": "gptq", "bits": 3}, r"bits must be 4 or 8, got 3"),
        (
            {"quant_method": "gptq", "bits": 4, "desc_act": True},
            r"desc_act must be False",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "dynamic": {"+:x": {"bits": 8}}},
            r"dynamic must be None",
        ),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            r"checkpoint_format must be 'gptq' or 'gptq_v2', got 'marlin'",
        ),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, r"quant_algo must be 'FP8'"),
        ({"quant_method": ["fp8"]}, r"quant_method must be one of .*got \['fp8'\]"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, r"group_size must be an integer"),
        (ct(ignore="lm_head"), r"ignore must be a list of module names and patterns"),
        (ct(ignore=["re:("]), r"ignore must be regular expressions behind 're:'"),
        (ct(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config must be absent"),
        (ct(transform_config={"config_groups": {"u": {}}}), r"transform_config must be absent"),
        (ct({"num_bits": 3}), r"weights: num_bits must be 4 or 8, got 3"),
        (ct({"actorder": "group"}), r"actorder must be None or 'weight'.*got 'group'"),
        (ct(format="marlin-24"), r"format must be one of .*got 'marlin-24'"),
        (CT | {"config_groups": {"W3": ["Linear"]}}, r"config_groups.W3 must be an object"),
        (
            CT | {"config_groups": {"group_0": {"targets": [], "weights": W4}}},
            r"targets must be a list of module names or classes",
        ),
    ],
)
def test_settings_are_refused_by_name(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ModelError, match=text):
        read_quantization({"quantization_config": settings})
    with pytest.raises(ModelError, match=text):  # as a multimodal model's file has it
        read_quantization({"text_config": {"quantization_config": settings}})


def test_a_cache_with_scales_is_no_quantised_checkpoint() -> None:
    settings = {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}
    assert read_quantization({"quantization_config": settings}) is None


def test_a_format_of_the_cache_alone_is_none_of_weights() -> None:
    settings = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}
    assert read_quantization({"quantization_config": settings}) is None


def test_older_names_of_the_field_and_of_the_method_are_read() -> None:
    assert read_quantization({"compression_config": ct()}) == read_quantization(
        {"quantization_config": ct()}
    )
    exported = {"producer": {"name": "modelopt"}, "quant_algo": "FP8"}
    found = read_quantization({"quantization_config": exported})
    assert found is not None
    assert found.method == "modelopt"


@pytest.mark.parametrize("name", sorted(_PRESETS))
def test_presets_are_those_of_the_library(name: str) -> None:
    theirs = preset_name_to_scheme(name, ["Linear"]).weights
    assert theirs is not None
    size = theirs.group_size if theirs.strategy != "block" else None
    told = (theirs.num_bits, theirs.type, theirs.symmetric, theirs.strategy)
    assert _PRESETS[name] == (*told, size)


@pytest.mark.parametrize(
    ("file", "data", "method"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 32}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 32, "version": "GEMM"}, "awq"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8"}}, "modelopt"),
    ],
)
def test_older_checkpoints_say_it_in_a_file_of_its_own(
    tmp_path: Path, file: str, data: dict[str, Any], method: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(data))
    found = read_quantization(locate(str(tmp_path)).config)
    assert found is not None
    assert found.method == method


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    save(folder, "llama-gqa2-untied", **sizes, intermediate_size=160)
    return folder


Q = "model.layers.0.self_attn.q_proj."


def changed(plain: Path, out: Path, format_: str, change: Any) -> str:
    """What loading says of a checkpoint in which `change` has turned the tensors."""
    folder = out / "changed"
    quantise(plain, format_, folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError) as error:
        loaded(folder)
    return str(error.value)


def loaded(folder: Path) -> CausalLM:
    source = locate(str(folder))
    config = parse_config(source.config, source.generation_config)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    return load_model(source, config, parallel=Parallel(), **where)


def without(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def with_(name: str, make: Any) -> Any:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = make(tensors.get(name))

    return change


def halved(tensors: dict[str, Tensor]) -> None:
    """Two groups where there were three."""
    for name in ("scales", "qzeros"):
        tensors[Q + name] = tensors[Q + name][:2].contiguous()


def test_biases_of_zeros_that_no_layer_has_are_passed_over(plain: Path, tmp_path: Path) -> None:
    quantise(plain, "gptq", tmp_path / "gptq")
    before = loaded(tmp_path / "gptq")
    tensors = load_file(tmp_path / "gptq" / "model.safetensors")
    for name in [*tensors]:
        if name.endswith("qweight"):
            tensors[name.replace("qweight", "bias")] = torch.zeros(tensors[name].shape[1])
    save_file(tensors, tmp_path / "gptq" / "model.safetensors")
    after = loaded(tmp_path / "gptq")
    assert all(map(torch.equal, before.parameters(), after.parameters()))


@pytest.mark.parametrize(
    ("format_", "change", "text"),
    [
        ("awq", without(Q + "scales"), "weight 'model.layers.0.self_attn.q_proj' must be "
         "qweight, qzeros, scales, got no scales"),
        ("awq", with_(Q + "qzeros", lambda t: t[:, :-1].contiguous()), "'qzeros' of [3, 12]"),
        ("awq", with_(Q + "scales", lambda t: t[:2].contiguous()), "'qzeros' of [2, 12]"),
        ("gptq-asym", halved, "'scales' for 3 groups, of 32 of 96 columns, got 2 groups"),
        ("gptq", with_(Q + "qzeros", lambda t: t + 1), "not those of symmetric weights"),
        ("fp8-block", with_(Q + "weight_scale_inv", lambda t: torch.full((1, 1), 127).byte()),
         "'weight_scale_inv' of F32 or BF16 or F16 or F8_E8M0, got U8"),
        ("mxfp4-linear", with_(Q + "weight_scale", lambda t: t.float()),
         "'weight_scale' of U8 or F8_E8M0, got F32"),
        ("mxfp4-linear", with_(Q + "weight_packed", lambda t: t[:, :-8].contiguous()),
         "'weight_scale' of [96, 2]"),
        ("nvfp4", with_(Q + "weight_global_scale", lambda t: torch.ones(2)),
         "'weight_global_scale' of [] or [1]"),
        ("modelopt-nvfp4", without(Q + "weight_scale_2"), "with 'weight_scale_2', as of NVFP4"),
        ("modelopt-fp8", with_(Q + "weight_scale_2", lambda t: torch.ones(1)),
         "without 'weight_scale_2', as of FP8"),
        ("gptq", with_(Q + "bias", lambda t: torch.ones(96)), "1 unexpected"),
        ("fp8-block", with_(Q + "weight_scale_inv", lambda t: -t), "a negative scale"),
        ("gptq", with_(Q + "qweight", lambda t: t[:, :-8].contiguous()),
         "'qweight' [inputs * 4 / 32, 96]"),
        ("gptq", with_(Q + "g_idx", lambda t: t.flip(0)), "activation order"),
        ("gptq", with_(Q + "g_idx", lambda t: t[:-1].clone()), "'g_idx' of [96]"),
        ("fp8", without(Q + "weight_scale"), "a matrix and one of weight_scale"),
        ("fp8", with_(Q + "weight", lambda t: t.float()), "F8_E4M3 codes, which 'weight_scale'"),
        ("fp8", with_(Q + "weight_scale", lambda t: torch.ones(2, 3)),
         "one scale, or one for each of 96 rows"),
        ("fp8", with_(Q + "weight", lambda t: torch.full_like(t, torch.nan)),
         "a code or an exponent that stands for no number"),
        ("fp8-block", with_(Q + "weight_scale_inv", lambda t: torch.ones(3, 1)),
         "'weight_scale_inv' of [1, 1]"),
        ("w8a8", with_(Q + "weight_zero_point", lambda t: torch.zeros(3, 1)),
         "'weight_zero_point' of [96, 1]"),
        ("w8a8", with_(Q + "weight_zero_point", lambda t: torch.full((96, 1), 300)),
         "'weight_zero_point' of I8, got I64"),
        ("w4a16-asym", with_(Q + "weight_zero_point", lambda t: t.long()),
         "'weight_zero_point' of I32, got I64"),
        ("w4a16", without(Q + "weight_scale"), "'weight_packed' and 'weight_scale', matrices"),
        ("w4a16", with_(Q + "weight_g_idx", lambda t: torch.zeros(96)), "no 'weight_g_idx'"),
        ("w4a16", with_("lm_head.weight_scale", lambda t: torch.ones(160, 1)),
         "plain: 'ignore' has 'lm_head'"),
        ("w4a16-asym", without(Q + "weight_zero_point"), "symmetric is false"),
        ("nvfp4", without(Q + "weight_scale"), "uint8 'weight_packed', a matrix, and"),
        ("nvfp4", with_(Q + "weight_global_scale", lambda t: -t), "a global scale that is no"),
        ("mxfp4-linear", with_(Q + "weight_scale", lambda t: t + 255 - t), "stands for no number"),
        ("modelopt-nvfp4", without(Q + "weight"), "got no weight"),
        ("modelopt-nvfp4", with_(Q + "weight", lambda t: t.float()), "uint8 'weight', a matrix"),
        ("modelopt-fp8", with_(Q + "pre_quant_scale", lambda t: torch.ones(96)),
         "no 'pre_quant_scale'"),
        ("fp8", with_("stray.weight_scale", lambda t: torch.ones(1)), "unexpected (stray"),
    ],
)  # fmt: skip
def test_tensors_are_refused_by_name(
    plain: Path, tmp_path: Path, format_: str, change: Any, text: str
) -> None:
    assert text in changed(plain, tmp_path, format_, change)


def test_integers_that_are_not_symmetric_need_zero_points(plain: Path, tmp_path: Path) -> None:
    """Unpacked ones, too: without, each would be off by its row's zero point."""
    quantise(plain, "w8a8", tmp_path / "w8a8")
    file = tmp_path / "w8a8" / "config.json"
    told = file.read_text()
    assert told.count('"symmetric": true') == 1
    file.write_text(told.replace('"symmetric": true', '"symmetric": false'))
    with pytest.raises(WeightsError, match="'weight_zero_point': symmetric is false"):
        loaded(tmp_path / "w8a8")


def test_gptq_may_name_what_it_leaves_plain() -> None:
    said = {"quant_method": "gptq", "bits": 4, "sym": True}
    named = said | {"dynamic": {"-:.*mlp.gate$": {}}}
    assert read_quantization({"quantization_config": named}) == read_quantization(
        {"quantization_config": said}
    )


def test_plain_weights_under_a_quantised_config_are_refused(plain: Path, tmp_path: Path) -> None:
    def plain_again(tensors: dict[str, Tensor]) -> None:
        tensors.clear()
        tensors.update(load_file(plain / "model.safetensors"))

    text = changed(plain, tmp_path, "awq", plain_again)
    assert "must be quantised by awq, as config.json says, got no tensor of codes" in text


def test_a_stack_of_experts_needs_blocks_and_scales(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    save(plain, "gpt-oss-sinks-alternating-windows", hidden_size=64, intermediate_size=96)
    stack = "model.layers.1.mlp.experts.down_proj"
    text = changed(plain, tmp_path, "mxfp4", without(f"{stack}_scales"))
    assert "'model.layers.1.mlp.experts.down_proj' must be down_proj_blocks and" in text
