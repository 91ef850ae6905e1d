"""Black boxes of requests that generate nothing: what they end in is computed and judged again."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from box_cases import boxed, replayed_as_it_was, written
from embedders import Embedder, make_embedder
from llm_cases import Checkpoint, make_checkpoint, random_prompts

from paceline.core.modes import End
from paceline.llm.admission import NOTHING
from paceline.llm.box.record import NON_FINITE, Landed
from paceline.llm.box.replay import replay

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
    other = [Landed(each.token_ids, each.finish, (1e3,) * len(each.made)) for each in record.landed]
    found = replay(replace(record, landed=tuple(other)), {})
    assert "step 1, row 0 (request-2): recorded numbers of magnitude" in str(found.difference)


@pytest.mark.parametrize("end", [End.POOL, End.SCORE])
def test_numbers_that_are_not_finite_come_again(
    checkpoint: Checkpoint, tmp_path: Path, end: End
) -> None:
    def poison(model: Any) -> None:
        model.get_input_embeddings().weight[77] = math.nan

    sick = make_checkpoint("llama-gqa2-untied", tmp_path / "sick", change=poison)
    prompts = [[5, 6, 7, 8], [5, 6, 77, 8]]
    with boxed(sick, tmp_path / "box", pooling="last") as llm:
        params = replace(NOTHING, prompt_logprobs=0) if end is End.SCORE else None
        trackers = llm.enqueue(llm.admission.admit_end(prompts, end, params))
        while llm.engine.has_work:
            llm.engine.step()
    whole, failed = [tracker.snapshot().outputs[0].error for tracker in trackers]
    [path] = (tmp_path / "box").iterdir()
    assert whole is None
    assert str(failed).endswith(f"its last steps are in {path.name}")
    [record] = written(tmp_path / "box")
    assert (record.failure.kind, record.failure.rows) == (NON_FINITE, (1,))
    found = replay(record, {})
    assert found.is_reproduced
    assert found.difference is None
    cured = replay(record, {"model": str(checkpoint.folder)})
    assert not cured.is_reproduced
    assert "row 1 (request-1): recorded numbers of magnitude nan, here " in str(cured.difference)
