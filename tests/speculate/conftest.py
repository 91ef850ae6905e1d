"""The tiny models and drafters of the runner's tests, and dense attention to check against."""

import sys
from pathlib import Path

import pytest

for folder in ("runner", "models", "layers"):
    sys.path.append(str(Path(__file__).parents[1] / folder))

from tiny_runner import TinyModel, make_tiny  # noqa: E402


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny("llama", tmp_path_factory.mktemp("llama"))
