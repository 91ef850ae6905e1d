"""A record of a model with recurrent layers is run again from states that are computed again."""

from pathlib import Path

import pytest
from box_cases import replayed_as_it_was, written
from llm_cases import GREEDY, random_prompts
from test_llm_states import Alone, alone, registered  # noqa: F401  fixtures

from paceline.llm.boot import Knobs


@pytest.mark.parametrize("turns", [11, 20])
def test_the_last_few_steps_say_the_same(alone: Alone, tmp_path: Path, turns: int) -> None:  # noqa: F811
    """Requests that start from kept states, some of them kept before the first step."""
    prompts = random_prompts((20, 40, 27))
    prompts[1][:19] = prompts[2][:19] = prompts[0][:19]
    box = str(tmp_path)
    with alone.llm(black_box_dir=box, knobs=Knobs(kept_steps=6)) as llm:
        for turn in range(turns):
            if turn in (0, 4, 14):
                llm.submit([prompts[(0, 4, 14).index(turn)]], GREEDY)
            llm.engine.step()
        llm.keep_stuck("nowhere")
    [record] = written(tmp_path)
    assert len(record.steps) == 6
    found = replayed_as_it_was(record, sanitize=True)
    assert found.num_restored > 10
