"""LLM.embed: vectors of decoders are those of transformers, however prompts are computed."""

import weakref
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from embedders import Embedder, assert_vectors, make_embedder, write_modules
from llm_cases import Checkpoint, assert_idle, make_llm, random_prompts, text_of

from paceline.core.errors import ConfigError, ModelError, RequestError
from paceline.core.modes import End, Pooling
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.llm.admission import Admission, AdmittedPrompt
from paceline.llm.boot import Knobs
from paceline.llm.ends.vectors import EmbeddingOutput, VectorParams, embeddings
from paceline.models.config import parse_config
from paceline.models.ends import with_ends
from paceline.models.locate import locate
from paceline.runner.outputs_ring import LaunchedStep

LENGTHS = (40, 1, 9, 33, 17, 16)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
WAYS: dict[str, dict[str, Any]] = {
    "whole": {},
    "chunks": {"chunked_prefill_size": 7},
    "few at a time": {"max_num_batched_tokens": 20, "max_num_seqs": 3},
    "no prefix cache": {"enable_prefix_cache": False},
    "eager": {"enforce_eager": True},
    "graphs": {"cuda_graph_max_tokens": 128},
    "sanitized": {"sanitize": True, "chunked_prefill_size": 7},
}


@pytest.mark.parametrize("way", WAYS)
def test_vectors_are_those_of_transformers(pooled: tuple[Pooling, Embedder], way: str) -> None:
    """Twice, the second time over a prefix cache that has them all."""
    pooling, embedder = pooled
    prompts = random_prompts(LENGTHS)
    wanted = [embedder.vector(ids, pooling) for ids in prompts]
    with make_llm(embedder, page_size=4, **WAYS[way]) as llm:
        for _ in range(2):
            found = llm.embed(prompts)
            assert_vectors(found, wanted)
            assert [each.prompt_token_ids for each in found] == [tuple(ids) for ids in prompts]
        hits = [each.cached_tokens for each in found]
        assert_idle(llm)
    is_cached = pooling is Pooling.LAST and way != "no prefix cache"
    assert (hits == [36, 0, 8, 32, 16, 12]) if is_cached else not any(hits)


def test_a_vector_of_one_step_has_the_bits_of_any_number_of_them(embedder: Embedder) -> None:
    """Of the last token it is a row that is copied; only its own computation may differ."""
    prompts = random_prompts(LENGTHS)
    with make_llm(embedder) as llm:
        alone = [llm.embed([ids])[0].vector for ids in prompts]
        together = [each.vector for each in llm.embed(prompts)]
    for a, b in zip(alone, together, strict=True):
        assert np.allclose(a, b, atol=1e-6)


