"""Scores of pairs: classifier's heads, against transformers and sentence-transformers."""

import json
from pathlib import Path

import pytest
import torch
from classifiers import CASES, CONTEXT, CrossEncoder, make_cross_encoder, some_pairs
from embedders import make_embedder
from llm_cases import assert_idle, make_llm, random_prompts, text_of

from paceline.core.errors import ConfigError, ModelError, RequestError

TOLERANCE = 1e-5
QUERY, DOCUMENTS = some_pairs(random_prompts((7, 30, 1, 12, 61, 19)))


@pytest.fixture(scope="module", params=CASES)
def served(request, tmp_path_factory):
    """A cross-encoder and an engine of it: sanitized, with graphs."""
    encoder = make_cross_encoder(request.param, tmp_path_factory.mktemp(request.param))
    with make_llm(encoder, cuda_graph_max_tokens=96, sanitize=True) as llm:
        yield encoder, llm


@pytest.fixture(scope="module")
def bert(tmp_path_factory) -> CrossEncoder:
    return make_cross_encoder("bert", tmp_path_factory.mktemp("bert"))


def assert_scores(found, wanted) -> None:
    for pair, logits in zip(found, wanted, strict=True):
        error = (torch.tensor(pair.scores) - logits).abs().max().item()
        assert error < TOLERANCE * max(logits.abs().max().item(), 1.0), f"{error:.2e} apart"


def test_scores_are_those_of_transformers(served) -> None:
    """As often as it takes to replay a graph; behind a pair its row holds another."""
    encoder, llm = served
    documents = DOCUMENTS
    wanted = [encoder.logits(QUERY, document) for document in documents]
    for _ in range(3):
        assert_scores(llm.score_pairs(QUERY, documents, raw=True), wanted)
        wanted, documents = wanted[::-1], documents[::-1]
    assert_idle(llm)
    assert llm._live.runner.graphs_captured


def test_unasked_scores_go_through_what_the_files_say(served) -> None:
    encoder, llm = served
    wanted = [encoder.logits(QUERY, document) for document in DOCUMENTS]
    is_one = encoder.theirs.config.num_labels == 1
    found = llm.score_pairs([QUERY] * len(DOCUMENTS), DOCUMENTS)
    assert_scores(found, [logits.sigmoid() if is_one else logits for logits in wanted])
    if is_one:
        assert [each.score for each in found] == [each.scores[0] for each in found]
        assert all(0 < each.score < 1 for each in found)
    else:
        with pytest.raises(RequestError, match="score must be asked of a model with one label"):
            _ = found[0].score


def test_scores_are_those_of_sentence_transformers(served) -> None:
    library = pytest.importorskip("sentence_transformers", reason="a second opinion, no need")
    encoder, llm = served
    if encoder.theirs.config.model_type == "qwen3":
        pytest.skip("its tokenizer's files are not whole enough for transformers")
    theirs = library.CrossEncoder(str(encoder.folder), device="cpu")
    wanted = torch.tensor(theirs.predict([(QUERY, each) for each in DOCUMENTS]))
    assert_scores(llm.score_pairs(QUERY, DOCUMENTS), wanted.reshape(len(DOCUMENTS), -1))


def test_few_pairs_fit_a_step(bert: CrossEncoder) -> None:
    wanted = [bert.logits(QUERY, document) for document in DOCUMENTS]
    with make_llm(bert, max_num_batched_tokens=CONTEXT, max_num_seqs=2) as llm:
        assert_scores(llm.score_pairs(QUERY, DOCUMENTS, raw=True), wanted)


@pytest.mark.parametrize(
    ("said", "act"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, None),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, None),
        ({"sentence_transformers": {"version": "5.0"}}, "sigmoid"),
    ],
)
def test_activations_are_read_as_that_library_writes_them(tmp_path: Path, said, act) -> None:
    encoder = make_cross_encoder("bert", tmp_path)
    _change(tmp_path, said)
    wanted = [encoder.logits(QUERY, document) for document in DOCUMENTS]
    with make_llm(encoder) as llm:
        found = llm.score_pairs(QUERY, DOCUMENTS)
    assert_scores(found, [logits.sigmoid() if act else logits for logits in wanted])


