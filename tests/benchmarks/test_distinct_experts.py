"""How many experts a decode step reads: of one request as many as it takes, of more no fewer."""

import pytest
import transformers

from distinct_experts import Distinct, measure
from paceline.llm.llm import LLM

EXPERTS, TAKEN, LAYERS = 6, 2, 2
EXPERT_BYTES = 3 * 48 * 32 * 4  # gate, up and down of 48 columns, in float32


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Distinct]:
    """Of 1 and 16 requests."""
    folder = tmp_path_factory.mktemp("experts")
    config = transformers.Qwen3MoeConfig(
        vocab_size=160,
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        num_experts=EXPERTS,
        num_experts_per_tok=TAKEN,
    )
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
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
