"""Black boxes of requests that generate nothing: what they end in is computed and judged again."""

from pathlib import Path

import pytest
from box_cases import boxed, replayed_as_it_was, written
from embedders import Embedder, make_embedder
from llm_cases import random_prompts

FEW = 6  # steps: less than the prompts have chunks


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Embedder:
    return make_embedder(tmp_path_factory.mktemp("embedder"))


def test_a_body_without_a_head_computes_its_cache_again(embedder: Embedder, tmp_path: Path) -> None:
    options = {"page_size": 4, "chunked_prefill_size": 7, "max_num_batched_tokens": 9}
    with boxed(embedder, tmp_path, kept_steps=FEW, **options) as llm:
        llm.embed(random_prompts((40, 33, 50)))
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    assert len(record.steps) == FEW
    assert replayed_as_it_was(record, sanitize=True).num_restored > 0
