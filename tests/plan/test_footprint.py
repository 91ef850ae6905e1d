"""The budget's formulas are upper bounds of what is really allocated."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.core.sampling_params import SamplerTier
from paceline.layers.sampling import sample
from paceline.layers.sampling.table import SamplingTable
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM
from paceline.models.config import parse_config
from paceline.plan.footprint import SAMPLER_PEAK, activation_bytes
from paceline.runner.graphs import AHEAD

GEMMA = {
    "model_type": "gemma3_text",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": 16,
    "max_position_embeddings": 512,
    "torch_dtype": "float32",
}


class Allocations(TorchDispatchMode):
    """Bytes of the storages that operators return: alive at most, and in all."""

    def __init__(self):
        super().__init__()
        self._live = {}
        self.peak, self.total = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            if isinstance(value, torch.Tensor):
                self._note(value.untyped_storage())
        return result

    def _note(self, storage):
        key = storage._cdata
        if key not in self._live:
            self._live[key] = storage.nbytes()
            self.total += storage.nbytes()
            self.peak = max(self.peak, sum(self._live.values()))
            weakref.finalize(storage, self._live.pop, key, None)


@pytest.mark.parametrize(("vocab_size", "history"), [(20_000, 64), (500, 20_000)])
def test_the_widest_sampler_stays_within_its_bound(vocab_size, history):
    rows = 4
    with Allocations() as seen:
        sample(
            torch.randn(rows, vocab_size),
            rows=torch.arange(1, rows + 1),
            positions=torch.ones(rows, dtype=torch.int64),
            table=SamplingTable(rows + 1, torch.device("cpu")),
            token_ids=torch.zeros(rows + 1, history, dtype=torch.int32),
            tier=SamplerTier.PLUG_INS,
            top_logprobs=20,
        )
    bound = SAMPLER_PEAK.of(rows, vocab_size, history)
    assert 0.5 * bound < seen.peak <= bound


@pytest.fixture
def gemma(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA))
    return str(tmp_path)


LLAMA = {
    "model_type": "llama",
    "vocab_size": 200,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "torch_dtype": "bfloat16",
}


@pytest.mark.parametrize("changes", [{}, {"model_type": "gemma2", "head_dim": 32}])
def test_the_activations_of_a_long_prompt_stay_within_their_bound(changes, tmp_path):
    config = LLAMA | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    prompt = [3] * 1000
    with LLM(str(tmp_path), load_format="dummy", threads=1, enforce_eager=True) as llm:
        with Allocations() as seen:
            llm.generate([prompt], {"max_tokens": 1, "temperature": 0.0})
        report = llm.report()
    element = 2 if report["options"]["dtype"]["value"] == "bfloat16" else 4
    bound = activation_bytes(parse_config(config), len(prompt), element)
    standing = report["memory"]["measured"]["workspace"]  # operators return some of it too
    assert 0.7 * bound < seen.peak <= bound + standing < 1.2 * bound


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("model", ["bundled", "gemma"])
def test_what_is_measured_after_loading_was_planned(model, page_size, request):
    options = {"max_num_seqs": 3, "page_size": page_size, "threads": 1, "load_format": "dummy"}
    folder = model if model == "bundled" else request.getfixturevalue(model)
    with LLM(folder, max_num_batched_tokens=64, knobs=Knobs(capture=AHEAD), **options) as llm:
        memory = llm.report()["memory"]
        planned, measured = memory["planned"], memory["measured"]
        assert measured["weights"] == planned["weights_bytes"]
        assert measured["KV"] == planned["kv_bytes"]
        assert 0.5 * planned["workspace_bytes"] < measured["workspace"]
        assert measured["workspace"] <= planned["workspace_bytes"]
        assert measured["graphs"] <= planned["graphs_bytes"] <= 2 * measured["graphs"]
        rows = [line.split()[0] for line in llm.memory_table().splitlines()[1:]]
        assert rows[:2] == ["weights", "KV"]


def test_a_pair_of_backends_was_planned_for_both():
    sizes = {}
    for backend in ("torch", "torch+torch"):
        asked = {"attention_backend": backend, "max_num_seqs": 3, "enforce_eager": True}
        with LLM("bundled", threads=1, load_format="dummy", **asked) as llm:
            memory = llm.report()["memory"]
            sizes[backend] = memory["measured"]["workspace"]
            assert sizes[backend] <= memory["planned"]["workspace_bytes"]
    assert sizes["torch+torch"] > sizes["torch"]


def test_graphs_of_every_sampler_stay_within_the_plan():
    samplers = [
        {"temperature": temperature, "presence_penalty": penalty, "logprobs": logprobs}
        for temperature in (0.0, 1.0)
        for penalty in (0.0, 1.0)
        for logprobs in (None, 20)
    ]
    with LLM("bundled", max_num_seqs=4, threads=1, knobs=Knobs(capture=AHEAD)) as llm:
        for params in samplers:
            for batch in (1, 4):  # the least and the most; a plan is by the most
                llm.generate([[5, 6, 7]] * batch, {"max_tokens": 4, **params})
        planned = llm.report()["memory"]["planned"]["graphs_bytes"]
        assert 0 < llm.engine._runner._graphs.bytes_used <= planned


def test_the_table_is_logged_after_loading(caplog):
    with caplog.at_level("DEBUG", "paceline"), LLM("bundled", threads=1, load_format="dummy"):
        assert "memory, planned and measured" in caplog.text
        assert "measured" in caplog.text
