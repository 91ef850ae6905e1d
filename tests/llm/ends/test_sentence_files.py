"""What files of sentence-transformers say of texts: how long, in what case, behind which prompt."""

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from embedders import Embedder, assert_vectors, make_embedder, write_modules
from llm_cases import make_llm, random_prompts, text_of
from serving import serving
from test_encoders import CONTEXT, make_encoder
from tokenizers import normalizers

from paceline.core.errors import ConfigError, ModelError, RequestError
from paceline.core.modes import Pooling
from paceline.plan.explain import explain_model, show
from paceline.server.bodies.reader import EMBEDDINGS
from paceline.server.bodies.worker import BodyWorker, ReaderFacts
from paceline.text.tokenizer import Tokenizer

OF_MODULE, OF_TOKENIZER = "sentence_bert_config.json", "tokenizer_config.json"
OF_PROMPTS = "config_sentence_transformers.json"
PROMPT = (30, 31, 32)
PROMPTS = {"prompts": {"ask": text_of(PROMPT), "tell": "zz"}, "default_prompt_name": "ask"}


def make_bert(folder: Path, files: dict[str, dict[str, Any]]) -> Embedder:
    encoder = make_encoder("bert", folder)
    write_modules(folder, Pooling.MEAN, width=48)
    for name, said in files.items():
        (folder / name).write_text(json.dumps(said))
    return encoder


@pytest.mark.parametrize(
    "files",
    [
        {OF_MODULE: {"max_seq_length": 16}, OF_TOKENIZER: {"model_max_length": 64}},
        {"sentence_xlm-roberta_config.json": {"max_seq_length": 16}, OF_MODULE: {}},
        {OF_MODULE: {"max_seq_length": None}, OF_TOKENIZER: {"model_max_length": 16}},
    ],
)
def test_texts_are_as_long_as_files_say_unless_more_is_asked_for(
    tmp_path: Path, files: dict[str, dict[str, Any]]
) -> None:
    encoder, (fits, long) = make_bert(tmp_path, files), random_prompts((16, 17))
    with make_llm(encoder) as llm:
        asked = llm.prepared.resolution.to_json()["max_model_len"]
        why = f"chosen: max_seq_length of sentence-transformers; the model's limit is {CONTEXT}"
        assert asked == {"value": 16, "origin": why}
        assert_vectors(llm.embed([fits]), [encoder.vector(fits, Pooling.MEAN)])
        with pytest.raises(RequestError, match=r"1 to 16 tokens .* or raise --max-model-len"):
            llm.embed(text_of(long))
    with make_llm(encoder, max_model_len=64) as llm:
        assert_vectors(llm.embed([long]), [encoder.vector(long, Pooling.MEAN)])
    with pytest.raises(ConfigError, match=f"at most {CONTEXT}"):
        make_llm(encoder, max_model_len=CONTEXT + 1)


@pytest.mark.parametrize("length", [CONTEXT, 10**30])
def test_a_limit_beyond_the_models_is_none(tmp_path: Path, length: int) -> None:
    encoder = make_bert(tmp_path, {OF_TOKENIZER: {"model_max_length": length}})
    found = explain_model({"model": str(encoder.folder), "device": "cpu"}, gpu=None)
    shown = found.resolution.to_json()["max_model_len"]
    assert shown == {"value": CONTEXT, "origin": "chosen: context limit of the model"}


def test_a_shorter_context_may_need_no_cache(tmp_path: Path) -> None:
    """What a step holds is seen against the limit that is served."""
    embedder, config = make_embedder(tmp_path), tmp_path / "config.json"
    config.write_text(
        json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1 << 16})
    )
    with make_llm(embedder) as llm:
        assert llm.prepared.groups
    (tmp_path / OF_MODULE).write_text('{"max_seq_length": 64}')
    with make_llm(embedder) as llm:
        assert (llm.prepared.options.max_model_len, llm.prepared.groups) == (64, ())


def test_without_modules_these_files_mean_nothing(tmp_path: Path) -> None:
    files = {OF_MODULE: {"max_seq_length": 16, "do_lower_case": True}, OF_PROMPTS: PROMPTS}
    encoder, (long,) = make_bert(tmp_path, files), random_prompts((20,))
    (tmp_path / "modules.json").unlink()
    with make_llm(encoder) as llm:
        wanted = [encoder.vector(long, Pooling.MEAN)]
        assert_vectors(llm.embed(text_of(long)), wanted)


