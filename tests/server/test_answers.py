"""What a job's growths become, whole and streamed, as the openai client's own types read them."""

import asyncio
import json
import math
from dataclasses import dataclass, field, replace

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from paceline.core.modes import End
from paceline.core.request.sampling_params import SamplingParams
from paceline.engine.acceptance import Acceptance
from paceline.engine.answers.outputs import CompletionOutput, RequestMetrics, RequestOutput, joined
from paceline.engine.answers.token_logprobs import TokenLogprobs
from paceline.engine.request import FinishReason
from paceline.server.answer import Job, answer
from paceline.server.bodies.counts import Room
from paceline.server.bodies.reader import COMPLETIONS, Reader
from paceline.server.chat import ChatWriter
from paceline.server.completions import CompletionWriter, completion_job
from paceline.server.errors import ApiError
from paceline.server.logprobs import completion_logprobs
from paceline.server.telemetry.meters import Meters
from paceline.server.token_names import TokenNames

PROMPTS = [[1, 2], [3, 4, 5]]


class Letters:
    """Token 0 is "a", token 1 is "b", ..."""

    def added_text(self, *token_ids: int) -> str:
        return "".join(chr(97 + token) for token in token_ids)

    def decode(self, token_ids, *, skip_special_tokens: bool) -> str:
        assert not skip_special_tokens
        return self.added_text(*token_ids)


def growth_of(
    index: int,
    tokens: list[int],
    *,
    before: int = 0,
    finish: FinishReason | None = None,
    prompt: int = 0,
    is_last: bool = False,
) -> RequestOutput:
    """One piece of one completion.  is_last: of its request."""
    rows = tuple(
        TokenLogprobs(
            token_id=token,
            chosen=-0.5,
            top_ids=(token, 25),
            top_values=(-0.5, -math.inf),
            tokenizer=None,
        )
        for token in tokens
    )
    piece = CompletionOutput(
        index=index,
        num_chars_before=before,
        num_tokens_before=before,
        text=Letters().added_text(*tokens),
        token_ids=tuple(tokens),
        logprobs=rows,
        finish_reason=finish,
        error="the logits were not finite" if finish is FinishReason.ERROR else None,
    )
    metrics = RequestMetrics.from_times(
        arrival_s=0.0,
        first_token_s=None,
        last_token_s=None,
        prompt_tokens=len(PROMPTS[prompt]),
        cached_tokens=prompt,
        output_tokens=4,
        preemptions=0,
        acceptance=Acceptance(),
    )
    return RequestOutput(
        request_id="r",
        prompt=None,
        prompt_token_ids=tuple(PROMPTS[prompt]),
        outputs=(piece,),
        finished=is_last,
        metrics=metrics if is_last else None,
    )


def news_of(prompt: int, num_completions: int) -> list[tuple[int, RequestOutput]]:
    """Two pieces of each completion of a prompt: "ab" and "c"; of the next completion "bc", "d"."""
    firsts = [
        (prompt, growth_of(i, [prompt + i, prompt + i + 1], prompt=prompt))
        for i in range(num_completions)
    ]
    lasts = [
        (
            prompt,
            growth_of(
                i,
                [prompt + i + 2],
                before=2,
                finish=FinishReason.LENGTH,
                prompt=prompt,
                is_last=i == num_completions - 1,
            ),
        )
        for i in range(num_completions)
    ]
    return firsts + lasts


@dataclass
class FakeService:
    """An engine that has said everything: `news`, as (index of the prompt, growth)."""

    news: list[tuple[int, RequestOutput]]
    names: TokenNames = field(default_factory=lambda: TokenNames(Letters()))
    meters: Meters = field(default_factory=Meters)
    model: str = "tiny"
    fingerprint: str = "fp_1"
    num_closed: int = 0

    @property
    def engine(self) -> "FakeService":
        return self

    async def generate(
        self, prompts, params, *, end, second_from, share, stream, deadline
    ) -> "FakeTicket":
        assert end is End.GENERATE
        if stream:
            return FakeTicket(self, self.news)
        wholes = {}
        for index, growth in self.news:
            wholes.setdefault(index, []).append(growth)
        return FakeTicket(self, [(index, joined(grown)) for index, grown in wholes.items()])


