"""AsyncLLM: an LLM that many tasks of an asyncio loop share; their requests run as one batch.

async with AsyncLLM("bundled") as llm:
    async for output in llm.generate("def fibonacci(n):", SamplingParams(temperature=0.0)):
        print(output.outputs[0].text)
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paceline.core.errors import ConfigError, PacelineError, RequestError
from paceline.core.options.engine_options import MAX_QUEUED
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.ticket import Ticket
from paceline.engine.grammar import Grammar
from paceline.llm.async_engine import AsyncEngine
from paceline.llm.inputs import Params, Prompt, as_conversations
from paceline.llm.llm import CHAT_DEFAULTS, LLM
from paceline.llm.prepare import prepare


class AsyncLLM:
    """A model behind one asyncio loop.  Options are those of LLM; `start` reads the weights.

    max_queued_requests: completions that may wait beside the max_num_seqs that run.
    Raises ConfigError or ModelError for options that cannot work.  Not thread-safe.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_queued_requests: int = MAX_QUEUED,
        **options: Any,
    ) -> None:
        if type(max_queued_requests) is not int or max_queued_requests < 0:
            raise ConfigError.about(
                "max_queued_requests",
                expected="an integer of at least 0",
                got=repr(max_queued_requests),
                remedy=f"leave it out for {MAX_QUEUED}",
            )
        self._prepared = prepare(options if model is None else {"model": model, **options})
        self._max_queued = max_queued_requests
        self._is_new = True
        self._started: tuple[LLM, AsyncEngine] | None = None

    async def start(self) -> None:
        """Boot beside the running loop and serve it; `async with` starts and closes."""
        if not self._is_new:
            raise PacelineError.about(
                "AsyncLLM", expected="new", got="started", remedy="start it once"
            )
        self._is_new = False
        try:
            llm, engine = await asyncio.to_thread(self._boot)
        except PacelineError:
            self._is_new = True
            raise
        engine.start()
        self._started = llm, engine

    async def close(self) -> None:
        """End what runs with a last snapshot and free the memory; closing twice is harmless."""
        started, self._started = self._started, None
        if started is not None:
            llm, engine = started
            await engine.stop()
            llm.close()
            self._is_new = True

    async def __aenter__(self) -> "AsyncLLM":
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def generate(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Complete one prompt: snapshots, whose text and ids accumulate, as they come; the last is
        finished.  A slow reader misses some.

        prompt, sampling_params, grammar: as of LLM.generate, but one; ask for several prompts in
        several tasks.  Closing the generator, or cancelling the task that awaits it, ends the
        request.
        Raises RequestError for a wrong request, BusyError when the queue is full.
        """
        ticket = await self._queue(prompt, sampling_params, grammar, stream=True)
        try:
            async for _, snapshot in ticket:
                yield snapshot
        finally:
            ticket.close()

    async def complete(
        self,
        prompt: Prompt,
        sampling_params: Params | None = None,
        *,
        grammar: Grammar | None = None,
    ) -> RequestOutput:
        """The last of what `generate` gives, for a caller who does not watch it grow."""
        ticket = await self._queue(prompt, sampling_params, grammar, stream=False)
        try:
            _, output = await anext(ticket)
        finally:
            ticket.close()
        return output

    def chat(
        self,
        messages: Iterable[Any],
        sampling_params: Params | None = None,
        *,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Answer one conversation, as `generate` does; the rest as of LLM.chat."""
        self._prepared.admission.require_tokenizer().require_chat_template()
        conversations = as_conversations(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables=chat_template_kwargs or {},
        )
        _require_one("messages", conversations)
        return self.generate(
            conversations[0], CHAT_DEFAULTS if sampling_params is None else sampling_params
        )

    def report(self) -> dict[str, Any]:
        """As of LLM.report, once started."""
        return self._live[0].report()

    def _boot(self) -> tuple[LLM, AsyncEngine]:
        llm = LLM(self._prepared)
        return llm, AsyncEngine(llm, max_queued=self._max_queued)

    async def _queue(
        self, prompt: Prompt, params: Params | None, grammar: Grammar | None, *, stream: bool
    ) -> Ticket:
        _, engine = self._live
        admission = self._prepared.admission
        admitted = await asyncio.to_thread(admission.admit, prompt, params, grammar)
        _require_one("prompt", admitted)
        return await engine.generate(admitted, stream=stream)

    @property
    def _live(self) -> tuple[LLM, AsyncEngine]:
        if self._started is None:
            remedy = 'start it: `async with AsyncLLM("bundled") as llm:`'
            raise PacelineError.about(
                "AsyncLLM", expected="started", got="new or closed", remedy=remedy
            )
        return self._started


def _require_one(name: str, several: Sequence[object]) -> None:
    if len(several) != 1:
        remedy = "ask for each in a task of its own, for example with asyncio.gather"
        raise RequestError.about(name, expected="one", got=len(several), remedy=remedy)
