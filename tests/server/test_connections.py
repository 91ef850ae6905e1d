"""What a connection may take, and what is said to one that takes more."""

import asyncio
import json
import socket
from types import SimpleNamespace

import pytest
from serving import serving, small_llm, wait_until

from paceline.server.limits import ServerLimits
from paceline.server.protocol import protocol_of

GOOD = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
WHOLE = POST + b"Content-Length: %d\r\n\r\n%b" % (len(GOOD), GOOD)
HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture(scope="module")
def server():
    limits = ServerLimits(header_s=0.2, body_s=0.2, idle_s=0.2, max_connections=3)
    with serving(small_llm(), limits=limits) as world:
        yield world


@pytest.fixture
def connect(server):
    host, port = server.url.removeprefix("http://").split(":")
    ends = []

    def connected():
        ends.append(socket.create_connection((host, int(port))))
        return ends[-1]

    yield connected
    for end in ends:
        end.close()


def until_closed(end):
    """(statuses, the last body) of everything that comes."""
    read = b"".join(iter(lambda: end.recv(65536), b""))
    statuses = [int(part[:3]) for part in read.split(b"HTTP/1.1 ")[1:]]
    return statuses, read.rpartition(b"\r\n\r\n")[2]


def message_in(body):
    return json.loads(body)["error"]["message"]


@pytest.mark.parametrize("sent", [b"", b"GET /hea", HEALTH[:-2]])
def test_a_head_that_does_not_come_is_answered_with_408_and_the_connection_ends(connect, sent):
    end = connect()
    end.sendall(sent)
    statuses, body = until_closed(end)
    assert statuses == [408]
    text = "the head of a request must be whole within 0.2 s, got a part; send it at once, or raise"
    assert message_in(body).startswith(text)


def test_so_is_the_head_of_a_second_request(connect):
    end = connect()
    end.sendall(HEALTH)
    assert end.recv(1 << 16).startswith(b"HTTP/1.1 200")
    end.sendall(HEALTH[:20])
    assert until_closed(end)[0] == [408]


def test_an_idle_connection_ends_without_a_word(connect):
    end = connect()
    end.sendall(HEALTH)
    assert until_closed(end)[0] == [200]


@pytest.mark.parametrize(
    "length", [b"Content-Length: 9\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{"]
)
def test_a_body_that_does_not_come_is_answered_with_408(connect, length):
    end = connect()
    end.sendall(POST + length)
    statuses, body = until_closed(end)
    assert statuses == [408]
    text = (
        "the body must be whole within 0.2 s, got a part; send it faster, or raise --body-timeout"
    )
    assert message_in(body).startswith(text)


@pytest.mark.parametrize("order", [1, -1])
def test_two_lengths_are_a_400_and_nothing_behind_them_is_read(connect, order):
    lengths = [b"Content-Length: 4\r\n", b"Transfer-Encoding: chunked\r\n"][::order]
    end = connect()
    end.sendall(POST + b"".join(lengths) + b"\r\n0\r\n\r\n" + HEALTH)
    statuses, body = until_closed(end)
    assert statuses == [400]
    assert message_in(body).startswith(
        "the length of the body must be told once, got Content-Length"
    )


def test_what_is_no_http_is_a_400_of_the_one_shape(connect):
    end = connect()
    end.sendall(b"\x16\x03\x01 hello\r\n\r\n")
    statuses, body = until_closed(end)
    assert (statuses, message_in(body)) == (
        [400],
        "the request must be HTTP/1.1, got what is none; use an HTTP client",
    )


def test_a_client_that_has_closed_its_half_gets_its_answer(connect):
    end = connect()
    end.sendall(WHOLE)
    end.shutdown(socket.SHUT_WR)
    statuses, body = until_closed(end)
    assert statuses == [102, 200]
    assert json.loads(body)["choices"][0]["finish_reason"] == "length"


def test_one_connection_too_many_is_told_so(connect, server):
    wait_until(lambda: not server.connections)
    held = [connect() for _ in range(3)]
    wait_until(lambda: len(server.connections) == 3)
    statuses, body = until_closed(connect())
    assert statuses == [503]
    assert message_in(body).startswith(
        "the server must be asked through at most 3 connections, got one"
    )
    assert len(held) == 3


def test_a_client_that_does_not_read_is_left():
    """By a transport that says it is full."""
    aborted = []

    async def fill():
        loop = asyncio.get_running_loop()
        limits = ServerLimits(write_s=0.01)
        config = SimpleNamespace(
            loaded=True, loaded_app=None, h11_max_incomplete_event_size=None, root_path="",
            ws_protocol_class=None, asgi_version="3.0", limit_concurrency=None,
            timeout_keep_alive=1,
        )  # fmt: skip
        state = SimpleNamespace(connections=set(), tasks=set(), default_headers=[])
        protocol = protocol_of(limits)(config=config, server_state=state, app_state={}, _loop=loop)
        ended = asyncio.Event()
        transport = SimpleNamespace(
            get_extra_info=lambda name: None,
            abort=lambda: (aborted.append(1), ended.set()),
            is_closing=lambda: False,
        )
        protocol.connection_made(transport)
        protocol.pause_writing()
        protocol.resume_writing()
        await asyncio.sleep(0.03)
        assert not aborted
        protocol.pause_writing()
        await ended.wait()
        protocol.connection_lost(ConnectionAbortedError())

    asyncio.run(fill())
    assert aborted == [1]