class FakeTicket:
    """Gives news one by one, to a reader that is always in time."""

    def __init__(self, service: FakeService, news: list[tuple[int, RequestOutput]]) -> None:
        self._service = service
        self._news = news

    async def __aiter__(self):
        for each in self._news:
            yield each

    def close(self) -> None:
        self._service.num_closed += 1


def job_of(writer, *, prompts=PROMPTS, n: int = 2, stream: bool = False) -> Job:
    return Job(
        prompts=prompts,
        params=SamplingParams(n=n, seed=1, logprobs=2),
        stream=stream,
        include_usage=stream,
        writer=writer,
    )


class FakeRequest:
    """A client that stays."""

    def __init__(self) -> None:
        self.scope = {}

    async def receive(self):
        await asyncio.Event().wait()


def whole(service: FakeService, job: Job) -> dict:
    response = asyncio.run(answer(service, job, FakeRequest()))
    return json.loads(response.body)


def streamed(service: FakeService, job: Job) -> list[dict]:
    """The documents of a stream, without [DONE]."""
    sent = []

    async def play() -> None:
        async def send(message) -> None:
            sent.append(message.get("body", b""))

        response = await answer(service, replace(job, stream=True), FakeRequest())
        await response({}, FakeRequest().receive, send)

    asyncio.run(play())
    events = b"".join(sent).decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""] or '"error"' in events[-2]
    return [json.loads(each.removeprefix("data: ")) for each in events[:-1] if "[DONE]" not in each]


NEWS = [news for pair in zip(news_of(1, 2), news_of(0, 2), strict=True) for news in pair]
TEXTS = ["abc", "bcd", "bcd", "cde"]  # of prompt 0 and of prompt 1


@pytest.mark.parametrize("echoed", [[], ["x", "x", "yy", "yy"]], ids=["plain", "echo"])
def test_choices_of_several_prompts_are_numbered_prompt_by_prompt(echoed) -> None:
    service = FakeService(NEWS)
    job = job_of(CompletionWriter(service.names, echoed))
    wanted = [echo + text for echo, text in zip(echoed or [""] * 4, TEXTS, strict=True)]
    found = Completion.model_validate(whole(service, job))
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    texts = dict.fromkeys(range(4), "")
    for document in streamed(service, job):
        for choice in Completion.construct(**document).choices:
            texts[choice.index] += choice.text
    assert list(texts.values()) == [choice.text for choice in found.choices] == wanted


def test_text_offsets_of_a_stream_go_on_where_the_piece_before_ended() -> None:
    service = FakeService(NEWS)
    documents = streamed(service, job_of(CompletionWriter(service.names, ["x", "x", "yy", "yy"])))
    offsets = {index: [] for index in range(4)}
    for document in documents:
        for choice in Completion.construct(**document).choices:
            offsets[choice.index] += choice.logprobs.text_offset
    assert offsets == {0: [1, 2, 3], 1: [1, 2, 3], 2: [2, 3, 4], 3: [2, 3, 4]}


@pytest.mark.parametrize("stream", [False, True])
def test_usage_is_of_all_prompts_and_told_by_a_stream_that_was_asked(stream: bool) -> None:
    service = FakeService(NEWS)
    job = job_of(CompletionWriter(service.names, []), stream=stream)
    documents = streamed(service, job) if stream else [whole(service, job)]
    usage = documents[-1]["usage"]
    assert usage["prompt_tokens"] == len(PROMPTS[0]) + len(PROMPTS[1])
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == 17
    assert usage["prompt_tokens_details"] == {"cached_tokens": 1}
    assert all(document["usage"] is None for document in documents[:-1])
    silent = streamed(service, replace(job, include_usage=False))
    assert not any("usage" in document for document in silent)


def test_an_echoed_prompt_comes_with_the_first_piece_alone() -> None:
    service = FakeService(news_of(0, 1))
    job = job_of(CompletionWriter(service.names, ["xy"]), prompts=PROMPTS[:1], n=1)
    texts = [document["choices"][0]["text"] for document in streamed(service, job)]
    assert texts == ["xyab", "c"]