def test_steps_start_before_all_prompts_are_read_and_a_wrong_one_leaves_nothing(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = random_prompts((9, 11, 3, 4, 5, 12))
    with make_llm(embedder, max_num_batched_tokens=20, max_num_seqs=3) as llm:
        read, num_read = Admission._admit, [0]
        launch, seen = llm._live.runner.launch, list[int]()

        def count(*asked: Any) -> AdmittedPrompt:
            num_read[0] += 1
            return read(*asked)

        def note(step: Step) -> LaunchedStep:
            seen.append(num_read[0])
            return launch(step)

        monkeypatch.setattr(Admission, "_admit", count)
        monkeypatch.setattr(llm._live.runner, "launch", note)
        found = llm.embed(prompts)
        assert seen[:3] == [1, 2, 5]  # a quarter of 20 tokens, a half, 3 requests
        assert_vectors(found, [embedder.vector(ids, Pooling.LAST) for ids in prompts])
        with pytest.raises(RequestError, match=r"^prompt\[5\]: prompt must be 1 to 128 tokens"):
            llm.embed([*prompts[:5], [4] * 129])
        assert not llm.engine._trackers  # before others would run to their end
        assert_idle(llm)


@pytest.mark.parametrize(("most", "first"), [(4096, 2), (3, 1)])
def test_the_first_step_has_few_tokens_however_many_a_step_holds(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch, most: int, first: int
) -> None:
    monkeypatch.setattr("paceline.llm.requests.FIRST_MOST", most)
    sizes: list[int] = []
    with make_llm(embedder, max_num_batched_tokens=20, max_num_seqs=3) as llm:
        launch = llm._live.runner.launch

        def note(step: Step) -> LaunchedStep:
            sizes.append(step.layout.num_reqs)
            return launch(step)

        monkeypatch.setattr(llm._live.runner, "launch", note)
        llm.embed(random_prompts((3, 4, 5, 4, 3)))
    assert sizes[0] == first


def test_vectors_are_made_while_other_texts_run(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And where one cannot be, nothing is left running."""
    prompts = random_prompts((9, 11, 3, 4, 5, 12))
    made: list[tuple[int, bool]] = []
    with make_llm(embedder, max_num_batched_tokens=20, max_num_seqs=3) as llm:

        def note(outputs: list[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
            made.append((len(outputs), llm.engine.has_work))
            return embeddings(outputs, params)

        def fail(outputs: list[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
            raise RequestError(f"{len(outputs)} of {params} failed")

        monkeypatch.setattr("paceline.llm.llm.embeddings", note)
        found = llm.embed(prompts)
        assert_vectors(found, [embedder.vector(ids, Pooling.LAST) for ids in prompts])
        assert made[0][1]
        assert 0 < made[0][0] < len(prompts) == sum(count for count, _ in made)
        monkeypatch.setattr("paceline.llm.llm.embeddings", fail)
        with pytest.raises(RequestError, match=r" failed$"):
            llm.embed(prompts)
        assert not llm.engine._trackers
        assert_idle(llm)


def test_texts_that_have_their_vectors_are_let_go_of_while_others_run(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts, held = random_prompts((9, 11, 3, 4, 5, 12)), list[weakref.ref[Tracker]]()
    alive: list[int] = []
    with make_llm(embedder, max_num_batched_tokens=20, max_num_seqs=3) as llm:
        add = llm.engine.add

        def hold(*args: Any, **asked: Any) -> Tracker:
            tracker = add(*args, **asked)
            held.append(weakref.ref(tracker))
            return tracker

        def note(outputs: list[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
            alive.extend([sum(each() is not None for each in held)] * len(outputs))
            return embeddings(outputs, params)

        monkeypatch.setattr(llm.engine, "add", hold)
        monkeypatch.setattr("paceline.llm.llm.embeddings", note)
        llm.embed(prompts)
    assert alive[0] == len(prompts) == len(alive)
    assert alive[-1] == alive.count(alive[-1]) < len(prompts)  # those that end last, alone


def test_outputs_that_end_together_are_made_in_the_order_of_their_texts(
    embedder: Embedder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So of several that fail in a step the first is told, whatever their addresses are."""
    made: list[tuple[int, ...]] = []
    prompts = random_prompts((3,) * 40)

    def note(outputs: list[RequestOutput], params: VectorParams) -> list[EmbeddingOutput]:
        made.extend(each.prompt_token_ids for each in outputs)
        return embeddings(outputs, params)

    monkeypatch.setattr("paceline.llm.llm.embeddings", note)
    with make_llm(embedder) as llm:
        llm.embed(prompts)
    assert made == [tuple(ids) for ids in prompts]


def test_vectors_are_cut_and_then_made_of_length_1(embedder: Embedder) -> None:
    prompts = random_prompts((9, 20))
    with make_llm(embedder) as llm:
        for dimensions in (1, 24, 40):
            wanted = [embedder.vector(p, Pooling.LAST, dimensions=dimensions) for p in prompts]
            assert_vectors(llm.embed(prompts, dimensions=dimensions), wanted)
        raw = [embedder.vector(p, Pooling.LAST, dimensions=24, normalize=False) for p in prompts]
        assert_vectors(llm.embed(prompts, dimensions=24, normalize=False), raw)
        for wrong in (0, 41, True, "4"):
            with pytest.raises(RequestError, match=r"^dimensions must be an integer from 1 to 40"):
                llm.embed(prompts, dimensions=wrong)


def test_without_a_normalize_module_vectors_keep_their_length(tmp_path: Path) -> None:
    embedder = make_embedder(tmp_path, Pooling.MEAN, normalize=False)
    prompts = random_prompts((9, 20))
    with make_llm(embedder) as llm:
        raw = [embedder.vector(ids, Pooling.MEAN, normalize=False) for ids in prompts]
        assert_vectors(llm.embed(prompts), raw)
        assert_vectors(
            llm.embed(prompts, normalize=True), [embedder.vector(p, Pooling.MEAN) for p in prompts]
        )


def test_texts_and_ids_are_taken_and_the_context_may_be_full(embedder: Embedder) -> None:
    [long] = random_prompts([128])
    with make_llm(embedder) as llm:
        [of_ids], [of_text] = llm.embed([long]), llm.embed(text_of(long))
        assert np.array_equal(of_ids.vector, of_text.vector)
        assert_vectors([of_ids], [embedder.vector(long, Pooling.LAST)])
        for wrong in ([*long, 5], text_of([*long, 5])):
            with pytest.raises(RequestError, match=r"prompt must be 1 to 128 tokens \(context 128"):
                llm.embed([wrong])
        with pytest.raises(RequestError, match="pass at least one token"):
            llm.embed([[]])


def test_a_model_with_a_head_makes_vectors_beside_answers_where_asked(
    checkpoint: Checkpoint,
) -> None:
    prompts = random_prompts(LENGTHS)
    with make_llm(checkpoint) as plain:
        answers = [output.outputs[0].token_ids for output in plain.generate(prompts, GREEDY)]
        text = "the request must be one of what this model does: generate, score, got embed; start "
        with pytest.raises(RequestError, match=rf"^{text}the engine with --pooling"):
            plain.embed(prompts)
    body = Embedder(checkpoint.folder, checkpoint.theirs.model)
    with make_llm(checkpoint, pooling="mean", sanitize=True, chunked_prefill_size=7) as llm:
        trackers = llm.submit(prompts, GREEDY)
        llm.engine.step()
        assert_vectors(llm.embed(prompts), [body.vector(ids, Pooling.MEAN) for ids in prompts])
        while any(not tracker.is_finished for tracker in trackers):
            llm.engine.step()
        found = [tracker.snapshot().outputs[0].token_ids for tracker in trackers]
    assert found == answers


def test_a_body_alone_generates_nothing(embedder: Embedder) -> None:
    """And what its requests would ask of the sampler stays on the host."""
    text = "^the request must be one of what this model does: embed, got "
    with make_llm(embedder) as llm:
        sampling = llm._live.runner.parts.table.sampling
        before = sampling.floats.clone(), sampling.ints.clone()
        llm.embed([[4]])
        assert torch.equal(sampling.floats, before[0])
        assert torch.equal(sampling.ints, before[1])
        with pytest.raises(RequestError, match=f"{text}generate; ask for vectors"):
            llm.generate([[4]])
        with pytest.raises(RequestError, match=f"{text}score; ask for vectors"):
            llm.score([[4]], [[5]])
    with pytest.raises(ConfigError, match=r"^speculative_algorithm must be left out for "):
        make_llm(embedder, speculative_algorithm="NGRAM")


def test_rows_in_place_of_embeddings_are_refused(embedder: Embedder) -> None:
    with make_llm(embedder) as llm:
        prompt = {
            "prompt_token_ids": [4],
            "prompt_embeds": torch.zeros(1, llm.prepared.config.hidden_size),
        }
        expected = "^prompt_embeds must be left out of a prompt whose vector is asked for, got rows"
        with pytest.raises(RequestError, match=expected):
            llm.embed([prompt])


def test_a_preempted_request_is_pooled_anew(checkpoint: Checkpoint) -> None:
    """Answers grow until the vector's pages are wanted; its chunks before count no more."""
    [prompt] = random_prompts([70], seed=4)
    body = Embedder(checkpoint.folder, checkpoint.theirs.model)
    knobs = Knobs(num_pages=(48,), reserve_ahead=0, admission_margin=0)
    options = {"pooling": "mean", "page_size": 4, "chunked_prefill_size": 2}
    with make_llm(checkpoint, knobs=knobs, **options) as llm:
        growing = llm.submit(random_prompts((30, 31, 30)), replace(GREEDY, max_tokens=60))
        llm.engine.step()
        [pooling] = llm.enqueue(llm.admission.admit_end([prompt], End.POOL))
        while llm.engine.has_work:
            llm.engine.step()
        assert_idle(llm)
    output = pooling.snapshot()
    assert output.metrics is not None
    assert output.metrics.preemptions > 0
    assert all(tracker.is_finished for tracker in growing)
    assert_vectors(embeddings([output], VectorParams()), [body.vector(prompt, Pooling.MEAN)])


def test_steps_that_pool_are_graphs_of_their_own(checkpoint: Checkpoint) -> None:
    """A step with both ends, one that pools and one that generates are three programs."""
    prompts = random_prompts((9, 9))
    with make_llm(checkpoint, pooling="last", cuda_graph_max_tokens=128, sanitize=True) as llm:
        for _ in range(3):
            llm.embed(prompts)
            llm.generate(prompts, GREEDY)
        captured = {key.ends for key in llm._live.runner._graphs.graphs if key.extend_len is None}
    assert captured == {frozenset({End.POOL}), frozenset({End.GENERATE})}


def test_numbers_that_are_not_finite_are_an_error_of_their_own_request(tmp_path: Path) -> None:
    embedder = make_embedder(tmp_path, Pooling.MEAN)
    embedder.theirs.embed_tokens.weight[7] = float("nan")
    embedder.theirs.save_pretrained(tmp_path)
    good, bad = [4, 5, 6], [4, 7, 6]
    with make_llm(embedder) as llm:
        with pytest.raises(RequestError, match="pool of the hidden states of request"):
            llm.embed([good, bad])
        assert_vectors(llm.embed([good]), [embedder.vector(good, Pooling.MEAN)])
        assert_idle(llm)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"pooling_mode_mean_tokens": True}, "one mode of cls, .*, got lasttoken and mean_tokens"),
        ({"pooling_mode_lasttoken": False}, "one mode of cls, .*, got none"),
        ({"pooling_mode": "max"}, "one mode of cls, .*, got lasttoken and max"),
    ],
)
def test_a_pooling_that_is_not_known_is_refused(tmp_path: Path, change: Any, text: str) -> None:
    embedder = make_embedder(tmp_path, None)
    write_modules(tmp_path, Pooling.LAST, **change)
    with pytest.raises(ModelError, match=rf"^1_Pooling/config\.json must be {text}"):
        make_llm(embedder)


