"""The tiny model of the runner's tests."""

import pytest
from tiny_runner import TinyModel, make_tiny


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))
