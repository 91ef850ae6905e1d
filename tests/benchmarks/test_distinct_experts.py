"""How many experts a decode step reads: of one request as many as it takes, of more no fewer."""

import pytest
import tiny_checkpoints

from distinct_experts import Distinct, measure
from paceline.llm.llm import LLM

CASE = "qwen3_moe-normalised-dense-layer"
EXPERTS, TAKEN, LAYERS = 6, 2, 2  # of three layers one is dense
EXPERT_BYTES = 3 * 28 * 40 * 4  # gate, up and down of 28 columns, in float32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Distinct]:
    """Of 1 and 16 requests."""
    folder = tmp_path_factory.mktemp("experts")
    tiny_checkpoints.save(CASE, folder)
    asked = {"dtype": "float32", "threads": 1, "max_num_seqs": 16, "enforce_eager": True}
    with LLM(str(folder), **asked, enable_prefix_cache=False) as llm:
        return [measure(llm, size, input_len=5) for size in (1, 16)]


def test_one_request_reads_what_it_takes(found: list[Distinct]) -> None:
    one, _ = found
    assert (one.batch_size, one.experts, one.distinct) == (1, EXPERTS, TAKEN)
    assert one.mib == pytest.approx(LAYERS * TAKEN * EXPERT_BYTES / 2**20)
    assert one.of_experts == pytest.approx(TAKEN / EXPERTS)


def test_many_read_more_and_no_more_than_all(found: list[Distinct]) -> None:
    _, many = found
    assert TAKEN < many.distinct <= EXPERTS
    assert many.of_experts == pytest.approx(many.distinct / EXPERTS)
