"""Checkpoints whose codes stay codes give the logits of the numbers that they stand for; plain ones
become fp8 as they are read.  Here a CPU unpacks: its kernels are tested by the interpreter."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import test_ranks
import tiny_checkpoints
import torch
import transformers
from fake_context import FakeContext
from safetensors.torch import load_file, save_file
from test_ranks import require_equal, together
from torch import Tensor

from paceline.core.errors import ConfigError, WeightsError
from paceline.core.options.engine_options import EngineOptions
from paceline.core.parallel import ALONE, Parallel
from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.all_reduce import open_exchange
from paceline.kernels.packed_weight import FP8, INT4, Packing
from paceline.layers.weights.packed import PackedLinear
from paceline.layers.weights.packed_experts import PackedExperts
from paceline.layers.weights.weight_format import held_by
from paceline.llm.llm import LLM
from paceline.models.causal_lm import CausalLM
from paceline.models.config import parse_config
from paceline.models.loader import load_model
from paceline.models.locate import locate
from paceline.models.packed_layers import PLAIN, Packings, packed_modules
from paceline.models.quantized.kept import MADE
from paceline.models.size import as_built
from paceline.plan.explain import explain_model, show
from paceline.plan.target import find_target

sys.path.insert(0, str(Path(__file__).parents[3] / "recipes"))
from quantise import quantise

STAY = ["awq", "fp8", "fp8-block", "fp8-rows", "gptq", "gptq-asym", "gptq-v2-8bit", "modelopt-fp8"]
STAY += ["w4a16", "w4a16-asym", "w8a16", "w8a8"]
TOKENS = torch.arange(4, 28)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Columns that fill no chunk, rows whose scales are spread over 8x."""
    sizes = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1}
    return save(tmp_path_factory.mktemp("plain"), **sizes, intermediate_size=160)


def save(folder: Path, case: str = "llama-gqa2-untied", **sizes: int) -> Path:
    family, settings = tiny_checkpoints.CASES[case]
    torch.manual_seed(1)
    config = getattr(transformers, f"{family}Config")(**(settings | sizes))
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "layers" in name:
                weight.mul_(0.35 * torch.exp2(3 * torch.rand(weight.shape[0], 1)))
    model.save_pretrained(folder)
    return folder


def packings(folder: Path, **asked: object) -> Packings:
    return find_target(EngineOptions(model=str(folder), **asked), weights=True, gpu="h200").packings


def built_of(folder: Path, kept: Packings, parallel: Parallel = ALONE) -> Packings:
    return as_built(kept, parse_config(locate(str(folder)).config), parallel)


def load(folder: Path, kept: Packings, **where: object) -> CausalLM:
    source = locate(str(folder))
    config = parse_config(source.config, source.generation_config)
    usual = {"device": torch.device("cpu"), "dtype": torch.float32, "parallel": Parallel()}
    return load_model(source, config, packings=kept, **(usual | where))


def logits(model: CausalLM, folder: Path) -> Tensor:
    config = parse_config(locate(str(folder)).config)
    context = FakeContext(config, model.attention_sinks())
    return model.logits(model(TOKENS, torch.arange(len(TOKENS)), context).hidden)


def num_packed(model: CausalLM) -> int:
    return sum(isinstance(held.format, PackedLinear) for held in held_by(model).values())


