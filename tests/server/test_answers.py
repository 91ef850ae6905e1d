"""What a job's growths become, whole and streamed, as the openai client's own types read them."""

import asyncio
import json
import math
from dataclasses import dataclass, field, replace

import pytest
from openai.types import Completion

from paceline.core.sampling_params import SamplingParams
from paceline.engine.admission import Admitted
from paceline.engine.outputs import CompletionGrowth, RequestGrowth, RequestMetrics
from paceline.engine.request import FinishReason
from paceline.engine.round_counts import RoundCounts
from paceline.engine.ticket import Ticket
from paceline.engine.token_logprobs import TokenLogprobs
from paceline.server.answer import Job, answer
from paceline.server.completions import CompletionWriter
from paceline.server.token_names import TokenNames

PROMPTS = [[1, 2], [3, 4, 5]]


class Letters:
    """Token 0 is "a", token 1 is "b", ..."""

    def added_text(self, *token_ids: int) -> str:
        return "".join(chr(97 + token) for token in token_ids)


def growth_of(
    index: int,
    tokens: list[int],
    *,
    before: int = 0,
    finish: FinishReason | None = None,
    prompt: int = 0,
    is_last: bool = False,
) -> RequestGrowth:
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
    piece = CompletionGrowth(
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
        rounds=RoundCounts(),
    )
    return RequestGrowth(
        prompt_token_ids=tuple(PROMPTS[prompt]),
        outputs=(piece,),
        finished=is_last,
        metrics=metrics if is_last else None,
    )


def news_of(prompt: int, num_completions: int) -> list[tuple[int, RequestGrowth]]:
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

    news: list[tuple[int, RequestGrowth]]
    names: TokenNames = field(default_factory=lambda: TokenNames(Letters()))
    model: str = "tiny"
    fingerprint: str = "fp_1"
    num_closed: int = 0

    @property
    def engine(self) -> "FakeService":
        return self

    async def admit(self, prompts, params) -> list[Admitted]:
        return [Admitted(prompt=None, token_ids=tuple(ids), params=params) for ids in prompts]

    async def generate(self, admitted, *, telling, stream: bool) -> Ticket:
        ticket = Ticket(
            len(admitted),
            num_completions=sum(each.params.n for each in admitted),
            telling=telling,
            stream=stream,
            on_close=self._on_close,
        )
        self._left = list(self.news)
        while self._left and not stream:
            ticket.deliver(*self._left.pop(0))
        self._feed(ticket)
        return ticket

    def _feed(self, ticket: Ticket) -> None:
        """One growth at a time, so that a reader in time gets each alone."""
        if self._left:
            ticket.deliver(*self._left.pop(0))
            asyncio.get_running_loop().call_soon(self._feed, ticket)

    def _on_close(self, ticket: Ticket) -> None:
        self.num_closed += 1


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
