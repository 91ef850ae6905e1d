"""What a body is refused for before it reaches the engine, and in a process of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import paceline
from paceline.core.errors import ModelError, PacelineError, RequestError
from paceline.server.bodies.counts import Room
from paceline.server.bodies.reader import CHAT, COMPLETIONS, RERANK, SCORE, Reader
from paceline.server.bodies.worker import BodyWorker, ReaderFacts
from paceline.server.errors import ApiError
from paceline.text.tokenizer import Tokenizer

BUNDLED = Path(paceline.__file__).parent / "models/bundled"
MIB = 1 << 20


def make_reader(tokenizer: Tokenizer | None = None, context_len: int = 8) -> Reader:
    room = Room(context_len=context_len, max_open=20)
    return Reader(model="tiny", room=room, vocab_size=4096, tokenizer=tokenizer)


BUNDLED_READER = make_reader(Tokenizer.from_folder(BUNDLED), context_len=2048)


def read(prompt, max_tokens: int | None = None, **more) -> list[list[int]]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": max_tokens} | more
    return make_reader().read(COMPLETIONS, json.dumps(body).encode()).prompts


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(7, None), (7, 1), (4, 4), (1, 7)])
def test_a_context_may_be_filled_to_its_last_token(num_prompt: int, max_tokens: int | None) -> None:
    prompts = [[5], [5] * num_prompt]
    assert read(prompts, max_tokens) == prompts


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(8, None), (8, 1), (4, 5), (1, 8)])
def test_one_token_more_is_refused_in_whatever_prompt(num_prompt: int, max_tokens) -> None:
    for prompts in ([[5] * num_prompt], [[5], [5] * num_prompt]):
        with pytest.raises(ApiError, match="prompt must be within the context of 8 tokens") as got:
            read(prompts, max_tokens)
        assert (got.value.status, got.value.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_is_refused_by_the_name_it_came_with(name: str) -> None:
    body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], name: 0}
    with pytest.raises(ApiError, match=f"^{name} must be an integer of at least 1") as got:
        BUNDLED_READER.read(CHAT, json.dumps(body).encode())
    assert (got.value.status, got.value.param) == (400, name)


def test_an_empty_text_is_refused() -> None:
    tokenizer = SimpleNamespace(fewest_tokens=lambda *_: 0, encode=lambda *_, **__: [])
    with pytest.raises(ApiError, match="prompt must be at least one token, got none"):
        make_reader(tokenizer).read(COMPLETIONS, b'{"model": "tiny", "prompt": ""}')


def test_another_model_is_not_found() -> None:
    reader = make_reader()
    reader.check_model("tiny")
    with pytest.raises(ApiError, match="model must be 'tiny', got 'Tiny'") as refused:
        reader.check_model("Tiny")
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    with pytest.raises(ApiError) as refused:
        reader.check_model("k" * 10**5)
    assert len(str(refused.value)) < 200


def test_a_model_without_a_tokenizer_takes_ids_only() -> None:
    assert read([[1, 2]], 1) == [[1, 2]]
    with pytest.raises(ModelError, match="text must be sent to a model with tokenizer"):
        read("x", 1)


def listed(item: bytes, num_bytes: int) -> bytes:
    return b"[" + b",".join([item] * (num_bytes // (len(item) + 1))) + b"]"


def keyed(value: bytes, num_bytes: int) -> bytes:
    return b"{" + b",".join(b'"%07d":%b' % (key, value) for key in range(num_bytes // 12)) + b"}"


def asking(name: bytes, value: bytes) -> bytes:
    return b'{"model":"tiny","prompt":"x","messages":[],"%b":%b}' % (name, value)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (b"prompt", listed(b"[1]", MIB), "n must be at most 20 completions at once, of all"),
        (b"prompt", listed(b'"ab"', MIB), "n must be at most 20 completions at once, of all"),
        (b"prompt", listed(b"300", MIB), "prompt must be within the context of 8 tokens, got at"),
        (b"prompt", b"[[1]," + listed(b"300", MIB) + b"]", "prompt must be within the context of"),
        (b"prompt", b'["a",' + listed(b"[1]", MIB)[1:], "prompt[1] must be like those before it"),
        (b"prompt", b'["a" , ' + listed(b"1", MIB)[1:], "prompt[1] must be like those before it"),
        (b"prompt", b'[[1],"' + b"]" * MIB + b'"]', "n must be at most 20 completions at once, of"),
        (b"stop", listed(b'"ab"', MIB), "stop must be at most 524288 bytes, got 1048"),
        (b"stop_token_ids", listed(b"300", MIB), "stop_token_ids must be at most 524288 bytes"),
        (b"logit_bias", keyed(b"1", MIB), "logit_bias must be at most 524288 bytes, got 1048"),
        (b"user", b'"' + b"x" * MIB + b'"', "user must be at most 524288 bytes, got 1048578"),
        (b"no_field", listed(b"1", MIB), "no_field must be a field of this endpoint, got an"),
    ],
)  # fmt: skip
def test_what_a_large_body_holds_is_counted_before_it_is_built(name, value, text) -> None:
    body = asking(name, value).replace(b'"messages":[],', b"")
    tracemalloc.start()
    try:
        with pytest.raises((ApiError, RequestError)) as refused:
            make_reader().read(COMPLETIONS, body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert str(refused.value).startswith(text)
    assert peak < 4 * MIB


def read_pairs(query: str, documents: list[str], context_len: int, texts: list[str]) -> None:
    """texts: those that were encoded."""

    def encoded(first: str, second: str) -> tuple[list[int], int]:
        texts.append(second)
        return [5] * (len(first) + len(second)), len(first)

    tokenizer = SimpleNamespace(fewest_tokens=lambda *_: 0, encode_pair=encoded)
    reader = replace(
        make_reader(tokenizer, context_len), room=Room(context_len=context_len, max_open=5000)
    )
    for endpoint, names in ((RERANK, ("query", "documents")), (SCORE, ("text_1", "text_2"))):
        body = {"model": "tiny"} | dict(zip(names, (query, documents), strict=True))
        reader.read(endpoint, json.dumps(body).encode())


def test_pairs_are_counted_with_the_query_in_each() -> None:
    """Bytes before any is encoded, and tokens as they are."""
    texts: list[str] = []
    with pytest.raises(ApiError, match="documents must be at most 4194304 bytes in all pairs, got"):
        read_pairs("\u00e4" * 2000, ["b"] * 1049, 8000, texts)
    assert not texts
    with pytest.raises(
        ApiError, match="documents must be at most 2048 tokens in all pairs, got 20"
    ):
        read_pairs("aaaaaaa", ["b"] * 4000, 8, texts)
    assert len(texts) == 257
    read_pairs("aaaaaaa", ["b"] * 256, 8, texts)


@pytest.mark.parametrize(
    ("endpoint", "more"),
    [
        (COMPLETIONS, {"prompt": 'a ["b",] \\" c\n' * 3}),
        (COMPLETIONS, {"prompt": ["a,b", '"],["', "\\", "é😀"] * 5, "stop": ["x", ","]}),
        (COMPLETIONS, {"prompt": [1, 2, 3], "logit_bias": {"1": 2.5}, "priority": -1}),
        (COMPLETIONS, {"prompt": [[1, 2], [3]] * 10, "stop_token_ids": [1], "deadline_s": 2.0}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a,["}]}]}),
        (CHAT, {"messages": [{"role": "user", "content": "a"}], "stream": True, "tools": []}),
    ],
)
def test_a_body_is_read_alike_however_large(endpoint, more) -> None:
    body = json.dumps(more | {"model": "tiny"}, indent=1).encode()
    assert BUNDLED_READER.read(endpoint, body.ljust(MIB)) == BUNDLED_READER.read(endpoint, body)


TEXT = st.sampled_from([b"", b"ab", b"\\u0100", b"\\n", "é😀".encode(), b"],[,{"])
SCALARS = st.one_of(
    st.sampled_from([b"1", b"300", b"-1", b"1.5", b"true", b"null", b"{}", b"[]", b"[1]"]),
    TEXT.map(lambda text: b'"%b"' % text),
)
MESSAGES = st.builds(
    lambda role, content: b'{"role":"%b","content":%b}' % (role, content),
    st.sampled_from([b"user", b"system", b"x"]),
    st.one_of(SCALARS, st.builds(lambda text: b'[{"type":"text","text":"%b"}]' % text, TEXT)),
)
VALUES = st.one_of(
    st.builds(lambda items: listed(b",".join(items), MIB // 2), st.lists(SCALARS, min_size=1)),
    st.builds(lambda item: listed(item, MIB // 2), st.one_of(SCALARS, MESSAGES)),
    st.builds(lambda value: keyed(value, MIB // 2), SCALARS),
    TEXT.map(lambda text: b'"%b"' % (text * (MIB // 2 // max(1, len(text))))),
    SCALARS,
)
NAMES = st.sampled_from(
    b"prompt messages stop stop_token_ids logit_bias metadata extra_args tools user n x".split()
)


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    fields=st.lists(st.tuples(NAMES, VALUES), min_size=1, max_size=3),
    tail=st.sampled_from([b"", b",", b" " * MIB]),
    endpoint=st.sampled_from([COMPLETIONS, CHAT]),
)
def test_no_body_costs_more_than_it_is_long(fields, tail, endpoint) -> None:
    """0.05 CPU seconds and ten times its bytes for each MB, and what is constant."""
    needed = b'"prompt":"x"' if endpoint == COMPLETIONS else b'"messages":[]'
    items = [b'"model":"tiny"', needed, *(b'"%b":%b' % field for field in fields)]
    body = b"{" + b",".join(items) + b"}" + tail
    tracemalloc.start()
    began, told = time.process_time(), ""
    try:
        BUNDLED_READER.read(endpoint, body)
    except (ApiError, PacelineError) as error:
        told = str(error)
    finally:
        spent, (_, peak) = time.process_time() - began, tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert len(told) < 2000
    assert peak < 10 * len(body) + 4 * MIB
    assert spent < 0.05 * 4 * len(body) / 1e6 + 0.2  # the tracer takes four times as long


def facts_of(folder: Path | None) -> ReaderFacts:
    return ReaderFacts(
        model="tiny",
        context_len=256,
        max_open=20,
        vocab_size=4096,
        folder=None if folder is None else str(folder),
    )


def test_a_process_reads_as_the_reader_does_and_is_replaced_when_it_ends() -> None:
    facts = facts_of(BUNDLED)
    reader, worker = facts.reader(Tokenizer.from_folder(BUNDLED)), BodyWorker(facts)
    bodies = [
        (COMPLETIONS, {"prompt": ["x y", "z"], "echo": True, "logprobs": 1, "stop": "q"}),
        (COMPLETIONS, {"prompt": [5, 6], "n": 2, "logit_bias": {"7": 1.5}, "stream": True}),
        (COMPLETIONS, {"prompt": "x", "extra_args": {"a": [1, {"b": None}]}}),
        (CHAT, {"messages": [{"role": "user", "content": "hello"}], "seed": -3}),
    ]

    async def ask(endpoint, body):
        data = json.dumps(body | {"model": "tiny"}).encode()
        return await worker.read(endpoint, [data[:9], data[9:]]), reader.read(endpoint, data)

    async def ask_all():
        for endpoint, body in bodies:
            there, here = await ask(endpoint, body)
            assert there == here
        for wrong, text in (({}, "prompt must be present"), ({"prompt": "x", "n": 0}, "n must be")):
            with pytest.raises(ApiError, match=text) as refused:
                await ask(COMPLETIONS, wrong)
            assert refused.value.status == 400
        os.kill(worker._process.pid, signal.SIGKILL)
        with pytest.raises(ApiError, match="reads large bodies must be running, got ended by -9"):
            await ask(*bodies[0])
        there, here = await ask(*bodies[0])
        assert there == here
        worker.close()
        worker.close()
        with pytest.raises(RuntimeError, match="shutdown"):
            await ask(*bodies[0])

    asyncio.run(ask_all())


def test_a_process_whose_folder_has_gone_says_so_until_it_is_back(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    worker, body = BodyWorker(facts_of(folder)), b'{"model":"tiny","prompt":"x y"}'

    async def ask_twice():
        with pytest.raises(
            ApiError, match=r"got an error \(tokenizer must be tokenizer.json"
        ) as gone:
            await worker.read(COMPLETIONS, [body])
        assert (gone.value.status, gone.value.code) == (503, "reader_without_tokenizer")
        folder.symlink_to(BUNDLED)
        return await worker.read(COMPLETIONS, [body])

    assert asyncio.run(ask_twice()) == BUNDLED_READER.read(COMPLETIONS, body)
    worker.close()


def test_the_process_that_reads_bodies_imports_no_torch() -> None:
    code = "import sys, paceline.server.bodies.worker; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
