"""The bundled model's draft head: its form, what is written about it, and what it accepts."""

import json
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoTokenizer

from paceline import LLM, SamplingParams
from paceline.engine.acceptance import Acceptance, read_band

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
TARGET = ROOT / "src" / "paceline" / "models" / "bundled"
FOLDER = TARGET / "eagle3"
METRICS = json.loads((RECIPES / "metrics_head.json").read_text())
CONFIG = json.loads((FOLDER / "config.json").read_text())

sys.path.append(str(RECIPES))

from draft_head import load_head  # noqa: E402
from draft_tree import Shape  # noqa: E402
from evaluate_head import load_target, score  # noqa: E402

TAPS = (1, 5, 8)
SHAPES = {"chain": Shape(3, 1, 3), "tree": Shape(3, 4, 7)}
OPTIONS = {
    "chain": {"speculative_num_steps": 3},
    "tree": {
        "speculative_num_steps": 3,
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
}


@pytest.fixture(scope="module")
def band():
    return read_band(FOLDER)


@pytest.fixture(scope="module")
def rounds(band):
    """(prompts, taps) -> the reference loop's counts, in float32."""
    target = load_target(TARGET, torch.float32)
    head = load_head(FOLDER, device="cpu", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def count(texts, taps, shapes):
        prompts = [torch.tensor(tokenizer(text)["input_ids"]) for text in texts]
        return score(target, head, prompts, band.max_tokens, shapes=shapes, taps=taps)

    return count


def tensors():
    """Name -> (dtype, shape)."""
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        return {name: (one.get_dtype(), one.get_shape()) for name, one in slices.items()}


def table(page):
    """The two-column rows of a page, by their first cell."""
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", page.read_text(), re.MULTILINE))


def test_the_folder_stays_under_four_megabytes():
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) <= 4_000_000


def test_the_checkpoint_has_the_names_and_shapes_of_released_heads():
    width, head_dim, inner = 192, 64, CONFIG["intermediate_size"]
    vocab, layer = CONFIG["draft_vocab_size"], "midlayer"
    shapes = {
        "fc.weight": [width, 3 * width],
        f"{layer}.hidden_norm.weight": [width],
        f"{layer}.input_layernorm.weight": [width],
        f"{layer}.self_attn.q_proj.weight": [3 * head_dim, 2 * width],
        f"{layer}.self_attn.k_proj.weight": [head_dim, 2 * width],
        f"{layer}.self_attn.v_proj.weight": [head_dim, 2 * width],
        f"{layer}.self_attn.o_proj.weight": [width, 3 * head_dim],
        f"{layer}.post_attention_layernorm.weight": [width],
        f"{layer}.mlp.gate_proj.weight": [inner, width],
        f"{layer}.mlp.up_proj.weight": [inner, width],
        f"{layer}.mlp.down_proj.weight": [width, inner],
        "norm.weight": [width],
        "lm_head.weight": [vocab, width],
    }
    expected = {name: ("BF16", shape) for name, shape in shapes.items()}
    expected |= {"d2t": ("I64", [vocab]), "t2d": ("BOOL", [CONFIG["vocab_size"]])}
    assert tensors() == expected
    assert CONFIG["architectures"] == ["LlamaForCausalLMEagle3"]
    assert CONFIG["num_hidden_layers"] == 1


def test_the_draft_vocabulary_is_marked_in_both_maps():
    with safe_open(FOLDER / "model.safetensors", "pt") as file:
        d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
    ids = torch.arange(len(d2t)) + d2t
    assert ids.tolist() == t2d.nonzero()[:, 0].tolist()


def test_metrics_are_those_of_this_folder():
    sizes = [(FOLDER / name).stat().st_size for name in ("config.json", "model.safetensors")]
    assert METRICS["folder_bytes"] == sum(sizes)
    learnt = [shape for dtype, shape in tensors().values() if dtype == "BF16"]
    assert METRICS["num_parameters"] == sum(torch.Size(shape).numel() for shape in learnt)
    acceptance = METRICS["held_out_acceptance"]
    assert acceptance["chain"]["tokens_per_round"] >= 2.0
    assert acceptance["tree"]["tokens_per_round"] > acceptance["chain"]["tokens_per_round"]


@pytest.mark.parametrize("page", [RECIPES / "README.md", FOLDER / "MODEL_CARD.md"], ids=str)
def test_the_pages_say_what_was_measured(page):
    rows, text = table(page), " ".join(page.read_text().split())
    for name, label in (("chain", "a chain of 3"), ("tree", "a tree of 7, 4 children a node")):
        found = METRICS["held_out_acceptance"][name]
        shares = " ".join(f"{100 * share:.0f} %" for share in found["accepted_by_position"])
        said = rows[f"tokens per round, {label} (accepted by position)"]
        assert said == f"{found['tokens_per_round']:.2f} ({shares})"
    minutes, million = METRICS["training_seconds"] / 60, METRICS["training_tokens_seen"] / 1e6
    budget = f"{minutes:.1f} minutes on one {METRICS['device']}, {million:.0f} million tokens"
    assert rows["training of the head"] == budget
    assert f"{METRICS['num_parameters']:,} parameters" in text


def test_the_band_is_short_and_the_one_the_head_reaches(band, rounds):
    assert (FOLDER / "acceptance.json").stat().st_size < 4096
    assert band.least_tokens_per_round == round(0.8 * band.tokens_per_round, 2)
    chain = {"chain": Shape(band.num_steps, 1, band.num_steps)}
    found = rounds(band.prompts, TAPS, chain)["chain"]["tokens_per_round"]
    assert found == pytest.approx(band.tokens_per_round, abs=0.1)


def test_taps_in_the_wrong_order_stay_below_the_band(band, rounds):
    chain = {"chain": Shape(band.num_steps, 1, band.num_steps)}
    found = rounds(band.prompts[::3], TAPS[::-1], chain)["chain"]["tokens_per_round"]
    assert found < 0.9 * band.least_tokens_per_round


@pytest.mark.parametrize("name", SHAPES)
def test_the_engine_accepts_what_the_reference_loop_accepts(name, band, rounds):
    prompts = band.prompts[:3]
    expected = rounds(prompts, TAPS, {name: SHAPES[name]})[name]
    params = SamplingParams(temperature=0.0, max_tokens=band.max_tokens)
    options = {"dtype": "float32", "device": "cpu", "threads": 1, "max_model_len": 256}
    with LLM("bundled", speculative_algorithm="EAGLE3", **options, **OPTIONS[name]) as llm:
        outputs = llm.generate(list(prompts), params)
    found = Acceptance.total(output.metrics.acceptance for output in outputs)
    assert found.rounds == pytest.approx(expected["rounds"], abs=2)  # near ties between tokens
    assert found.by_position == pytest.approx(expected["accepted_by_position"], abs=0.03)
