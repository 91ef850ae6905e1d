"""A drafter's fault changes no text: the prover finds it by the band the drafter is known for."""

import json
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import jsonschema
import pytest
import torch
from draft_checkpoints import save_eagle3, soften
from llm_cases import Checkpoint, make_checkpoint, random_prompts, text_of
from safetensors.torch import load_file, save_file

import paceline.llm.boot
from paceline.core.errors import ModelError
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.reverts.fixes import read_fix
from paceline.core.reverts.hook import reverted_sources
from paceline.engine.acceptance import BAND_FILE, read_band
from paceline.llm.draft_self_test import BELOW_BAND
from paceline.llm.llm import LLM
from paceline.plan.speculation import without_speculation
from paceline.proof.fixes.registry import FOLDER
from paceline.proof.lossless.contest import contenders_of
from paceline.proof.lossless.prompt_set import NamedPrompt
from paceline.proof.lossless.proof import Outcome, Proof
from paceline.proof.lossless.prove import Trial, prove
from paceline.proof.lossless.report import document, table
from paceline.speculate.draft_passes import DraftPasses

PACKAGE = FOLDER.parents[1]
SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "prove.json").read_text())
TEXTS = [text_of(prompt) for prompt in random_prompts((12, 20))]
TRIAL = Trial(prompts=(NamedPrompt(name="random 1", kind="random", text=TEXTS[0]),), max_tokens=8)
LOUD = 3.0  # beside embeddings of length 0.3


@dataclass(frozen=True)
class Pair:
    target: Checkpoint
    drafter: Path
    algorithm: str


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """An EAGLE-3 head that hears nothing but the difference of two taps, which are the same."""

    def idle(theirs):
        soften(theirs)
        layer = theirs.model.layers[1]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()

    folder = tmp_path_factory.mktemp("head")
    target = make_checkpoint("llama-gqa2-untied", folder / "target", change=idle)
    drafter = save_eagle3(target, folder / "eagle3")
    file = drafter / "model.safetensors"
    tensors = load_file(file)
    one = torch.eye(target.theirs.config.hidden_size)
    tensors["fc.weight"] = torch.cat((-one, one, 0 * one), dim=1)
    tensors["midlayer.hidden_norm.weight"].fill_(LOUD)
    save_file(tensors, file)
    _save_band(drafter, least=1.4)
    return Pair(target, drafter, "EAGLE3")


@pytest.fixture(scope="module")
def itself(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    """A model that drafts for itself: every draft is right."""
    folder = tmp_path_factory.mktemp("itself")
    target = make_checkpoint("llama-gqa2-untied", folder)
    _save_band(folder, least=3.5)
    return Pair(target, folder, "STANDALONE")


def _save_band(folder: Path, *, least: float) -> None:
    band = {"prompts": TEXTS, "max_tokens": 33, "num_steps": 3, "tokens_per_round": least + 0.2}
    (folder / BAND_FILE).write_text(json.dumps(band | {"least_tokens_per_round": least}))


def proof_of(pair: Pair) -> Proof:
    asked = {
        "model": str(pair.target.folder),
        "threads": 1,
        "max_num_seqs": 2,
        "speculative_algorithm": pair.algorithm,
        "speculative_draft_model_path": str(pair.drafter),
    }
    return prove(without_speculation(asked), contenders_of(asked, None), TRIAL)


def reverted(fix_id: str) -> ModuleType:
    """The module that a fix switch edits, with the bug in it, beside the real one."""
    fix = read_fix(FOLDER, fix_id)
    ((name, source),) = reverted_sources([fix], package=PACKAGE).items()
    module = ModuleType(name)
    exec(compile(source, name, "exec"), vars(module))
    return module


@pytest.fixture
def reached(monkeypatch):
    """What tests at boot said."""
    found, check = [], paceline.llm.boot.check_drafter

    def checked(*given, **limits):
        found.append(check(*given, **limits))
        return found[-1]

    monkeypatch.setattr(paceline.llm.boot, "check_drafter", checked)
    return found


@pytest.mark.parametrize("pair", ["head", "itself"])
def test_a_drafter_as_it_was_made_lies_within_its_band(pair, request, reached):
    proof = proof_of(request.getfixturevalue(pair))
    band = proof.contests[0].band
    assert band is not None
    assert not band.has_collapsed, table(proof)
    assert proof.outcome is Outcome.EQUAL
    assert ", within: at least " in table(proof)
    assert reached == [True]


def test_a_wrong_tap_is_a_collapse(head, monkeypatch, reached):
    wrong = reverted("tap-one-layer-early").tap_names
    monkeypatch.setattr("paceline.speculate.eagle.drafter.tap_names", wrong)
    assert_collapse(proof_of(head))
    assert reached == [False]


def test_frozen_positions_of_drafts_are_a_collapse(itself, monkeypatch):
    wrong = reverted("draft-positions-not-advanced").DraftPasses.begin
    monkeypatch.setattr(DraftPasses, "begin", wrong)
    assert_collapse(proof_of(itself))


def assert_collapse(proof: Proof) -> None:
    """The texts are equal all the same."""
    (contest,) = proof.contests
    assert all(comparison.divergence_rate == 0 for comparison in contest.comparisons)
    assert contest.band is not None
    assert contest.band.has_collapsed, table(proof)
    assert proof.outcome is Outcome.COLLAPSE
    assert proof.exit_code == 1
    assert "COLLAPSED: at least" in table(proof)
    assert "; at boot: the drafter reaches " in table(proof)
    assert document(proof)["contests"][0]["band"]["detail"] == contest.band.detail
    jsonschema.validate(document(proof), SCHEMA)


def test_a_context_too_short_for_the_band_is_served_without_the_test_at_boot(itself, reached):
    """Whatever the band says: here no drafter would reach it."""
    _save_band(itself.drafter, least=9.0)
    asked = {
        "model": str(itself.target.folder),
        "threads": 1,
        "speculative_algorithm": itself.algorithm,
        "speculative_draft_model_path": str(itself.drafter),
        "max_model_len": 16,
    }
    try:
        with LLM(**asked) as llm:
            (output,) = llm.generate([TEXTS[0]], SamplingParams(temperature=0.0, ignore_eos=True))
            assert output.metrics.rounds > 0
            assert BELOW_BAND not in {event["reason"] for event in llm.report()["events"]}
        assert reached == [None]
    finally:
        _save_band(itself.drafter, least=3.5)


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"prompts": []}',
        '{"prompts": 3, "max_tokens": 1}',
        '{"prompts": "def f(x):", "max_tokens": 9, "num_steps": 3, "tokens_per_round": 2, '
        '"least_tokens_per_round": 1}',
        '{"prompts": [], "max_tokens": 9, "num_steps": 3, "tokens_per_round": 2, '
        '"least_tokens_per_round": 1}',
        '{"prompts": ["x"], "max_tokens": 0, "num_steps": 3, "tokens_per_round": 2, '
        '"least_tokens_per_round": 1}',
    ],
)
def test_a_band_that_cannot_be_read_is_an_error(tmp_path, text):
    (tmp_path / BAND_FILE).write_text(text)
    with pytest.raises(ModelError, match=r"acceptance band of the drafter in .* must be prompts, "):
        read_band(tmp_path)


def test_a_drafter_without_a_band_has_none(tmp_path):
    assert read_band(tmp_path) is None