@pytest.mark.parametrize("format_", STAY)
def test_codes_that_stay_give_the_logits_of_their_numbers(
    format_: str, plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantised"
    assert quantise(plain, format_, folder)
    kept = packings(folder)
    ours, numbers = load(folder, kept), load(folder, PLAIN)
    assert num_packed(ours) == 4 * 2  # qkv, out, gate and up, down; the head is plain
    rounds = any(packing.rounds_inputs for packing in kept.by_module.values())
    # Activations of "fp8-rows" are plain; a block of "fp8-block" may hold all columns.
    assert rounds == (format_ in ("fp8", "fp8-block", "modelopt-fp8"))
    if format_ == "fp8-block":
        shared = {(kept_as.group, kept_as.shared_rows) for kept_as in kept.by_module.values()}
        assert shared == {(None, 1), (128, 128)}
    wanted = logits(numbers, folder)
    assert (logits(ours, folder) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    size = sum(p.nbytes for p in ours.parameters())
    assert size < sum(p.nbytes for p in numbers.parameters())


def test_rows_are_rounded_where_the_file_has_codes_for_activations(
    plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantised"
    quantise(plain, "fp8-rows", folder)
    config = json.loads((folder / "config.json").read_text())
    (group,) = config["quantization_config"]["config_groups"].values()
    group["input_activations"] = {"num_bits": 8, "type": "float", "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    assert {packing.rounds_inputs for packing in packings(folder).by_module.values()} == {True}


def test_rows_stay_as_they_are_where_the_method_is_of_weights_alone(
    plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantised"
    quantise(plain, "modelopt-fp8", folder)
    told = (folder / "config.json").read_text()
    assert told.count('"FP8"') == 1
    (folder / "config.json").write_text(told.replace('"FP8"', '"FP8_PB_WO"'))
    assert {packing.rounds_inputs for packing in packings(folder).by_module.values()} == {False}


@pytest.mark.parametrize("format_", ["mxfp4-linear", "nvfp4"])
def test_codes_that_no_kernel_reads_become_numbers(
    format_: str, plain: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "quantised"
    quantise(plain, format_, folder)
    kept = packings(folder)
    assert (not kept, kept.num_unread) == (True, 14)
    assert num_packed(load(folder, kept)) == 0


def test_a_fused_layer_with_parts_that_differ_becomes_numbers(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    quantise(plain, "w4a16", folder)
    kept = packings(folder)
    some = {name: each for name, each in kept.by_module.items() if "0.mlp.up_proj" not in name}
    built = built_of(folder, Packings(some, num_unread=1))
    assert set(some) - set(built.by_module) == {"model.layers.0.mlp.gate_proj"}
    assert str(built).endswith("; 2 become plain numbers, since no layer reads them as codes")
    ours = load(folder, Packings(some))
    assert num_packed(ours) == 7
    assert torch.equal(logits(ours, folder), logits(ours, folder))
    wanted = logits(load(folder, PLAIN), folder)
    assert (logits(ours, folder) - wanted).abs().max() < 1e-5 * wanted.abs().max()


def test_a_scale_that_is_no_number_is_named(plain: Path, tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    quantise(plain, "w4a16", folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.1.self_attn.v_proj.weight_scale"
    tensors[name][3] = torch.nan
    save_file(tensors, file)
    with pytest.raises(WeightsError, match=r"layers\.1\.self_attn\.v_proj.* no finite number"):
        load(folder, packings(folder))


def test_scales_of_integers_may_be_negative(plain: Path, tmp_path: Path) -> None:
    """As of symmetric weights that AutoRound writes as GPTQ."""
    folder = tmp_path / "quantised"
    quantise(plain, "gptq", folder)
    before = logits(load(folder, PLAIN), folder)
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.v_proj.scales"][:, ::2] *= -1
    save_file(tensors, file)
    wanted = logits(load(folder, PLAIN), folder)
    assert (wanted - before).abs().max() > 1e-2 * before.abs().max()
    ours = load(folder, packings(folder))
    assert num_packed(ours) == 8
    assert (logits(ours, folder) - wanted).abs().max() < 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("format_", ["awq", "fp8-rows"])
def test_ranks_hold_their_part_of_words(format_: str, tmp_path: Path) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    save(plain, hidden_size=256, intermediate_size=256)
    quantise(plain, format_, folder)
    kept = packings(folder)
    whole = load(folder, kept)
    ways = open_exchange(2, 4096, dtype=torch.float32, device=torch.device("cpu"))
    parts = [
        load(folder, kept, parallel=Parallel(rank, 2), exchange=ways[rank]) for rank in range(2)
    ]
    assert [num_packed(part) for part in parts] == [8, 8]
    down = [part.decoder.layers[1].mlp.part.down.words for part in parts]
    assert torch.equal(torch.cat(down, 1), whole.decoder.layers[1].mlp.down.words)
    up = [part.decoder.layers[1].mlp.part.gate_up.scale for part in parts]
    halves = [scale.chunk(2) for scale in up]
    joined = torch.cat([half[at] for at in range(2) for half in halves])
    assert torch.equal(joined, whole.decoder.layers[1].mlp.gate_up.scale)


def test_plain_weights_become_fp8_as_they_are_read(plain: Path) -> None:
    kept = packings(plain, quantization="fp8")
    assert kept.made == Packing(FP8, None, False, torch.float32, rounds_inputs=True)
    ours = load(plain, kept)
    assert num_packed(ours) == 8
    numbers = load(plain, PLAIN).decoder.layers[1].mlp.down.weight
    made = ours.decoder.layers[1].mlp.down(torch.eye(160)).T
    assert 0.02 < (made - numbers).norm() / numbers.norm() < 0.03  # as of 3 bits of mantissa


def test_an_engine_makes_fp8_and_says_so(plain: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    asked = {"dtype": "float32", "threads": 1, "max_num_seqs": 2, "quantization": "fp8"}
    with LLM(str(plain), **asked) as llm:
        outputs = llm.generate([{"prompt_token_ids": [5, 6, 7]}], params)
        said = {event["reason"]: event["detail"] for event in llm.report()["events"]}
    assert len(outputs[0].outputs[0].token_ids) == 8
    assert said["weights_packed"].startswith("fp8, a scale for a row: what linear layers but heads")
    plan = explain_model({"model": str(plain), "quantization": "fp8"}, gpu="h200")
    usual = explain_model({"model": str(plain)}, gpu="h200")
    assert "weights: fp8, a scale for a row" in show(plan)
    assert "multiply with codes (packed_linear)" in show(plan)
    assert "  0.2 MiB more while one is packed" in show(plan)  # 10 * 160 * 128 bytes
    assert plan.fit.weights_bytes < usual.fit.weights_bytes


@pytest.mark.parametrize("asked", sorted(MADE))
def test_dummy_weights_are_noise_in_a_format(asked: str, plain: Path) -> None:
    kept = packings(plain, quantization=asked, load_format="dummy")
    model = load(plain, kept, load_format="dummy")
    assert num_packed(model) == 8
    layer = model.decoder.layers[0].mlp.down
    numbers = layer(torch.eye(160))
    assert 0.015 < numbers.std() < 0.025


def test_what_nothing_makes_is_refused(plain: Path) -> None:
    with pytest.raises(ConfigError, match=r"quantization must be 'none', .* got 'w4a16'; "):
        packings(plain, quantization="w4a16")
    with pytest.raises(ConfigError, match="none, of dummy weights on several processes"):
        packings(plain, quantization="fp8", load_format="dummy", tensor_parallel_size=2)


def test_what_dummy_weights_become_is_what_was_asked(plain: Path, tmp_path: Path) -> None:
    """Whatever the config.json says of stored ones."""
    folder = tmp_path / "quantised"
    quantise(plain, "fp8", folder)
    kept = packings(folder, quantization="fp8", load_format="dummy")
    assert kept.made == MADE["fp8"]
    with pytest.raises(ConfigError, match=r"must be one of fp8, .* of dummy weights, got 'awq'"):
        packings(folder, quantization="awq", load_format="dummy")


def test_unasked_float32_has_no_codes(plain: Path, tmp_path: Path) -> None:
    """No kernel multiplies with them there: every step would unpack every weight."""
    folder = tmp_path / "quantised"
    quantise(plain, "awq", folder)
    assert not packings(folder, dtype="float32")
    asked = {"model": str(folder), "dtype": "float32", "quantization": "awq"}
    said = show(explain_model(asked, gpu="h200"))
    assert "14 stay int4" in said
    assert "every step multiplies with numbers made of codes" in said


def test_rates_and_decays_are_not_rounded() -> None:
    made = Packings(made=MADE["fp8"])
    assert made.of("model.layers.0.linear_attn.in_proj_ba") is None
    assert made.of("model.layers.0.linear_attn.out_proj") == MADE["fp8"]


def test_experts_stay_codes_and_latents_become_numbers(tmp_path: Path) -> None:
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    columns = {"intermediate_size": 96, "moe_intermediate_size": 32, "q_lora_rank": 32}
    save(plain, "deepseek_v3-halves", **columns, v_head_dim=32)
    quantise(plain, "fp8-rows", folder)
    settings = json.loads((folder / "config.json").read_text())
    settings["num_hidden_layers"] = 2  # the third is one that predicts more
    (folder / "config.json").write_text(json.dumps(settings))
    kept = packings(folder)
    assert not any(name.startswith("model.layers.2.") for name in kept.by_module)
    built = built_of(folder, kept)
    ours, numbers = load(folder, kept), load(folder, PLAIN)
    assert set(built.by_module) == packed_modules(ours)
    assert any(".experts." in name for name in built.by_module)
    wanted = logits(numbers, folder)
    assert (logits(ours, folder) - wanted).abs().max() < 1e-5 * wanted.abs().max()
    lost = set(kept.by_module) - set(built.by_module)
    assert {name.rpartition(".")[2] for name in lost} == {"kv_b_proj"}
    assert built.num_unread == len(lost)
    plan = explain_model({"model": str(folder)}, gpu="h200")
    assert f"; {len(lost)} become plain numbers" in show(plan)
    one = min(name for name in kept.by_module if ".experts.1.down" in name)
    some = {name: each for name, each in kept.by_module.items() if name != one}
    assert num_experts(load(folder, Packings(some))) == num_experts(ours) - 1


def num_experts(model: CausalLM) -> int:
    return sum(isinstance(held.format, PackedExperts) for held in held_by(model).values())


def test_experts_of_a_stack_become_fp8_and_ranks_hold_their_part(tmp_path: Path) -> None:
    """Of a plain checkpoint with all experts in one tensor, and of one of codes."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 256, "intermediate_size": 64}
    plain, folder = tmp_path / "plain", tmp_path / "quantised"
    save(
        plain,
        "qwen3_moe-normalised-dense-layer",
        **sizes,
        head_dim=32,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    each = load(plain, Packings(made=MADE["fp8"]))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(plain)
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    assert len(load_file(tmp_path / "stacked" / "model.safetensors")) < len(each.destinations())
    made = load(tmp_path / "stacked", Packings(made=MADE["fp8"]))
    assert num_experts(made) > 0
    assert all(map(torch.equal, made.parameters(), each.parameters()))
    quantise(plain, "w4a16-asym", folder)
    kept = packings(folder)
    alone, config = load(folder, kept), parse_config(locate(str(folder)).config)
    capacity = test_ranks.TOKENS * max(config.hidden_size, config.vocab_size)
    where = {"device": torch.device("cpu"), "dtype": torch.float32}
    ranks = [
        load(folder, kept, parallel=Parallel(rank, 2), exchange=way)
        for rank, way in enumerate(open_exchange(2, capacity, **where))
    ]
    assert num_experts(ranks[1]) == num_experts(alone) > 0
    require_equal(together(ranks, config), test_ranks.logits(alone, config))


def test_ranks_that_cut_words_count_what_becomes_numbers(tmp_path: Path) -> None:
    folder = tmp_path / "quantised"
    quantise(save(tmp_path / "wide", hidden_size=256, intermediate_size=160), "w4a16", folder)
    asked = {"model": str(folder)}
    whole, part = (explain_model(asked | {"tensor_parallel_size": n}, gpu="h200") for n in (1, 2))
    assert "14 stay int4" in str(whole.packings)
    assert "; 2 become plain numbers" in str(part.packings)
    kind = "int4, a scale for 32 columns"
    assert part.weights_by_format[kind] != whole.weights_by_format[kind]


def test_a_hub_model_is_here_before_its_headers_are_read(
    plain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub

    stored, here = tmp_path / "stored", tmp_path / "here"
    quantise(plain, "awq", stored)
    here.mkdir()
    asked: list[bool] = []

    def snapshot(model: str, **options: list[str]) -> str:
        asked.append("*.safetensors" in options["allow_patterns"])
        for path in stored.iterdir():
            if asked[-1] or path.suffix != ".safetensors":
                shutil.copy(path, here)
        return str(here)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    options = EngineOptions(model="owner/name")
    assert not find_target(options, weights=False, gpu="h200").packings
    with pytest.raises(ConfigError, match="quantization must be 'awq'"):
        find_target(EngineOptions(model="owner/name", quantization="fp8"), weights=True, gpu="h200")
    assert not any(asked)
    assert len(find_target(options, weights=True, gpu="h200").packings.by_module) == 14
    assert asked[-2:] == [False, True]
    assert len(find_target(options, weights=False, gpu="h200").packings.by_module) == 14


def test_kinds_are_said() -> None:
    kept = {"a": Packing(INT4, 32, True, torch.float16)}
    said = "1 stay int4, a scale for 32 columns"
    assert str(Packings(kept)) == said
    more = "; 2 become plain numbers, since no layer reads them as codes"
    assert str(Packings(kept, num_unread=2)) == said + more
