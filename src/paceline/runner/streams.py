"""Streams: where device work is queued.  CUDA streams, an inline CPU stream, a deferred CPU stream.

All work of a step goes through `Stream.run`, so that one program runs on all three.  The deferred
stream executes queued work only at waits: staging and overlap races, which a GPU shows now and
then, show on a CPU every time.
"""

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable

import torch

from paceline.kernels.stand_in import device_type

Work = Callable[[], None]


class StreamEvent(ABC):
    """A point in a stream's work."""

    @abstractmethod
    def wait(self) -> None:
        """Block the host until everything queued before the event has executed."""


class Stream(ABC):
    """Executes work in the order given."""

    @abstractmethod
    def run(self, work: Work) -> None:
        """Queue `work`; it may execute now or at any time before a wait returns."""

    @abstractmethod
    def record(self) -> StreamEvent:
        """An event after all work queued so far."""

    def synchronize(self) -> None:
        """Wait for all work queued so far."""
        self.record().wait()


class _DoneEvent(StreamEvent):
    def wait(self) -> None:
        return None


class InlineStream(Stream):
    """The CPU's stream: work executes as it is given."""

    def run(self, work: Work) -> None:
        work()

    def record(self) -> StreamEvent:
        return _DoneEvent()


class _DeferredEvent(StreamEvent):
    def __init__(self, stream: "DeferredStream", position: int) -> None:
        self._stream = stream
        self._position = position

    def wait(self) -> None:
        self._stream.execute_until(self._position)


class DeferredStream(Stream):
    """A CPU stream that executes nothing until somebody waits: the worst schedule a GPU allows."""

    def __init__(self) -> None:
        self._queue: deque[Work] = deque()
        self._executed = 0

    def run(self, work: Work) -> None:
        self._queue.append(work)

    def record(self) -> StreamEvent:
        return _DeferredEvent(self, self._executed + len(self._queue))

    def execute_until(self, position: int) -> None:
        """Execute queued work up to an event's position."""
        while self._executed < position:
            work = self._queue.popleft()
            self._executed += 1
            work()


class _CudaEvent(StreamEvent):
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def wait(self) -> None:
        self._event.synchronize()


class CudaStream(Stream):
    """A CUDA stream; `run` launches asynchronously."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def run(self, work: Work) -> None:
        with torch.cuda.stream(self._stream):
            work()

    def record(self) -> StreamEvent:
        return _CudaEvent(self._stream)


def make_stream(device: torch.device) -> Stream:
    """The production stream of a device."""
    return CudaStream(device) if device_type(device) == "cuda" else InlineStream()
