"""Scales of an 8-bit KV cache: found by name, checked, and no obstacle to loading."""

from pathlib import Path

import pytest
import tiny_checkpoints
import torch
from safetensors.torch import save_file
from torch import Tensor

from paceline.core.errors import WeightsError
from paceline.core.events import Event
from paceline.core.parallel import Parallel
from paceline.models.config import parse_config
from paceline.models.kv_scales import has_kv_scales, kv_format, kv_scale_name, read_kv_scales
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.quantized.config import read_quantization

BLOCK = "model.layers.{}.self_attn."


def add(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Put `tensors` into one more shard; without an index every shard is read."""
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    save_file(tensors, folder / "scales.safetensors")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny_checkpoints.save("llama-gqa2-untied", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("model.layers.3.self_attn.k_scale", (3, "k")),
        ("model.layers.12.self_attn.v_scale", (12, "v")),
        ("model.layers.0.self_attn.k_proj.k_scale", (0, "k")),
        ("model.language_model.layers.1.self_attn.v_proj.v_scale", (1, "v")),
        ("model.layers.2.self_attn.qkv_proj.v_scale", (2, "v")),
        ("model.layers.2.self_attn.kv_scale", (2, "kv")),
        ("model.layers.2.self_attn.k_proj.output_scale", (2, "k")),
        ("model.layers.0.self_attn.k_proj.v_scale", None),
        ("model.layers.0.self_attn.k_proj.weight_scale", None),
        ("model.layers.0.self_attn.q_scale", None),
        ("model.layers.0.mlp.k_scale", None),
    ],
)
def test_scales_are_known_by_their_names(name: str, found: tuple[int, str] | None) -> None:
    assert kv_scale_name(name) == found


def test_both_spellings_are_read(folder: Path) -> None:
    assert not has_kv_scales(folder)
    add(
        folder,
        {
            BLOCK.format(0) + "k_scale": torch.tensor(0.5),
            BLOCK.format(1) + "v_proj.v_scale": torch.tensor([0.25], dtype=torch.bfloat16),
        },
    )
    assert has_kv_scales(folder)
    assert read_kv_scales(folder) == {(0, "k"): 0.5, (1, "v"): 0.25}


def test_one_scale_may_be_of_both_sides(folder: Path) -> None:
    add(folder, {BLOCK.format(1) + "kv_scale": torch.tensor(0.5)})
    assert read_kv_scales(folder) == {(1, "k"): 0.5, (1, "v"): 0.5}


@pytest.mark.parametrize("wrong", [[0.5, 0.5], [0.0], [-1.0], [float("nan")], [float("inf")]])
def test_a_scale_that_is_not_one_positive_number_is_refused(
    folder: Path, wrong: list[float]
) -> None:
    add(folder, {BLOCK.format(0) + "k_scale": torch.tensor(wrong)})
    with pytest.raises(WeightsError, match=r"k_scale' must be one positive number.*got \["):
        read_kv_scales(folder)


def test_a_checkpoint_with_scales_loads_the_same_weights(folder: Path) -> None:
    def weights() -> list[Tensor]:
        source = locate(str(folder))
        model = load_model(
            source,
            parse_config(source.config),
            parallel=Parallel(),
            device=torch.device("cpu"),
            dtype=torch.float32,
        )
        return list(model.parameters())

    before = weights()
    unread = (f"{of}_scale" for of in ("q", "q_proj.q", "q_proj.output", "prob_output"))
    add(folder, {BLOCK.format(1) + name: torch.tensor([0.5]) for name in ("k_scale", *unread)})
    after = weights()
    assert len(before) == len(after)
    assert all(map(torch.equal, before, after))


def test_a_config_that_quantises_the_cache_alone_is_read(folder: Path) -> None:
    config = locate(str(folder)).config
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    quantised = {"quant_method": "compressed-tensors", "kv_cache_scheme": cache}
    of_nothing = {"group_0": {"targets": ["Linear"], "weights": None}}
    for same in (quantised, *(quantised | {"config_groups": own} for own in ({}, of_nothing))):
        assert read_quantization({"quantization_config": same}) is None
        assert parse_config(config | {"quantization_config": same}) == parse_config(config)


@pytest.mark.parametrize(
    ("said", "others"),
    [
        (None, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, None),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}, "NVFP4"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 4}}, "4 bits"),
    ],
)
def test_scales_of_another_format_are_not_taken_for_float8(
    folder: Path, said: dict[str, object] | None, others: str | None
) -> None:
    add(folder, {BLOCK.format(1) + f"{side}_scale": torch.tensor(0.5) for side in "kv"})
    events: list[Event] = []
    config = {"quantization_config": said}
    found = kv_format(
        "fp8_e4m3", folder, config, num_layers=2, of_latents=False, notify=events.append
    )
    taken = 1.0 if others else 0.5
    assert found.scales is not None
    assert [(of.k, of.v) for of in found.scales.values()] == [(1.0, 1.0), (taken, taken)]
    unused = [event.detail for event in events if event.reason == "kv_scales_unused"]
    assert unused == ([f"those of the checkpoint; they are for {others}"] if others else [])
