"""What a running engine holds and takes is what was planned."""

import json
import weakref
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from paceline.llm import boot
from paceline.llm.boot import Knobs
from paceline.llm.draft_self_test import check_drafter
from paceline.llm.llm import LLM
from paceline.runner.recording.graphs import AHEAD

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
def test_a_long_prompt_takes_no_more_than_was_planned(changes, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | changes))
    with LLM(str(tmp_path), load_format="dummy", threads=1, enforce_eager=True) as llm:
        with Allocations() as seen:
            llm.generate([[3] * 1000], {"max_tokens": 1, "temperature": 0.0})
        memory = llm.report()["memory"]
    planned, standing = memory["planned"]["activations_bytes"], memory["measured"]["workspace"]
    assert 0.2 * planned < seen.peak <= planned + standing  # operators return some of it too


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
        assert measured["workspace"] == planned["workspace_bytes"]
        assert measured["graphs"] <= planned["graphs_bytes"] <= 1.02 * measured["graphs"]
        rows = [line.split()[0] for line in llm.memory_table().splitlines()[1:]]
        assert rows[:2] == ["weights", "KV"]


def test_a_pair_of_backends_was_planned_for_both():
    sizes = {}
    for backend in ("torch", "torch+torch"):
        asked = {"attention_backend": backend, "max_num_seqs": 3, "enforce_eager": True}
        with LLM("bundled", threads=1, load_format="dummy", **asked) as llm:
            memory = llm.report()["memory"]
            sizes[backend] = memory["measured"]["workspace"]
            assert sizes[backend] == memory["planned"]["workspace_bytes"]
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


def test_every_graph_of_the_bundled_model_fits_the_plan(monkeypatch):
    """Its self-test at boot, of rounds that no request is served with, asks for none."""
    monkeypatch.setattr(boot, "check_drafter", check_drafter)  # whoever booted it before
    with LLM("bundled", threads=1) as llm:
        assert llm.engine._runner.graphs_captured == 0
        for batch in (1, 3):
            params = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
            llm.generate([[5, 6, 7]] * batch, params)
        kinds = {graph.is_round for graph in llm.engine._runner._graphs.graphs}
        assert kinds == {True, False}
        assert not llm.report()["events"]


def test_the_table_is_logged_after_loading(caplog):
    with caplog.at_level("DEBUG", "paceline"), LLM("bundled", threads=1, load_format="dummy"):
        assert "memory, planned and measured" in caplog.text
        assert "measured" in caplog.text
