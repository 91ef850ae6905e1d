"""The prover: equal engines are found equal, and each kind of fault is named."""

import json
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner
from llm_cases import Checkpoint, make_checkpoint

from paceline.cli.app import app
from paceline.core.errors import ConfigError
from paceline.plan.speculation import without_speculation
from paceline.proof.lossless import prove as prove_module
from paceline.proof.lossless.contest import Contestant, contenders_of
from paceline.proof.lossless.prompt_set import NamedPrompt
from paceline.proof.lossless.proof import Outcome, Proof
from paceline.proof.lossless.prove import Trial, prove
from paceline.proof.lossless.report import document, table
from paceline.runner.program import StepProgram

SCHEMA = json.loads((Path(__file__).parents[3] / "docs" / "schemas" / "prove.json").read_text())
CHAIN = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3}
TREE = CHAIN | {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 6}
SMALL_TREE = TREE | {"speculative_num_steps": 2, "speculative_num_draft_tokens": 4}
TRIAL = Trial(
    prompts=(
        NamedPrompt(name="loop 1", kind="loop", text="acadacadacadacad"),
        NamedPrompt(name="other 2", kind="other", text="bebiqubyfafeaxbccb"),
    ),
    max_tokens=16,
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Four layers in two cache groups."""
    case = "gemma2-soft-caps-alternating-windows"
    return make_checkpoint(case, tmp_path_factory.mktemp("gemma2"))


def asked(model: Checkpoint, **options: object) -> dict[str, object]:
    return {"model": str(model.folder), "threads": 1, "max_num_seqs": 4, **options}


def proof_of(model: Checkpoint, **options: object) -> Proof:
    """Of a drafter."""
    wanted = asked(model, **options)
    plain = without_speculation({k: v for k, v in wanted.items() if k != "attention_backend"})
    return prove(plain, contenders_of(wanted, None), TRIAL)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_that_leave_the_text_alone_are_equal(model, shape):
    proof = proof_of(model, **shape)
    (contest,) = proof.contests
    assert proof.outcome is Outcome.EQUAL
    assert proof.exit_code == 0
    assert contest.fault is None
    for comparison in contest.comparisons:
        assert comparison.divergence_rate == 0
        assert comparison.acceptance.rounds > 0
    assert contest.comparisons[0].acceptance.mean_tokens_per_round > 1
    jsonschema.validate(document(proof), SCHEMA)


@pytest.mark.parametrize(("layer", "shape"), [(0, CHAIN), (3, SMALL_TREE)], ids=["chain", "tree"])
def test_a_fault_of_rounds_in_one_layer_is_found_there(model, layer, shape):
    proof = proof_of(model, **shape, attention_backend=f"layer_faults:RoundFault{layer}")
    (contest,) = proof.contests
    assert proof.outcome is Outcome.BUG
    assert proof.exit_code == 1
    assert contest.fault is not None
    assert contest.fault.layer == layer, contest.fault
    kind = "chain" if shape is CHAIN else "tree"
    assert f"computed as a {kind} of 4 rows; as a prompt it agrees" in contest.fault.detail
    jsonschema.validate(document(proof), SCHEMA)
    assert f"layer {layer} differs by" in table(proof)


def test_a_fault_of_decoding_in_one_layer_is_found_there(model, tmp_path):
    prompts = tmp_path / "prompts.toml"
    prompts.write_text('[[prompt]]\nkind = "loop"\ntext = "acadacadacadacad"\n')
    words = ["prove", str(model.folder), "--threads", "1", "--prompts", str(prompts)]
    words += ["--against", "layer_faults:DecodeFault2", "--max-tokens", "12"]
    done = CliRunner().invoke(app, [*words, "--speculative-algorithm", "off", "--json"])
    assert done.exit_code == 1, done.output
    told = json.loads(done.stdout)
    jsonschema.validate(told, SCHEMA)
    (contest,) = told["contests"]
    assert contest["label"] == "attention layer_faults:DecodeFault2"
    assert contest["fault"]["layer"] == 2
    assert [each["bug"] for each in contest["comparisons"]] == [0, 1]


def test_weights_that_differ_are_found_where_they_do_and_as_a_prompt_too(model, tmp_path):
    def change(theirs):
        theirs.model.layers[1].mlp.down_proj.weight.neg_()

    case = "gemma2-soft-caps-alternating-windows"
    other = make_checkpoint(case, tmp_path, change=change)
    contender = Contestant(label="weights", options=asked(other), speculation=None)
    proof = prove(asked(model), [contender], TRIAL)
    fault = proof.contests[0].fault
    assert fault is not None
    assert fault.layer == 1
    assert "so it does as a prompt" in fault.detail or "computed as a prompt" in fault.detail


def test_a_draft_that_nobody_verified_is_a_bug_of_no_layer(model, monkeypatch):
    """The first draft of a round is emitted, whatever was sampled."""
    right = StepProgram._commit

    def unverified(self, sampled, tree):
        if tree is not None:
            sampled.token_ids.view(tree.tokens.shape)[:, 0] = tree.tokens[:, 1]
        return right(self, sampled, tree)

    plain = without_speculation(asked(model))
    contenders = contenders_of(asked(model, **CHAIN), None)
    with monkeypatch.context() as patch:
        patch.setattr(StepProgram, "_commit", unverified)
        proof = prove(plain, contenders, TRIAL)
    fault = proof.contests[0].fault
    assert proof.exit_code == 1
    assert fault is not None
    assert fault.layer is None
    assert "look at what is sampled, accepted and committed" in fault.detail


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"speculative_algorithm": "off"}, "what to compare must be a drafter or another"),
        ({"force_accept_len": 2.0, **CHAIN}, "--force-accept-len must be left out, got 2.0"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size must be 1: what parts .* got 2"),
        ({"speculative_acceptance": "rejection"}, "which alone promises equal text, got rejection"),
    ],
)
def test_what_cannot_be_compared_is_refused(model, options, text):
    with pytest.raises(ConfigError, match=text):
        contenders_of(asked(model, **options), None)


def test_without_a_drafter_of_its_own_a_model_is_proven_with_prompt_lookup(model):
    (contender,) = contenders_of(asked(model), None)
    assert contender.speculation is not None
    assert contender.speculation.drafter.algorithm == "NGRAM"


def test_a_drafter_and_a_backend_are_compared_apart_and_together(model):
    found = contenders_of(asked(model, **CHAIN), "torch")
    labels = ["speculation", "attention torch", "speculation, attention torch"]
    assert [each.label for each in found] == labels
    assert [each.speculation is None for each in found] == [False, True, False]


def test_ctrl_c_leaves_the_contenders_that_were_judged(model, monkeypatch):
    contenders = [
        Contestant(label=label, options=asked(model), speculation=None) for label in ("one", "two")
    ]
    judge = prove_module._compare

    def interrupted(standing, *facts):
        if standing.contender.label == "two":
            raise KeyboardInterrupt
        judge(standing, *facts)

    monkeypatch.setattr(prove_module, "_compare", interrupted)
    proof = prove(asked(model), contenders, TRIAL)
    told = document(proof)
    jsonschema.validate(told, SCHEMA)
    assert [contest["label"] for contest in told["contests"]] == ["one"]
    assert told["interrupted"]
