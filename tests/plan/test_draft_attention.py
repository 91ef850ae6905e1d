"""The attention backend of an engine that drafts: rounds, trees and the drafter's own layers."""

from dataclasses import replace
from pathlib import Path

import draft_models
import pytest
from draft_models import CPU, H200, HEAD, TARGET, drafted, folder, planned

from paceline.attention import registry
from paceline.attention.contract import GraphSupport
from paceline.attention.registry import load_backend
from paceline.core.errors import BackendUnsupported
from paceline.core.gpus import DeviceFacts
from paceline.models.config import parse_config
from paceline.models.locate import locate
from paceline.plan.attention_choice import PhaseChoice, one_backend, phase_choices

WIDE = TARGET | {"hidden_size": 256, "head_dim": 64}


@pytest.fixture(autouse=True)
def every_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing that was rehearsed without them is remembered."""
    monkeypatch.setattr(registry, "AUTO_PACKAGES", {})
    monkeypatch.setattr(draft_models, "_DEMANDS", [])


@pytest.fixture
def target(tmp_path: Path) -> str:
    return folder(tmp_path / "target", WIDE | {"torch_dtype": "bfloat16"})


def phases(model: str, device: DeviceFacts = H200, **asked: object) -> tuple[PhaseChoice, ...]:
    options = planned(model, device, load_format="dummy", **asked)[0].options
    drafter = drafted(model, load_format="dummy", **asked)
    return phase_choices(parse_config(locate(model).config), options, device, drafter)


def chosen(model: str, **asked: object) -> str:
    return one_backend(phases(model, **asked)).name


def test_a_chain_takes_the_causal_path_of_any_backend(target: str) -> None:
    assert chosen(target, algorithm="NGRAM", attention_backend="fa4") == "fa4"


def test_a_tree_runs_by_cascade_where_the_backend_has_no_tree_mask(target: str) -> None:
    asked = {"algorithm": "NGRAM", "topk": 2, "attention_backend": "fa4"}
    found = phases(target, **asked)
    assert [choice.backend for choice in found] == ["fa4", "cascade(fa4)"]
    assert one_backend(found).name == "cascade(fa4)"
    assert "fa4 has no tree mask, so trees run by cascade" in one_backend(found).why
    assert chosen(target, **asked | {"attention_backend": "triton"}) == "triton"


def test_the_layers_of_the_draft_model_must_be_served_too(target: str, tmp_path: Path) -> None:
    head = folder(tmp_path / "head", HEAD | {"hidden_size": 256, "head_dim": 256})
    asked = {"path": head, "algorithm": "EAGLE3", "attention_backend": "fa4"}
    found = phases(target, **asked)
    with pytest.raises(BackendUnsupported) as caught:
        one_backend(found)
    assert "layers of the draft model: head dim must be [64, 80, 96, 128], got 256" in str(
        caught.value
    )
    assert chosen(target, **asked | {"attention_backend": "triton"}) == "triton"


def test_reasons_that_both_models_share_are_told_once(target: str, tmp_path: Path) -> None:
    head = folder(tmp_path / "head", HEAD | {"hidden_size": 256, "head_dim": 64})
    found = phases(target, path=head, algorithm="EAGLE3", attention_backend="torch")
    with pytest.raises(BackendUnsupported) as caught:
        one_backend(found)
    assert caught.value.reasons == ["device must be cpu, got cuda"]


def test_auto_avoids_a_backend_that_would_wait_for_every_round(target: str) -> None:
    found = phases(target, algorithm="NGRAM")
    assert all(
        choice.rejected["flashinfer"]
        == ["it plans on the host, which would wait for the outputs of every round"]
        for choice in found
    )
    assert chosen(target, algorithm="NGRAM", attention_backend="flashinfer") == "flashinfer"


def test_rounds_are_captured_only_by_backends_that_hold_uniform_steps(
    target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fa4 = type(load_backend("fa4"))
    monkeypatch.setattr(fa4, "capabilities", replace(fa4.capabilities, graph=GraphSupport.DECODE))
    asked = {"algorithm": "NGRAM", "attention_backend": "fa4"}
    with pytest.raises(BackendUnsupported, match=r"(?s)graph.*--enforce-eager"):
        chosen(target, **asked)
    assert chosen(target, **asked, enforce_eager=True) == "fa4"
    assert chosen(target, **asked | {"algorithm": "off"}) == "fa4"


def test_the_budget_counts_what_attention_of_the_draft_model_holds(
    target: str, tmp_path: Path
) -> None:
    draft = folder(tmp_path / "draft", WIDE | {"num_hidden_layers": 2, "torch_dtype": "bfloat16"})

    def workspace(**asked: object) -> int:
        shared = {"load_format": "dummy", "max_num_seqs": 8, "attention_backend": "flashinfer"}
        return planned(target, H200, **shared, **asked)[1].workspace_bytes

    alone = workspace(algorithm="NGRAM")
    held = [workspace(path=draft, steps=steps) - alone for steps in (1, 5)]
    assert held[1] > 2.5 * held[0]  # 2 and 6 passes, and each is planned before the round


def test_a_cpu_drafts_too(target: str) -> None:
    assert one_backend(phases(target, CPU, algorithm="NGRAM", topk=2)).name == "torch"
