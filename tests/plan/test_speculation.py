"""Who drafts, how deep and how wide, and what is refused before a weight is read."""

import json
from pathlib import Path

import pytest
from draft_models import HEAD, TARGET, WORDS, drafted, folder, planned

from paceline.core.errors import ConfigError, ModelError
from paceline.core.options.asked import engine_options
from paceline.models.config import parse_config
from paceline.models.locate import BUNDLED_FOLDER, locate
from paceline.plan.explain import explain_model
from paceline.plan.speculation import plan_speculation, without_speculation
from paceline.proof.lossless.drafting import with_drafter
from paceline.speculate.eagle import drafter
from paceline.speculate.eagle.drafter import EagleDrafter
from paceline.speculate.ngram.drafter import NgramDrafter


@pytest.fixture
def target(tmp_path: Path) -> str:
    return folder(tmp_path / "target", TARGET, WORDS)


@pytest.fixture
def head(tmp_path: Path) -> str:
    return folder(tmp_path / "head", HEAD)


@pytest.fixture
def bundled_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A head for the bundled model, wherever the package has one."""
    config = json.loads((BUNDLED_FOLDER / "config.json").read_text())
    config |= {"num_hidden_layers": 1, "draft_vocab_size": 2048}
    path = Path(folder(tmp_path / "eagle3", config))
    monkeypatch.setattr(drafter, "BUNDLED_HEAD", path)
    return path


def shape_of(model: str, **asked: object) -> tuple[int, int, int]:
    plan = drafted(model, **asked)
    assert plan is not None
    return plan.shape.num_steps, plan.shape.topk, plan.shape.num_draft_tokens


def refusal(model: str, **asked: object) -> str:
    with pytest.raises((ConfigError, ModelError)) as caught:
        drafted(model, **asked)
    return str(caught.value)


def test_nobody_drafts_unless_asked(target):
    assert drafted(target) is None
    resolution, _ = planned(target)
    assert resolution.options.speculative_algorithm == "off"
    assert resolution.origins["speculative_algorithm"].startswith("chosen: unasked")


def test_the_bundled_model_takes_its_own_head_and_says_so(bundled_head):
    plan = drafted("bundled")
    assert plan is not None
    assert plan.drafter.algorithm == "EAGLE3"
    assert plan.drafter.source is not None
    assert plan.drafter.source.folder == bundled_head
    assert plan.drafter.taps == ("layer.1", "layer.5", "layer.8")
    resolution, _ = planned("bundled")
    assert resolution.options.speculative_algorithm == "EAGLE3"
    assert resolution.options.speculative_draft_model_path == "bundled"
    assert resolution.origins["speculative_algorithm"] == "chosen: the bundled model has a head"


@pytest.mark.parametrize(
    "asked",
    [
        {"algorithm": "off"},
        {"load_format": "dummy"},
        {"max_num_batched_tokens": 3},
        {"max_num_batched_tokens": 15, "max_num_seqs": 4},
    ],
)
def test_the_bundled_head_stands_back_where_it_cannot_help(bundled_head, asked):
    assert drafted("bundled", **asked) is None


def test_asked_for_by_name_the_bundled_head_is_found_too(bundled_head):
    for asked in ({"algorithm": "EAGLE3"}, {"algorithm": "EAGLE3", "path": "bundled"}):
        plan = drafted("bundled", **asked)
        assert plan is not None
        assert plan.drafter.source is not None
        assert plan.drafter.source.folder == bundled_head
        assert plan.drafter.source.name == "bundled/eagle3"


@pytest.mark.parametrize("word", ["EAGLE3", "eagle3", "auto"])
def test_a_draft_head_is_told_by_its_configuration(target, head, word):
    plan = drafted(target, algorithm=word, path=head)
    assert plan is not None
    assert plan.drafter.algorithm == "EAGLE3"
    assert isinstance(plan.drafter, EagleDrafter)
    assert plan.drafter.model is plan.drafter.head.layer
    assert plan.drafter.vocab_size == 20
    assert [group.name for group in plan.drafter.groups(16)] == ["draft-full"]
    assert plan.drafter.groups(16)[0].next_token


def test_a_whole_draft_model_is_told_by_its_layers(target, tmp_path):
    draft = folder(tmp_path / "draft", TARGET | {"num_hidden_layers": 2}, WORDS)
    plan = drafted(target, path=draft)
    assert plan is not None
    assert plan.drafter.algorithm == "STANDALONE"
    assert plan.drafter.taps == ()
    assert not plan.drafter.groups(16)[0].next_token
    assert plan.drafter.model.num_layers == 2


def test_a_draft_model_of_one_layer_must_be_named(target, tmp_path):
    draft = folder(tmp_path / "draft", TARGET | {"num_hidden_layers": 1}, WORDS)
    text = refusal(target, path=draft)
    assert "speculative_algorithm must be named for a draft model of one layer" in text
    assert "add --speculative-algorithm EAGLE, or STANDALONE" in text
    for algorithm in ("EAGLE", "STANDALONE"):
        plan = drafted(target, path=draft, algorithm=algorithm)
        assert plan is not None
        assert plan.drafter.algorithm == algorithm


@pytest.mark.parametrize(
    ("asked", "shape"),
    [
        ({}, (3, 1, 4)),
        ({"steps": 5}, (5, 1, 6)),
        ({"tokens": 8}, (7, 1, 8)),
        ({"topk": 4}, (3, 4, 8)),
        ({"topk": 2}, (3, 2, 4)),
        ({"topk": 2, "steps": 5}, (5, 2, 6)),
        ({"topk": 8, "steps": 1}, (1, 8, 9)),
        ({"topk": 4, "steps": 5, "tokens": 8}, (5, 4, 8)),
    ],
)
def test_the_shape_follows_from_what_was_asked(target, head, asked, shape):
    assert shape_of(target, algorithm="EAGLE3", path=head, **asked) == shape


@pytest.mark.parametrize(
    ("asked", "shape"),
    [({}, (5, 1, 6)), ({"topk": 2, "steps": 3}, (3, 2, 7)), ({"tokens": 4}, (3, 1, 4))],
)
def test_prompt_lookup_drafts_whole_chains(target, asked, shape):
    assert shape_of(target, algorithm="NGRAM", **asked) == shape


@pytest.mark.parametrize(
    ("asked", "lengths"),
    [
        ({}, (2, 4)),
        ({"ngram_min": 6}, (6, 6)),
        ({"ngram_max": 1}, (1, 1)),
        ({"ngram_min": 1, "ngram_max": 9}, (1, 9)),
    ],
)
def test_lengths_of_prompt_lookup_never_cross(target, asked, lengths):
    plan = drafted(target, algorithm="NGRAM", **asked)
    assert plan is not None
    assert isinstance(plan.drafter, NgramDrafter)
    assert plan.drafter.lengths == lengths
    assert plan.drafter.model is None
    assert plan.drafter.groups(16) == ()


def test_forced_acceptance_is_named_forced(target):
    plan = drafted(target, algorithm="NGRAM", force_accept_len=2.5)
    assert plan is not None
    assert "FORCED to 2.5 tokens per round" in str(plan)
    assert plan.to_json()["forced_tokens_per_round"] == 2.5


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            {"algorithm": "EAGLE3"},
            "speculative_draft_model_path must be a draft model for EAGLE3: a hub id, a folder, "
            "or a shape, got none; add --speculative-draft-model-path, or name NGRAM, which needs "
            "none",
        ),
        (
            {"algorithm": "NGRAM", "path": "bundled"},
            "speculative_draft_model_path must be left out: NGRAM has no draft model, got bundled",
        ),
        (
            {"algorithm": "off", "steps": 2},
            "speculative_num_steps must be left out with --speculative-algorithm off, got 2; "
            "remove --speculative-num-steps, or name a drafter with --speculative-algorithm",
        ),
        ({"topk": 4}, "speculative_eagle_topk must be left out where nobody drafts, got 4"),
        (
            {"force_accept_len": 2.0},
            "force_accept_len must be left out where nobody drafts, got 2.0",
        ),
        (
            {"algorithm": "NGRAM", "topk": 0},
            "speculative_eagle_topk must be from 1 to 16, got 0",
        ),
        (
            {"algorithm": "NGRAM", "steps": 65},
            "speculative_num_steps must be from 1 to 64 tokens, got 65",
        ),
        (
            {"algorithm": "NGRAM", "topk": 17},
            "speculative_eagle_topk must be from 1 to 16, got 17",
        ),
        (
            {"algorithm": "NGRAM", "tokens": 1},
            "speculative_num_draft_tokens must be from 2 to 256 tokens, got 1",
        ),
        (
            {"algorithm": "NGRAM", "tokens": 66},
            "speculative_num_steps must be from 1 to 64, got 65; lower "
            "--speculative-num-draft-tokens, or raise --speculative-eagle-topk",
        ),
        (
            {"algorithm": "NGRAM", "steps": 3, "tokens": 5},
            "speculative_num_draft_tokens must be 4 (a chain of 3 and its root), got 5",
        ),
        (
            {"algorithm": "NGRAM", "steps": 3, "topk": 2, "tokens": 8},
            "speculative_num_draft_tokens must be at most 7: a root, and 2 chains of 3, which do "
            "not branch again, got 8; lower --speculative-num-draft-tokens",
        ),
        (
            {"algorithm": "NGRAM", "ngram_min": 5, "ngram_max": 3},
            "speculative_ngram_min must be at most 3, the longest, got 5; lower",
        ),
        (
            {"algorithm": "NGRAM", "acceptance": "rejection"},
            "speculative_acceptance must be sample_and_match with NGRAM, whose drafts have no "
            "probabilities, got rejection; leave --speculative-acceptance out",
        ),
        (
            {"algorithm": "NGRAM", "force_accept_len": 6.5},
            "force_accept_len must be from 1 to 6: a path of 5 drafts and the token behind it, got "
            "6.5; lower --force-accept-len or raise --speculative-num-steps",
        ),
        (
            {"algorithm": "NGRAM", "topk": 4, "tokens": 3, "force_accept_len": 4},
            "force_accept_len must be from 1 to 3: a path of 2 drafts and the token behind it",
        ),
        ({"algorithm": "NGRAM", "force_accept_len": 0.5}, "force_accept_len must be at least 1"),
        (
            {"algorithm": "STANDALONE", "path": "llama-3.1-8b"},
            "speculative_draft_model_path must be a draft model with weights, got llama-3.1-8b, a "
            "shape; add --load-format dummy, or name a folder or a hub id",
        ),
        (
            {"algorithm": "STANDALONE", "path": "./nowhere"},
            "--speculative-draft-model-path ./nowhere: model must be a hub id, an existing folder",
        ),
    ],
)
def test_contradictions_are_refused(target, asked, text):
    assert text in refusal(target, **asked)


@pytest.mark.parametrize(
    ("changes", "asked", "text"),
    [
        (
            {},
            {"topk": 2, "steps": 2, "tokens": 8},
            "must be at most 7: a tree of 2 steps with",
        ),
        ({"draft_vocab_size": 3}, {"topk": 4}, "must be at most 3, the draft model's vocabulary"),
        (
            {},
            {"topk": 2, "acceptance": "rejection"},
            "speculative_acceptance must be sample_and_match with a tree of topk 2: it is defined "
            "for chains, got rejection",
        ),
        (
            {},
            {"acceptance": "rejection", "force_accept_len": 2},
            "sample_and_match with --force-accept-len, which forces what is accepted",
        ),
        (
            {},
            {"ngram_min": 2},
            "speculative_ngram_min must be left out with EAGLE3, which searches no text, got 2; "
            "remove --speculative-ngram-min, or name NGRAM",
        ),
        ({"vocab_size": 41}, {}, "vocab_size must be the target's 40, got 41"),
        ({"target_hidden_size": 32}, {}, "target hidden size must be the target's 64, got 32"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 12]}},
            {},
            "must be layers 0 to 11 of the target, got [1, 5, 12]",
        ),
        ({"model_type": "t5"}, {}, "config.json: model_type must be one of"),
    ],
)
def test_a_head_that_does_not_fit_is_refused(target, tmp_path, changes, asked, text):
    head = folder(tmp_path / "head", HEAD | changes)
    assert text in refusal(target, algorithm="EAGLE3", path=head, **asked)


def test_a_head_of_another_algorithm_is_refused_with_the_right_one(target, head):
    text = refusal(target, algorithm="EAGLE", path=head)
    assert "speculative_algorithm must be EAGLE3, which the draft head's config.json" in text


def test_a_vocabulary_of_another_size_is_refused_where_there_is_no_tokenizer(tmp_path):
    target = folder(tmp_path / "target", TARGET, None)
    draft = folder(tmp_path / "draft", TARGET | {"vocab_size": 41}, None)
    text = f"must be 40, that of '{target}', got 41; name a smaller model of the same family"
    assert text in refusal(target, algorithm="STANDALONE", path=draft)


@pytest.mark.parametrize("rows", [38, 41])
def test_a_vocabulary_padded_otherwise_is_seen_as_the_targets(target, tmp_path, rows):
    draft = folder(tmp_path / "draft", TARGET | {"vocab_size": rows}, WORDS)
    plan = drafted(target, algorithm="STANDALONE", path=draft)
    assert plan.drafter.model.vocab_size == plan.drafter.vocab_size == 40
    assert plan.drafter.model.stored_vocab_size == rows


@pytest.mark.parametrize(
    ("changes", "words", "text"),
    [
        (
            {},
            WORDS | {"a": 1, "b": 0},
            "tokenizer of draft model '{draft}' must be that of '{target}', got one that differs "
            "in 2 ids: 0 is 'b', there 'a'; name a smaller model of the same family, or NGRAM",
        ),
        ({}, {w: i for w, i in WORDS.items() if w != "z"}, "differs in 1 ids: 25 is None, there"),
        ({}, None, "must be that of '{target}', got no tokenizer.json"),
    ],
)
def test_a_draft_model_of_other_tokens_is_refused(target, tmp_path, changes, words, text):
    draft = folder(tmp_path / "draft", TARGET | {"num_hidden_layers": 2} | changes, words)
    found = refusal(target, algorithm="STANDALONE", path=draft)
    assert text.format(target=target, draft=draft) in found


def test_tokenizers_that_differ_in_form_alone_are_the_same(target, tmp_path):
    draft = folder(tmp_path / "draft", TARGET | {"num_hidden_layers": 2}, WORDS)
    path = Path(draft) / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=7))
    assert drafted(target, algorithm="STANDALONE", path=draft) is not None


def test_models_that_are_given_token_ids_have_no_tokenizers_to_compare(tmp_path):
    target = folder(tmp_path / "target", TARGET)
    draft = folder(tmp_path / "draft", TARGET | {"num_hidden_layers": 2})
    assert drafted(target, algorithm="STANDALONE", path=draft) is not None


def test_without_speculation_the_rest_stays(target):
    asked = {
        "model": target,
        "speculative_algorithm": "NGRAM",
        "speculative_num_steps": 2,
        "speculative_acceptance": "rejection",
        "force_accept_len": 2,
        "max_num_seqs": 3,
    }
    plain = without_speculation(asked)
    assert plain == {"model": target, "speculative_algorithm": "off", "max_num_seqs": 3}
    source = locate(target)
    options = engine_options(plain)
    assert plan_speculation(options, parse_config(source.config), source, weights=False) is None


def test_tools_that_compare_drafters_have_them_draft_for_every_request():
    """Unasked, the bundled head drafts for one at a time on a CPU: its band is not reached."""
    drafting = with_drafter({"model": "bundled", "max_num_seqs": 3})
    assert drafting == {"model": "bundled", "max_num_seqs": 3, "speculative_algorithm": "EAGLE3"}
    assert with_drafter({"model": "bundled", "speculative_algorithm": "off"}) is None


@pytest.mark.parametrize("draft", ["eagle3-llama-3.1-8b", "llama-3.2-1b"])
def test_explain_plans_shapes_that_could_not_be_loaded(draft):
    """A draft model as the target: neither is read."""
    asked = {"model": "llama-3.1-8b", "speculative_draft_model_path": draft}
    plan = explain_model(asked, gpu="h200").speculation
    assert plan is not None
    assert plan.drafter.source is not None
    assert plan.drafter.source.name == draft
