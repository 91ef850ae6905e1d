"""Followed: the requests of an LLM that callers elsewhere wait for, by the number of their ticket.

A turn says which of them have news; what the news are is read when they are told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.engine.answers.tracker import Tracker
from paceline.llm.admission import AdmittedPrompt
from paceline.llm.llm import LLM

LULL_S = 0.2  # without work, after which graphs are made ready: who answers an answer is quicker


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Following:
    """One prompt of one ticket."""

    number: int  # of the ticket
    index: int  # of the prompt in its ticket
    is_watched: bool  # whether news of it are worth telling before it has ended
    tracker: Tracker


class Followed:
    """Owns them; of the thread that owns the LLM."""

    def __init__(self, llm: LLM) -> None:
        llm.admission.prepare_structures()  # now, while nobody waits for a turn
        self._llm = llm
        self._by_name: dict[str, Following] = {}  # by request id
        self._names: dict[int, set[str]] = {}  # of these, by the number of their ticket

    @property
    def has_work(self) -> bool:
        """Whether a turn would do anything."""
        return self._llm.engine.has_work

    def make_ready(self) -> bool:
        """Make one graph that coming turns would stop for; whether there was one.  For who has had
        no work for LULL_S, and looks for some before asking again."""
        return self._llm.engine.idle()

    def submit(self, number: int, admitted: Sequence[AdmittedPrompt], *, stream: bool) -> None:
        """Queue the prompts of a ticket, all or none.  stream: tell of them while they run.
        Raises RequestError."""
        trackers = self._llm.enqueue(admitted)
        for index, tracker in enumerate(trackers):
            name = tracker.request.request_id
            self._by_name[name] = Following(
                number=number, index=index, is_watched=stream, tracker=tracker
            )
            self._names.setdefault(number, set()).add(name)

    def turn(self) -> list[Following]:
        """One turn of the engine; returns those with news that are worth telling."""
        news = []
        for tracker in self._llm.engine.step():
            following = self._by_name.get(tracker.request.request_id)
            if following is None:
                continue
            if tracker.is_finished:
                self._forget(following)
            if tracker.is_finished or following.is_watched:
                news.append(following)
        return news

    def cancel(self, number: int) -> None:
        """End what runs of a ticket, of which nobody is told."""
        for name in self._names.pop(number, ()):
            del self._by_name[name]
            self._llm.abort(name)

    def abort(self) -> list[Following]:
        """End every request; returns them, for their last news."""
        ended = list(self._by_name.values())
        for name in self._by_name:
            self._llm.abort(name)
        self._by_name.clear()
        self._names.clear()
        return ended

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, number: int) -> bool:
        """Whether something of a ticket runs or waits."""
        return number in self._names

    def _forget(self, following: Following) -> None:
        """A prompt has ended."""
        name, names = following.tracker.request.request_id, self._names[following.number]
        del self._by_name[name]
        names.remove(name)
        if not names:
            del self._names[following.number]