@pytest.mark.parametrize(
    ("finish", "status", "text"),
    [
        (FinishReason.ABORT, 503, "the server stops before this answer was whole; send it again"),
        (FinishReason.ERROR, 500, "the logits were not finite"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(finish, status: int, text: str) -> None:
    service = FakeService([(0, growth_of(0, [1], finish=finish, is_last=True))])
    job = job_of(CompletionWriter(service.names, []), prompts=PROMPTS[:1], n=1)
    with pytest.raises(ApiError, match=text) as refused:
        whole(service, job)
    assert refused.value.status == status
    assert service.num_closed == 1
    *_, last = streamed(service, job)
    assert text in last["error"]["message"]
    assert service.num_closed == 2


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_closes_its_ticket_once(stream: bool) -> None:
    service = FakeService(NEWS)
    job = job_of(ChatWriter(service.names))
    (streamed if stream else whole)(service, job)
    assert service.num_closed == 1


def test_a_chat_is_a_role_then_words_then_a_reason() -> None:
    service = FakeService(news_of(0, 1))
    job = job_of(ChatWriter(service.names), prompts=PROMPTS[:1], n=1)
    found = ChatCompletion.model_validate(whole(service, job)).choices[0]
    assert (found.message.role, found.message.content) == ("assistant", "abc")
    documents = streamed(service, job)
    pieces = [ChatCompletionChunk.model_validate(each).choices[0] for each in documents]
    assert [piece.delta.role for piece in pieces] == ["assistant", None, None, None]
    assert [piece.delta.content for piece in pieces] == ["", "ab", "c", None]
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    tokens = [each.token for p in pieces if p.logprobs for each in p.logprobs.content]
    assert tokens == [each.token for each in found.logprobs.content] == ["a", "b", "c"]


def test_a_token_that_cannot_be_has_a_number_in_json() -> None:
    """Minus infinity is none; the API's stand-in is -9999."""
    service = FakeService(news_of(0, 1))
    for writer in (ChatWriter(service.names), CompletionWriter(service.names, [])):
        found = whole(service, job_of(writer, prompts=PROMPTS[:1], n=1))["choices"][0]["logprobs"]
        values = (
            [found["top_logprobs"][0]["z"]]
            if "top_logprobs" in found
            else [found["content"][0]["top_logprobs"][1]["logprob"]]
        )
        assert values == [-9999.0]


class Bytes:
    """Each token is a byte: 0 is "a", others are the bytes of "€" and one that begins nothing."""

    DATA = (b"a", b"\xe2", b"\x82", b"\xac", b"\xff")

    def added_text(self, *token_ids: int) -> str:
        text = b"".join(self.DATA[token] for token in token_ids).decode("utf-8", errors="replace")
        return "" if "\ufffd" in text else text


@pytest.mark.parametrize(
    ("tokens", "offsets"),
    [
        ([0, 1, 2, 3, 0], [3, 4, 4, 4, 5]),  # the three tokens of one character share its place
        ([1, 2, 3, 1, 2, 3], [3, 3, 3, 4, 4, 4]),
        ([4, 4, 4, 4, 0, 0], [3, 3, 3, 3, 3, 4]),  # bytes that are none hold nothing back for long
    ],
)
def test_text_offsets_count_whole_characters(tokens: list[int], offsets: list[int]) -> None:
    found = completion_logprobs(TokenNames(Bytes()), tokens, [None] * len(tokens), offset=3)
    assert found["text_offset"] == offsets


def test_every_choice_echoes_its_own_prompt() -> None:
    body = {"model": "tiny", "prompt": PROMPTS, "n": 2, "echo": True, "logprobs": 1}
    room = Room(context_len=8, max_open=4)
    reader = Reader(model="tiny", room=room, vocab_size=100, tokenizer=Letters())
    job = completion_job(FakeService([]), reader.read(COMPLETIONS, json.dumps(body).encode()))
    assert (job.params.n, job.params.logprobs, job.params.prompt_logprobs) == (2, 1, 1)
    growth = growth_of(0, [25])
    found = [job.writer.whole(index, growth, growth.outputs[0]) for index in range(4)]
    assert [choice["text"] for choice in found] == ["bcz", "bcz", "defz", "defz"]
