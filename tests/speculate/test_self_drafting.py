"""A target that drafts for itself agrees with all that it drafted, or its drafter is broken."""

import pytest
from rounds import ROWS, prefilled
from tiny_drafters import CHAIN, standalone
from tiny_runner import GREEDY, TinyModel

from paceline.core.draft_shape import DraftShape
from paceline.core.request.sampling_params import SamplingParams

SEEDED = [SamplingParams(temperature=0.8, seed=n, max_tokens=None, ignore_eos=True) for n in ROWS]


@pytest.mark.parametrize("graph_max_reqs", [8, None], ids=["recorded", "eager"])
@pytest.mark.parametrize("params", [[GREEDY] * 3, SEEDED], ids=["greedy", "seeded"])
def test_a_chain_is_accepted_whole(tiny: TinyModel, params, graph_max_reqs: int | None) -> None:
    make = standalone(tiny, CHAIN)
    requests = prefilled(tiny, CHAIN, make, params=params, graph_max_reqs=graph_max_reqs)
    for company in (ROWS, ROWS, (7, 2), (7, 2)):
        (outputs,) = requests.driver.rounds(company, 1)
        assert [len(tokens) for tokens in outputs.token_ids] == [CHAIN.max_path] * len(company)
    requests.driver.decode(ROWS)
    (outputs,) = requests.driver.rounds(ROWS, 1)
    assert [len(tokens) for tokens in outputs.token_ids] == [CHAIN.max_path] * 3


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_wide_tree_finds_the_likeliest_path(tiny: TinyModel, page_size: int) -> None:
    shape = DraftShape(num_steps=3, topk=4, num_draft_tokens=37)  # every candidate is verified
    requests = prefilled(
        tiny, shape, standalone(tiny, shape, page_size=page_size), page_size=page_size
    )
    for outputs in requests.driver.rounds(ROWS, 4):
        assert [len(tokens) for tokens in outputs.token_ids] == [shape.max_path] * 3
