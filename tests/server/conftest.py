"""What tests of servers share."""

from collections.abc import Iterator
from functools import cache

import pytest
from httpx._transports import default


@pytest.fixture(autouse=True, scope="session")
def certificates_are_read_once() -> Iterator[None]:
    """Every client of httpx, and each call without one, would read those of the whole world, which
    takes longer than most answers; none of them speaks TLS."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(default, "create_ssl_context", cache(default.create_ssl_context))
        yield
