"""The bundled model: its size, what is written about it, and that it writes Python."""

import json
import re
import struct
import sys
from pathlib import Path

import pytest

from paceline import LLM, SamplingParams

ROOT = Path(__file__).parents[2]
RECIPES = ROOT / "recipes"
FOLDER = ROOT / "src" / "paceline" / "models" / "bundled"
CARD = FOLDER / "MODEL_CARD.md"
METRICS = json.loads((RECIPES / "metrics.json").read_text())
CONFIG = json.loads((FOLDER / "config.json").read_text())

sys.path.append(str(RECIPES))

from parse_score import NUM_NEW_TOKENS, parse_report, read_headers  # noqa: E402


def table(page):
    """The two-column rows of a page, by their first cell."""
    return dict(re.findall(r"^\| ([^|]+?) \| ([^|]+?) \|$", page.read_text(), re.MULTILINE))


def prose(page):
    return " ".join(page.read_text().split())


def weights():
    """Name -> dtype and shape of every tensor of model.safetensors, from the file's own header."""
    with (FOLDER / "model.safetensors").open("rb") as file:
        (num_bytes,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(num_bytes))
    return {name: entry for name, entry in header.items() if name != "__metadata__"}


def product(shape):
    size = 1
    for dim in shape:
        size *= dim
    return size


def num_parsing(headers, dtype):
    """How many of the headers' greedy completions by paceline parse."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_NEW_TOKENS)
    with LLM("bundled", dtype=dtype, device="cpu", threads=1) as llm:
        outputs = llm.generate([item["header"] for item in headers], params)
    first = [output.outputs[0] for output in outputs]
    completions = [(one.text, one.finish_reason == "stop") for one in first]
    return sum(bool(item["parses"]) for item in parse_report(headers, completions))


def test_the_folder_stays_under_fourteen_megabytes():
    files = [path for path in FOLDER.iterdir() if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 14_000_000


def test_the_model_is_a_llama_of_many_thin_layers():
    assert CONFIG["architectures"] == ["LlamaForCausalLM"]
    assert CONFIG["num_hidden_layers"] >= 12
    layers = {int(n) for n in re.findall(r"layers\.(\d+)\.", " ".join(weights()))}
    assert layers == set(range(CONFIG["num_hidden_layers"]))


def test_every_weight_is_bfloat16():
    assert {entry["dtype"] for entry in weights().values()} == {"BF16"}


def test_the_vocabulary_is_byte_level_with_four_to_eight_thousand_entries():
    tokenizer = json.loads((FOLDER / "tokenizer.json").read_text())
    assert 4000 <= CONFIG["vocab_size"] <= 8192
    assert len(tokenizer["model"]["vocab"]) == CONFIG["vocab_size"]
    assert tokenizer["decoder"]["type"] == "ByteLevel"


def test_metrics_are_those_of_this_folder():
    assert METRICS["num_parameters"] == sum(product(e["shape"]) for e in weights().values())
    files = [path for path in FOLDER.iterdir() if path.is_file() and path != CARD]
    assert METRICS["model_bytes"] == sum(path.stat().st_size for path in files)
    assert METRICS["parse_score"] >= 70
    assert METRICS["num_headers"] == len(read_headers()) == 100


def test_the_model_card_says_what_was_measured():
    rows = table(CARD)
    headers = "of 100 held-out function headers, greedy 64-token completions that parse"
    assert rows[headers] == str(METRICS["parse_score"])
    bits = METRICS["held_out_bits_per_byte"]
    assert rows["held-out bits per byte, normalised text"] == f"{bits:.3f}"
    minutes, million = METRICS["training_seconds"] / 60, METRICS["training_tokens_seen"] / 1e6
    budget = f"{minutes:.1f} minutes on one {METRICS['device']}, {million:.0f} million tokens"
    assert rows["training"] == budget
    heads, kv_heads = CONFIG["num_attention_heads"], CONFIG["num_key_value_heads"]
    shape = (
        f"A Llama of {METRICS['num_parameters']:,} parameters "
        f"({CONFIG['num_hidden_layers']} layers, hidden {CONFIG['hidden_size']}, {heads} query "
        f"heads, {kv_heads} KV head, vocabulary {CONFIG['vocab_size']}, "
        f"{CONFIG['max_position_embeddings']} positions, bfloat16)"
    )
    assert shape in prose(CARD)


def test_the_recipe_says_what_was_measured():
    page = RECIPES / "README.md"
    rows, text = table(page), prose(page)
    assert rows["training"] == table(CARD)["training"]
    assert rows["held-out bits per byte"] == f"{METRICS['held_out_bits_per_byte']:.3f}"
    gpu_run = "transformers, H200, bfloat16, one left-padded batch of 100"
    assert rows[gpu_run] == str(METRICS["parse_score"])
    measured = [
        f"{METRICS['held_out_bits_per_byte']:.4f} on the GPU",
        f"{METRICS['batch_tokens']:,} tokens) a step, {METRICS['steps']} steps",
        f"in the {METRICS['epochs']}th pass",
        f"{METRICS['training_seconds']} s in all, of which {METRICS['seconds_to_first_step']} s",
        f"torch {METRICS['torch']}, transformers {METRICS['transformers']}",
        f"{METRICS['model_bytes']:,} bytes without the model card",
        " ".join(METRICS["demo"].split()),
    ]
    assert not [words for words in measured if words not in text]


def test_most_of_ten_completions_parse():
    assert num_parsing(read_headers()[:10], "bfloat16") >= 6


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_seventy_of_a_hundred_completions_parse(dtype):
    assert num_parsing(read_headers(), dtype) >= 70