def test_texts_are_lowered_and_stand_behind_the_prompt_over_http_too(tmp_path: Path) -> None:
    """Token ids are taken as they are."""
    files = {OF_MODULE: {"do_lower_case": True}, OF_PROMPTS: PROMPTS}
    encoder, ids = make_bert(tmp_path, files), random_prompts((9, 20))
    texts = [text_of(each).upper() for each in ids]
    behind = [encoder.vector([*PROMPT, *each], Pooling.MEAN) for each in ids]
    alone = [encoder.vector(each, Pooling.MEAN) for each in ids]
    told = f"{text_of(PROMPT)!r} is put before each text, the model's default prompt"
    plan = explain_model({"model": str(encoder.folder), "device": "cpu"}, gpu=None)
    assert f"vectors: {told}" in show(plan).splitlines()
    with make_llm(encoder) as llm:
        assert told in [each["detail"] for each in llm.report()["events"]]
        assert_vectors(llm.embed(texts), behind)
        assert_vectors(llm.embed(ids), alone)
        with serving(llm) as server:
            for sent, wanted in ((texts, behind), (list(map(list, ids)), alone)):
                body = {"model": "tiny", "input": sent}
                answer = httpx.post(f"{server.url}/v1/embeddings", json=body).json()
                found = [each["embedding"] for each in answer["data"]]
                assert np.allclose(found, np.stack(wanted), atol=1e-5)
            asyncio.run(_read_elsewhere(server.worker._facts, texts, ids))


async def _read_elsewhere(facts: ReaderFacts, texts: list[str], ids: list[list[int]]) -> None:
    """Large bodies have a process of their own."""
    worker = BodyWorker(facts)
    body = json.dumps({"model": "tiny", "input": texts}).encode()
    reading = await worker.read(EMBEDDINGS, [body])
    assert reading.prompts == [[*PROMPT, *each] for each in ids]
    worker.close()


@pytest.mark.parametrize("chain", [False, True])
def test_lower_case_comes_first_and_once(tmp_path: Path, chain: bool) -> None:
    make_bert(tmp_path, {})
    plain = Tokenizer.from_folder(tmp_path)
    own = normalizers.Replace("ab", "cd")
    plain._core.normalizer = normalizers.Sequence([own]) if chain else own
    plain._core.save(str(tmp_path / "tokenizer.json"))
    lowering = Tokenizer.from_folder(tmp_path, lowers=True)
    assert lowering.encode("ABef") == plain.encode("abef") == plain.encode("cdef")
    assert plain.encode("ABef") != plain.encode("abef")
    plain._core.normalizer = normalizers.Sequence([own, normalizers.Lowercase()])
    plain._core.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.from_folder(tmp_path, lowers=True).encode("ABef") == plain.encode("ABef")


@pytest.mark.parametrize(
    ("said", "text"),
    [
        ({"default_prompt_name": "x"}, "default_prompt_name must be one of query, document, got"),
        ({"default_prompt_name": ["q"]}, "default_prompt_name must be one of query, document, got"),
        ({"default_prompt_name": "q", "prompts": {"q": 4}}, "prompts: q must be a text, got 4"),
    ],
)
def test_a_default_prompt_that_is_none_is_refused(
    tmp_path: Path, said: dict[str, Any], text: str
) -> None:
    encoder = make_bert(tmp_path, {OF_PROMPTS: said})
    with pytest.raises(ModelError, match=rf"^config_sentence_transformers\.json: {text}"):
        make_llm(encoder)


@pytest.mark.parametrize(
    "said", [{"prompts": {"q": "zz"}}, {"default_prompt_name": "query"}, {"prompts": {"q": None}}]
)
def test_prompts_that_nobody_asks_for_are_for_clients(tmp_path: Path, said: dict[str, Any]) -> None:
    encoder, (ids,) = make_bert(tmp_path, {OF_PROMPTS: said}), random_prompts((9,))
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(text_of(ids)), [encoder.vector(ids, Pooling.MEAN)])
        assert "default_prompt" not in str(llm.report()["events"])


def test_a_prompt_that_is_left_out_of_the_pooling_is_refused(tmp_path: Path) -> None:
    """Where it is there, and some of its tokens would be in the vector."""
    encoder, (ids,) = make_bert(tmp_path, {OF_PROMPTS: PROMPTS}), random_prompts((9,))
    write_modules(tmp_path, Pooling.MEAN, width=48, include_prompt=False)
    with pytest.raises(ModelError, match=r"^1_Pooling.*: include_prompt must be true behind the"):
        make_llm(encoder)
    write_modules(tmp_path, Pooling.LAST, width=48, include_prompt=False)
    with make_llm(encoder) as llm:
        wanted = [encoder.vector([*PROMPT, *ids], Pooling.LAST)]
        assert_vectors(llm.embed(text_of(ids)), wanted)
    (tmp_path / OF_PROMPTS).unlink()
    write_modules(tmp_path, Pooling.MEAN, width=48, include_prompt=False)
    with make_llm(encoder) as llm:
        assert_vectors(llm.embed(text_of(ids)), [encoder.vector(ids, Pooling.MEAN)])
