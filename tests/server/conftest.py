"""What tests of servers share."""

import inspect
from collections.abc import Iterator
from functools import cache

import httpx
import pytest
from httpx._transports import default


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx, and each call without one, would read those of the whole world, which
    takes longer than most answers; none of them speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield


@pytest.fixture(autouse=True, scope="session")
def answers_may_take_what_a_busy_machine_needs() -> Iterator[None]:
    """Where a test asks for no other time httpx waits 5 s, and reads nothing that came later."""
    usual = inspect.signature(httpx.get).parameters["timeout"].default
    with pytest.MonkeyPatch.context() as patch:
        for phase in ("connect", "read", "write", "pool"):
            patch.setattr(usual, phase, 60.0)
        yield
