"""Work for a client ends when the client goes: nothing of it is left running or open."""

import asyncio

import pytest

from paceline.server.stream import ClientGone, EventStream, event, unless_gone


class Client:
    """Stays until `leave`."""

    def __init__(self) -> None:
        self._gone = asyncio.Event()

    def leave(self) -> None:
        self._gone.set()

    async def receive(self) -> dict:
        await self._gone.wait()
        return {"type": "http.disconnect"}


def test_work_of_a_client_that_leaves_is_cancelled() -> None:
    ends = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            ends.append("cancelled")
            raise

    async def play() -> None:
        client = Client()
        asyncio.get_running_loop().call_soon(client.leave)
        with pytest.raises(ClientGone):
            await asyncio.wait_for(unless_gone(client.receive, work()), 10)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())
    assert ends == ["cancelled"]


def test_work_that_ends_first_is_answered_and_nobody_listens_on() -> None:
    async def work() -> int:
        return 3

    async def play() -> None:
        assert await unless_gone(Client().receive, work()) == 3
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())


@pytest.mark.parametrize("end", ["whole", "left", "broken"])
def test_a_stream_closes_its_events_however_it_ends(end: str) -> None:
    closed, sent = [], []

    async def play() -> None:
        client = Client()

        async def events():
            try:
                yield event(b"1")
                if end == "left":
                    client.leave()
                    await asyncio.Event().wait()
                if end == "broken":
                    raise ValueError("no more")
                yield event(b"2")
            finally:
                closed.append(True)

        async def send(message) -> None:
            sent.append(message)

        stream = EventStream(events())
        try:
            await asyncio.wait_for(stream({}, client.receive, send), 10)
        except ValueError:
            assert end == "broken"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play())
    assert closed == [True]
    assert sent[0]["status"] == 200
    bodies = [message["body"] for message in sent[1:]]
    assert bodies == [b"data: 1\n\n"] + ([b"data: 2\n\n", b""] if end == "whole" else [])


def test_a_stream_whose_client_left_between_two_events_is_closed() -> None:
    """The generator stands at its first event: nobody asks it for the next."""
    closed = []

    async def play() -> None:
        client = Client()

        async def events():
            try:
                yield event(b"1")
                yield event(b"2")
            finally:
                closed.append(True)

        async def send(message) -> None:
            if message.get("body"):
                client.leave()
                await asyncio.Event().wait()

        stream = EventStream(events())
        await asyncio.wait_for(stream({}, client.receive, send), 10)
        assert closed == [True]

    asyncio.run(play())
