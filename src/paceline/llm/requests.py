"""Requests: what the calls of an LLM queue, under which names, and how they run to their end.

All of it is done by the thread that owns the engine.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from paceline.core.errors import RequestError
from paceline.core.progress import Progress
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.engine.engine import Engine
from paceline.llm.admission import AdmittedPrompt, indexed, require_admitted

T = TypeVar("T")

# Of the tokens of a step, what starts the first of a call that pools: the device waits for it to
# be read.  Each step behind it takes twice as many, up to all.
FIRST_PART = 4
FIRST_MOST = 4096  # tokens: reading more takes longer than a long step is faster


class Requests:
    """Owns the count of an engine's requests, which names each, and seeds those that bring no
    seed: repeatably for an engine.
    """

    def __init__(self, seed: int, *, most_tokens: int, most: int) -> None:
        """most_tokens, most: of a step, tokens and requests."""
        self._seed = seed
        self._most_tokens = most_tokens
        self._most = most
        self._count = 0

    def add_all(self, engine: Engine, admitted: Sequence[AdmittedPrompt]) -> list[Tracker]:
        """Queue all or none.  Raises RequestError for what could never run to its end, with its
        index among several."""
        trackers: list[Tracker] = []
        try:
            for index, each in enumerate(admitted):
                trackers.append(self._add_indexed(engine, each, index, len(admitted)))
        except RequestError:
            abort_all(engine, trackers)
            raise
        return trackers

    def add_each(
        self, engine: Engine, admitted: Iterable[AdmittedPrompt | RequestError]
    ) -> list[Tracker | RequestOutput]:
        """Queue what can run, once all are admitted; of what cannot, the output that says why."""
        return [self._add_or_refuse(engine, each) for each in [*admitted]]

    def run_filling(
        self,
        engine: Engine,
        admitted: Iterable[AdmittedPrompt],
        count: int,
        *,
        make: Callable[[list[RequestOutput]], list[T]],
        shown: bool | None,
    ) -> list[T]:
        """Run prompts of which nothing is generated, `count` of them, each step as soon as they
        fill it, the first a part of one, so that the device computes while the rest is read.
        Raises RequestError, and what `admitted` and `make` raise; nothing is left running then.

        make: as of `finish_as`.
        """
        wanted = min(self._most_tokens // FIRST_PART, FIRST_MOST)
        trackers: list[Tracker] = []
        num_tokens = first = 0  # of the next step; its first prompt
        try:
            for index, each in enumerate(admitted):
                trackers.append(self._add_indexed(engine, each, index, count))
                num_tokens += len(each.token_ids)
                if num_tokens >= wanted or len(trackers) - first >= self._most:
                    engine.step()
                    num_tokens, first = 0, len(trackers)
                    wanted = min(2 * wanted, self._most_tokens)
        except BaseException:
            abort_all(engine, trackers)
            raise
        return finish_as(engine, trackers, make, shown=shown)

    def _add_or_refuse(
        self, engine: Engine, admitted: AdmittedPrompt | RequestError
    ) -> Tracker | RequestOutput:
        name = self._next_name()
        try:
            return self._add(engine, name, require_admitted(admitted))
        except RequestError as error:
            return RequestOutput.refused(name, str(error))

    def _add_indexed(
        self, engine: Engine, admitted: AdmittedPrompt, index: int, count: int
    ) -> Tracker:
        try:
            return self._add(engine, self._next_name(), admitted)
        except RequestError as error:
            raise indexed(error, index, count) from error

    def _add(self, engine: Engine, name: str, admitted: AdmittedPrompt) -> Tracker:
        params = admitted.params
        if params.seed is None:
            params = replace(params, seed=(self._seed + self._count) % 2**63)
        return engine.add(
            name,
            admitted.token_ids,
            params,
            packed_ids=admitted.packed_ids,
            prompt=admitted.prompt,
            constraint=admitted.constraint,
            input_rows=admitted.input_rows,
            encoder=admitted.encoder,
            share=admitted.share,
            blocks=admitted.blocks,
            end=admitted.end,
            score_from=admitted.score_from,
            second_from=admitted.second_from,
        )

    def _next_name(self) -> str:
        self._count += 1
        return f"request-{self._count - 1}"


def finish(
    engine: Engine, queued: list[Tracker] | list[Tracker | RequestOutput], *, shown: bool | None
) -> list[RequestOutput]:
    """Run requests to their end; outputs in their order.  Empties `queued`.  shown: as `use_tqdm`
    of LLM.generate."""
    return finish_as(engine, queued, list, shown=shown)


def finish_as(
    engine: Engine,
    queued: list[Tracker] | list[Tracker | RequestOutput],
    make: Callable[[list[RequestOutput]], list[T]],
    *,
    shown: bool | None,
) -> list[T]:
    """As `finish`, in the form that `make` gives outputs: those that end together at once, while
    the next step runs, which hides what letting go of their requests takes, too.  Raises what
    `make` raises; nothing is left running then."""
    count, made = len(queued), dict[int, T]()
    refused = {i: each for i, each in enumerate(queued) if isinstance(each, RequestOutput)}
    left = {each: i for i, each in enumerate(queued) if isinstance(each, Tracker)}
    queued.clear()

    def take(ended: list[Tracker]) -> None:
        found = make([each.snapshot() for each in ended])
        made.update(zip(map(left.pop, ended), found, strict=True))
        bar.advance(len(ended))

    try:
        with Progress("prompts", len(left), unit="prompt", shown=shown) as bar:
            take([each for each in left if each.is_finished])
            while left and engine.has_work:
                take([each for each in engine.step() if each.is_finished and each in left])
            if left:  # which no turn ended
                take([*left])
    finally:
        abort_all(engine, [*left])
    made.update(zip(refused, make([*refused.values()]), strict=True))
    return [made[i] for i in range(count)]


def abort_all(engine: Engine, requests: Sequence[Tracker | RequestOutput]) -> None:
    """End what runs of these."""
    for each in requests:
        if isinstance(each, Tracker):
            engine.abort(each.request.request_id)