@pytest.mark.parametrize(
    "kinds",
    [
        ("Transformer", "Pooling", "Dense", "LayerNorm"),
        ("Transformer", "Pooling", "Normalize", "Dense"),
        ("Transformer", "Dense", "Pooling"),
        ("Transformer", "Pooling", "Normalize", "Normalize"),
        ("Pooling", "Transformer"),
    ],
)
def test_modules_of_another_kind_or_order_are_refused(
    checkpoint: Checkpoint, kinds: tuple[str, ...]
) -> None:
    modules = [{"type": f"sentence_transformers.models.{kind}"} for kind in kinds]
    pooling = {"pooling_mode_lasttoken": True}
    source = replace(locate(str(checkpoint.folder)), modules=modules, pooling_config=pooling)
    config = parse_config(source.config, source.generation_config)
    text = f"^modules.json must be Transformer, Pooling, any .*, got {', '.join(kinds)};"
    with pytest.raises(ModelError, match=text):
        with_ends(config, source, None)


def test_the_files_of_a_body_may_be_silent_or_overruled(tmp_path: Path) -> None:
    embedder, prompts = make_embedder(tmp_path, None), random_prompts((9, 20))
    for options, pooling in (({}, Pooling.LAST), ({"pooling": "cls"}, Pooling.CLS)):
        with make_llm(embedder, **options) as llm:
            assert_vectors(llm.embed(prompts), [embedder.vector(p, pooling) for p in prompts])


def test_vectors_equal_those_of_sentence_transformers(pooled: tuple[Pooling, Embedder]) -> None:
    """Where it is installed; it reads the same files."""
    theirs = pytest.importorskip("sentence_transformers")
    _, embedder = pooled
    texts: Sequence[str] = [text_of(ids) for ids in random_prompts((9, 20))]
    model = theirs.SentenceTransformer(str(embedder.folder), device="cpu")
    with make_llm(embedder) as llm:
        wanted = torch.from_numpy(model.encode(list(texts))).double()
        assert_vectors(llm.embed(texts), list(wanted))