def test_token_ids_are_taken_as_they_are(bert: CrossEncoder) -> None:
    """The second list is the second text, whatever its ids."""
    pairs = [bert.core.encode_batch([(QUERY, each)])[0] for each in DOCUMENTS]
    splits = [pair.type_ids.index(1) for pair in pairs]
    first = [pair.ids[:split] for pair, split in zip(pairs, splits, strict=True)]
    second = [pair.ids[split:] for pair, split in zip(pairs, splits, strict=True)]
    with make_llm(bert) as llm:
        by_text = llm.score_pairs(QUERY, DOCUMENTS)
        assert llm.score_pairs(first, second) == by_text
        assert llm.score_pairs(first[0], second) == by_text
        unsplit = llm.score_pairs([[1]], [pairs[0].ids[1:]])[0]
    assert abs(unsplit.score - by_text[0].score) > 1e-4, "types would not matter here"


def test_a_decoder_finds_the_query_in_its_cache(tmp_path: Path) -> None:
    encoder = make_cross_encoder("qwen3", tmp_path)
    query, document = text_of(random_prompts([64])[0]), DOCUMENTS[0]
    with make_llm(encoder, page_size=16, max_num_batched_tokens=32) as llm:
        first = llm.score_pairs(query, document, raw=True)
        again = llm.score_pairs(query, document, raw=True)
    assert (first[0].cached_tokens, again[0].cached_tokens) == (0, 80)
    for found in (first, again):
        assert_scores(found, [encoder.logits(query, document)])


def test_what_cannot_be_scored_is_refused(bert: CrossEncoder, tmp_path: Path) -> None:
    with make_llm(bert) as llm:
        for queries, documents, text in (
            ([QUERY] * 2, DOCUMENTS, "^queries must be one for all, or one for each of 5 documen"),
            (QUERY, [[4]], "^a query and its document must be both texts or both token ids"),
            (QUERY, DOCUMENTS[3] * 3, f"^prompt must be 1 to {CONTEXT} tokens"),
            ([4], [[160]], "^prompt token id 1 must be an integer from 0 to 159, got 160"),
        ):
            with pytest.raises(RequestError, match=text):
                llm.score_pairs(queries, documents)
        with pytest.raises(RequestError, match="does: score pairs, got embed; ask for scores of"):
            llm.embed([[4]])
        with pytest.raises(RequestError, match="does: score pairs, got generate; ask for scores "):
            llm.generate([[4]])
    refused = pytest.raises(RequestError, match="embed, got score pairs; serve a cross-encoder")
    with make_llm(make_embedder(tmp_path)) as llm, refused:
        llm.score_pairs(QUERY, DOCUMENTS)


@pytest.mark.parametrize(
    ("change", "options", "error", "text"),
    [
        ({"architectures": ["BertForTokenClassification"]}, {}, ModelError, "or with a head of wh"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}},
            {},
            ModelError,
            "sentence_transformers: activation_fn must be torch's Sigmoid or Identity",
        ),
        ({}, {"pooling": "mean"}, ConfigError, "^pooling must be left out for a classifier, whos"),
    ],
)
def test_a_head_that_is_not_run_is_refused(tmp_path: Path, change, options, error, text) -> None:
    encoder = make_cross_encoder("bert", tmp_path)
    _change(tmp_path, change)
    with pytest.raises(error, match=text):
        make_llm(encoder, **options)


def test_labels_may_be_counted_alone(tmp_path: Path) -> None:
    encoder = make_cross_encoder("bert-labels", tmp_path)
    _change(tmp_path, {"id2label": None, "num_labels": 3})
    with make_llm(encoder) as llm:
        [found] = llm.score_pairs(QUERY, DOCUMENTS[0])
    assert len(found.scores) == 3


def test_modules_beside_the_checkpoint_are_refused(tmp_path: Path) -> None:
    encoder = make_cross_encoder("bert", tmp_path)
    kinds = [{"type": f"sentence_transformers.base.{kind}"} for kind in ("Transformer", "Score")]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    with pytest.raises(ModelError, match=r"modules\.json must be Transformer alone, of"):
        make_llm(encoder)


def test_a_default_prompt_is_refused(tmp_path: Path) -> None:
    encoder = make_cross_encoder("bert", tmp_path)
    kinds = [{"type": "sentence_transformers.base.Transformer", "path": ""}]
    (tmp_path / "modules.json").write_text(json.dumps(kinds))
    said = {"prompts": {"q": "Judge: "}, "default_prompt_name": "q"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(said))
    with pytest.raises(ModelError, match=r"default_prompt_name must be null, of .* got 'Judge: '"):
        make_llm(encoder)


def _change(folder: Path, said: dict[str, object]) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | said))
