"""The checkpoint most tests of the engine run on; nobody writes to its folder."""

import pytest
from llm_cases import Checkpoint, make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return make_checkpoint("llama-gqa2-untied", tmp_path_factory.mktemp("llama"))
