"""Who runs the layers that mix otherwise than by attention, and what is refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from example_state_backend import PART, SumBackend
from tiny_runner import make_tiny

from paceline.attention import mixers
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.cache.pool import KVFormat
from paceline.core.errors import ConfigError, ModelError
from paceline.core.model_config import Heads, LayerSpec, RowPart
from paceline.speculate.draft_cache import DraftCache

ATTENDS = LayerSpec(heads=Heads(2, 1, 8, 8))
SUMS = LayerSpec(mixer="sum", state=(RowPart(PART, (3,)),))


class Halving(SumBackend):
    def __init__(self) -> None:
        super().__init__(0.5)


class Strange(Halving):
    kind = "twist"


def register(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setitem(mixers.REGISTRIES, "sum", {"ours": target})


def test_one_backend_runs_all_layers_of_a_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, f"{__name__}:Halving")
    found = mixers.load_mixers([ATTENDS, SUMS, SUMS])
    assert list(found) == ["sum"]
    assert type(found["sum"]).__name__ == "Halving"


def test_a_model_that_attends_alone_has_none() -> None:
    assert mixers.load_mixers([ATTENDS, ATTENDS]) == {}


def test_a_kind_without_a_backend_is_refused() -> None:
    with pytest.raises(ModelError, match=r"mixer of layer 1 must be one of softmax, got 'sum'; "):
        mixers.load_mixers([ATTENDS, SUMS])


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            f"{__name__}:Strange",
            f"backend ours of mixer sum must be of kind sum, got {__name__}:Strange of kind "
            "twist; register it under its own kind",
        ),
        (
            "paceline.attention.backends.torch_backend:TorchBackend",
            "backend ours of mixer sum must be a subclass of StateBackend, got "
            "'paceline.attention.backends.torch_backend:TorchBackend', a ABCMeta; "
            "derive it from paceline.attention.states.StateBackend",
        ),
    ],
    ids=["another mixer", "attention"],
)
def test_a_backend_of_the_wrong_kind_is_refused(
    target: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, target)
    with pytest.raises(ConfigError) as caught:
        mixers.load_mixers([SUMS])
    assert str(caught.value) == text


@pytest.mark.parametrize(
    ("layer", "got"),
    [
        (SUMS, "sum, whose cache group is of kind state"),
        (LayerSpec(reads_encoder=True), "softmax, whose cache group is of kind encoder"),
    ],
)
def test_a_drafter_with_such_a_layer_is_refused(layer: LayerSpec, got: str, tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path)
    with pytest.raises(
        ModelError,
        match=f"mixer of layer 0 of the drafter must be softmax over its own tokens, got {got}",
    ):
        DraftCache(
            replace(tiny.config, layers=(layer,)),
            (),
            (),
            TorchBackend(),
            max_reqs=1,
            max_tokens=1,
            length=1,
            num_passes=1,
            kv=KVFormat(dtype=torch.float32),
            dtype=torch.float32,
            device=torch.device("cpu"),
            sinks=(),
        )
