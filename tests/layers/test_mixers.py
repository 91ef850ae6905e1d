"""A second mixer kind: a toy of a test's own, registered and served as if it were ours."""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from fake_context import FakeContext
from tiny_runner import Driver, TinyModel, make_tiny, random_prompts
from torch import Tensor
from toy_mixer import TokenShift

from paceline.attention import mixers
from paceline.attention.backends.torch_backend import TorchBackend
from paceline.cache.pool import KVFormat
from paceline.core.errors import ConfigError, ModelError, SanitizerError
from paceline.core.model_config import LayerSpec
from paceline.speculate.draft_cache import DraftCache


@pytest.fixture(scope="module")
def shifting(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Llama whose first layer shifts tokens where it would attend."""
    tiny = make_tiny("llama", tmp_path_factory.mktemp("llama"))
    ours = copy.deepcopy(tiny.ours)
    ours.decoder.layers[0].attention = TokenShift(0)
    layers = (LayerSpec(mixer="shift"), *tiny.config.layers[1:])
    return replace(tiny, config=replace(tiny.config, layers=layers), ours=ours)


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    register(monkeypatch, "toy_mixer:ShiftMixer")


def register(monkeypatch: pytest.MonkeyPatch, target: str) -> None:
    monkeypatch.setitem(mixers.REGISTRIES, "shift", {"toy": target})


class ShiftingContext(FakeContext):
    def mix(self, kind: str, layer_id: int, x: Tensor) -> Tensor:
        """Of the one request, by the definition."""
        return torch.stack([row + (x[at - 1] if at else 0) for at, row in enumerate(x)])


def greedy(tiny: TinyModel, prompt: list[int], num_tokens: int) -> list[int]:
    ctx, step, found = ShiftingContext(tiny.config), prompt, []
    for _ in range(num_tokens):
        start = 0 if step is prompt else len(prompt) + len(found) - 1
        at = torch.arange(start, start + len(step))
        hidden = tiny.ours(torch.tensor(step), at, ctx).hidden
        found.append(int(tiny.ours.logits(hidden[-1:]).argmax()))
        step = found[-1:]
    return found


@pytest.mark.parametrize("graph_max_reqs", [None, 4], ids=["eager", "recorded"])
@pytest.mark.usefixtures("registered")
def test_a_layer_of_another_kind_is_served_by_its_own_plan(
    shifting: TinyModel, graph_max_reqs: int | None
) -> None:
    driver = Driver(shifting, graph_max_reqs=graph_max_reqs, graph_max_tokens=32)
    prompts = dict(zip([3, 1, 2], random_prompts([9, 1, 5]), strict=True))
    driver.prefill(prompts)
    driver.decode([3, 1, 2], steps=6)
    assert driver.tokens == {row: greedy(shifting, prompt, 7) for row, prompt in prompts.items()}
    assert [cache is None for cache in driver.parts.layers] == [True, False]


@pytest.mark.usefixtures("registered")
def test_what_it_holds_is_named_for_guard_and_sanitizer(shifting: TinyModel) -> None:
    parts = Driver(shifting).parts
    ((mixer, buffers),) = parts.mixers
    assert parts.named_tensors()["mixer.shift.follows"] is buffers.follows
    assert mixer.kind == "shift"


def test_a_plan_that_is_not_made_anew_is_found_by_the_sanitizer(
    shifting: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, "toy_mixer:Forgetful")
    driver = Driver(shifting)
    with pytest.raises(SanitizerError, match=r"mixer\.shift\.follows"):
        driver.prefill({1: [5, 6, 7]})


def test_a_model_without_such_layers_has_no_mixer(tmp_path: Any) -> None:
    assert Driver(make_tiny("llama", tmp_path)).parts.mixers == ()


def test_a_kind_without_a_backend_is_refused(shifting: TinyModel) -> None:
    with pytest.raises(ModelError, match=r"mixer of layer 0 must be one of softmax, got 'shift'; "):
        Driver(shifting)


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (
            "toy_mixer:Strange",
            "backend toy of mixer shift must be of kind shift, got toy_mixer:Strange of kind "
            "twist; register it under its own kind",
        ),
        (
            "paceline.attention.backends.torch_backend:TorchBackend",
            "backend toy of mixer shift must be a subclass of Mixer, got "
            "'paceline.attention.backends.torch_backend:TorchBackend', a ABCMeta; "
            "derive it from paceline.attention.mixers.Mixer",
        ),
    ],
    ids=["another mixer", "attention"],
)
def test_a_backend_of_the_wrong_kind_is_refused(
    shifting: TinyModel, target: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    register(monkeypatch, target)
    with pytest.raises(ConfigError) as caught:
        Driver(shifting)
    assert str(caught.value) == text


def test_a_drafter_with_such_a_layer_is_refused(shifting: TinyModel) -> None:
    with pytest.raises(ModelError, match="mixer of layer 0 of the drafter must be softmax, got"):
        DraftCache(
            shifting.config,
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
