"""Runners of ranks, each with its part of a model and of the caches, take the steps of one runner
of the whole: eager, recorded and replayed, under the sanitizer, which runs every step twice."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count

import pytest
import torch
from tiny_drafters import CHAIN, TREE, eagle3
from tiny_runner import Driver, TinyModel, random_prompts

from paceline.core.draft_shape import DraftShape
from paceline.core.errors import SanitizerError
from paceline.core.parallel import Parallel, of_rank
from paceline.kernels import all_reduce
from paceline.kernels.all_reduce import Exchange, open_exchange
from paceline.layers.weights.dense import DENSE
from paceline.layers.weights.parameter import Placement
from paceline.models.registry import architecture

CPU = torch.device("cpu")
PROMPTS = dict(zip((1, 2, 3), random_prompts((9, 30, 17)), strict=True))
STEPS = 12


def part_of(tiny: TinyModel, parallel: Parallel, way: Exchange) -> TinyModel:
    """A rank's model, filled from the checkpoint of `tiny`."""
    model = architecture(tiny.config.model_type).build(
        tiny.config, parallel=parallel, placement=Placement(CPU, torch.float32, DENSE, way)
    )
    stored = tiny.theirs.state_dict()
    with torch.no_grad():
        for name, target in model.destinations().items():
            target.copy_(stored[name])
    model.requires_grad_(False)
    return replace(tiny, config=of_rank(tiny.config, parallel), ours=model)


def tokens_of(tiny: TinyModel, graph_max_reqs: int | None) -> dict[int, list[int]]:
    """By row: a prefill, decodes of two sizes, and a request that joins between them."""
    driver = Driver(tiny, graph_max_reqs=graph_max_reqs)
    driver.prefill({row: PROMPTS[row] for row in (1, 2)})
    driver.decode((1, 2), STEPS // 2)
    driver.prefill({3: PROMPTS[3]})
    driver.decode_overlapped([(1, 2, 3)] * (STEPS // 2))
    return driver.tokens


def rounds_of(tiny: TinyModel, shape: DraftShape) -> dict[int, list[int]]:
    """By row: a prefill and rounds of a head that every rank has whole."""
    driver = Driver(tiny, draft=shape, make_proposer=eagle3(tiny, shape))
    driver.prefill({row: PROMPTS[row] for row in (1, 2)})
    driver.rounds((1, 2), 6)
    return driver.tokens


def on_ranks(
    tiny: TinyModel, size: int, work: Callable[[TinyModel], dict[int, list[int]]]
) -> Sequence[dict[int, list[int]]]:
    ways = open_exchange(size, 256 * 160, dtype=torch.float32, device=CPU)
    parts = [part_of(tiny, Parallel(rank, size), way) for rank, way in enumerate(ways)]
    with ThreadPoolExecutor(size) as threads:
        return list(threads.map(work, parts))


@pytest.mark.parametrize("family", ["tiny", "tiny_gemma"])
@pytest.mark.parametrize("graph_max_reqs", [None, 8], ids=["eager", "graphs"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_generate_what_one_process_generates(
    request: pytest.FixtureRequest, family: str, size: int, graph_max_reqs: int | None
) -> None:
    tiny: TinyModel = request.getfixturevalue(family)
    ranks = on_ranks(tiny, size, lambda part: tokens_of(part, graph_max_reqs))
    assert all(rank == ranks[0] for rank in ranks)
    assert ranks[0] == tokens_of(tiny, graph_max_reqs)
    for row, prompt in PROMPTS.items():
        assert ranks[0][row] == tiny.greedy(prompt, len(ranks[0][row]))


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_rounds_on_ranks_accept_what_one_process_accepts(
    tiny: TinyModel, shape: DraftShape
) -> None:
    ranks = on_ranks(tiny, 2, lambda part: rounds_of(part, shape))
    assert ranks[0] == ranks[1] == rounds_of(tiny, shape)
    assert len(ranks[0][1]) >= 7  # one behind the prompt, and of each round at least one


def test_the_sanitizer_sees_a_sum_that_differs_between_its_runs(
    tiny: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a rank reads the box before another has written: here of every second sum."""
    calls = count(1)
    exact = all_reduce.all_reduce_reference
    monkeypatch.setattr(
        all_reduce, "all_reduce_reference", lambda parts: exact(parts) + next(calls) % 2
    )
    with pytest.raises(SanitizerError, match="logits"):
        on_ranks(tiny, 2, lambda part: tokens_of(part, None))
