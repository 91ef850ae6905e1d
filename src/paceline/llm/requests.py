"""Requests: what the calls of an LLM queue, under which names, and how they run to their end.

All of it is done by the thread that owns the engine.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from paceline.core.errors import RequestError
from paceline.core.progress import Progress
from paceline.engine.answers.outputs import RequestOutput
from paceline.engine.answers.tracker import Tracker
from paceline.engine.engine import Engine
from paceline.llm.admission import AdmittedPrompt, indexed, require_admitted

# Of the tokens of a step, what starts the first of a call that pools: the device waits for it to
# be read.  Each step behind it takes twice as many, up to all.
FIRST_PART = 4


class Requests:
    """Owns the count of an engine's requests, which names each, and seeds those that bring no
    seed: repeatably for an engine.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
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
        most_tokens: int,
        most: int,
        shown: bool | None,
    ) -> list[RequestOutput]:
        """Run prompts of which nothing is generated, `count` of them, each step as soon as they
        fill it, the first a part of one, so that the device computes while the rest is read.
        Raises RequestError, and what `admitted` raises; nothing is left running then.

        most_tokens, most: of a step, tokens and requests.
        """
        wanted = most_tokens // FIRST_PART
        trackers: list[Tracker] = []
        num_tokens = first = 0  # of the next step; its first prompt
        try:
            for index, each in enumerate(admitted):
                trackers.append(self._add_indexed(engine, each, index, count))
                num_tokens += len(each.token_ids)
                if num_tokens >= wanted or len(trackers) - first >= most:
                    engine.step()
                    num_tokens, first = 0, len(trackers)
                    wanted = min(2 * wanted, most_tokens)
        except BaseException:
            abort_all(engine, trackers)
            raise
        return finish(engine, trackers, shown=shown)

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
    engine: Engine, queued: Sequence[Tracker | RequestOutput], *, shown: bool | None
) -> list[RequestOutput]:
    """Run requests to their end; outputs in their order.  shown: as `use_tqdm` of LLM.generate."""
    trackers = [each for each in queued if isinstance(each, Tracker)]
    outputs = {each: each.snapshot() for each in trackers if each.is_finished}
    left = set(trackers) - outputs.keys()
    try:
        with Progress("prompts", len(trackers), unit="prompt", shown=shown) as bar:
            bar.advance(len(outputs))
            while left and engine.has_work:
                grown = engine.step()
                done = left.intersection(each for each in grown if each.is_finished)
                left -= done
                outputs |= {each: each.snapshot() for each in done}  # while the next step runs
                bar.advance(len(done))
    finally:
        abort_all(engine, trackers)
    outputs |= {each: each.snapshot() for each in left}
    return [outputs[each] if isinstance(each, Tracker) else each for each in queued]


def abort_all(engine: Engine, requests: Sequence[Tracker | RequestOutput]) -> None:
    """End what runs of these."""
    for each in requests:
        if isinstance(each, Tracker):
            engine.abort(each.request.request_id)
