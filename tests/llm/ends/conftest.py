"""Embedders that the tests of a module share, each made once."""

import pytest
from embedders import Embedder, make_embedder

from paceline.core.modes import Pooling


@pytest.fixture(scope="module", params=Pooling)
def pooled(request, tmp_path_factory) -> tuple[Pooling, Embedder]:
    """Of each way to pool."""
    return request.param, make_embedder(tmp_path_factory.mktemp("embedder"), request.param)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory) -> Embedder:
    """Of the last token's vector."""
    return make_embedder(tmp_path_factory.mktemp("last"))
