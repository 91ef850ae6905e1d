"""Folders of a small target and of what may draft for it: configurations and tokenizers alone."""

import json
from dataclasses import replace
from pathlib import Path

from tokenizers import Tokenizer, models

from paceline.core.gpus import GIB, DeviceFacts, gpu_by_name
from paceline.core.model.config import ModelConfig
from paceline.core.options.asked import engine_options
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.plan.memory.demand import Demands
from paceline.plan.resolve import resolve
from paceline.plan.speculation import Speculation, plan_speculation

TARGET = {
    "model_type": "llama",
    "vocab_size": 40,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}
HEAD = TARGET | {
    "architectures": ["LlamaForCausalLMEagle3"],
    "num_hidden_layers": 1,
    "draft_vocab_size": 20,
}
SHALLOW = 8  # layers: gemma-3 has a full one behind 5 windowed, a head reads 3 of them
WORDS = {chr(ord("a") + i): i for i in range(26)}
H200 = gpu_by_name("h200")
CPU = replace(
    H200,
    name="a CPU",
    device_type="cpu",
    total_bytes=16 * GIB,
    free_bytes=8 * GIB,
    cuda_arch=None,
    cores=2,
    cpus=4,
)


def folder(path: Path, config: dict[str, object], words: dict[str, int] | None = None) -> str:
    """A folder with a configuration and, where `words` are given, a tokenizer."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if words is not None:
        Tokenizer(models.WordLevel(words, unk_token="a")).save(str(path / "tokenizer.json"))
    return str(path)


def shallow(path: Path, model: str) -> str:
    """A folder with `model` of few layers: every kind that it has, and each is rehearsed alike."""
    config = locate(model).config | {"num_hidden_layers": SHALLOW}
    if "layer_types" in config:
        config["layer_types"] = config["layer_types"][:SHALLOW]
    return folder(path, config)


def drafted(model: str, **asked: object) -> Speculation | None:
    """Who drafts for `model`; option names are given without `speculative_`."""
    options = engine_options(named(model, asked))
    source, weights = locate(model), options.load_format != "dummy"
    return plan_speculation(options, parse_config(source.config), source, weights=weights)


def planned(model: str, device=CPU, **asked: object):
    """(resolution, budget) of `model` with its drafter."""
    drafter = drafted(model, **asked)
    config = parse_config(locate(model).config)
    return resolve(named(model, asked), demands_of(config, device, drafter))


_DEMANDS: list[Demands] = []


def demands_of(
    config: ModelConfig, device: DeviceFacts, speculation: Speculation | None = None
) -> Demands:
    """One for all tests that ask of the same: it remembers what it rehearsed, and nothing else."""
    asked = config, device, speculation
    for one in _DEMANDS:
        if asked == (one.config, one.device, one.speculation):
            return one
    _DEMANDS.append(Demands(*asked))
    return _DEMANDS[-1]


def named(model: str, asked: dict[str, object]) -> dict[str, object]:
    short = {
        "algorithm": "speculative_algorithm",
        "path": "speculative_draft_model_path",
        "steps": "speculative_num_steps",
        "topk": "speculative_eagle_topk",
        "tokens": "speculative_num_draft_tokens",
        "acceptance": "speculative_acceptance",
        "ngram_min": "speculative_ngram_min",
        "ngram_max": "speculative_ngram_max",
    }
    return {"model": model} | {short.get(name, name): value for name, value in asked.items()}
