"""What an EAGLE head keeps is what one dense pass over the request's tokens makes of them."""

import pytest
from rounds import (
    LENGTHS,
    ROWS,
    Requests,
    Spy,
    cache_of,
    dense_state,
    prefilled,
    spied,
)
from tiny_drafters import CHAIN, TREE, eagle3
from tiny_runner import Driver, TinyModel, random_prompts

from paceline.core.request.sampling_params import SamplingParams

# What is sampled follows the noise, which the head draws too: it is right now and then.
HOT = [SamplingParams(temperature=9.0, seed=n, max_tokens=None, ignore_eos=True) for n in ROWS]


def check(tiny: TinyModel, requests: Requests, *, known: dict[int, list[int]]) -> None:
    """known: of each row every token committed, and the one behind them."""
    proposer = requests.driver.parts.proposer
    features = proposer.named_tensors()["draft.features"]
    for row, tokens in known.items():
        length = len(tokens) - 1
        assert requests.committed(row) == length
        wanted = dense_state(tiny, proposer.model, tokens)
        cache = cache_of(requests, row, length)
        for name, got, expected in (
            ("keys of the drafter", cache["draft-full.k.0"], wanted.keys),
            ("values of the drafter", cache["draft-full.v.0"], wanted.values),
            ("the kept feature", features[row], wanted.feature),
        ):
            error = (got - expected).abs().max().item()
            assert error <= 1e-3 * expected.abs().max().item(), f"{name} of row {row}: {error}"


def known_of(requests: Requests) -> dict[int, list[int]]:
    return {row: requests.known(row) for row in ROWS}


def test_a_chunk_ends_with_the_next_token_of_the_prompt(tiny: TinyModel) -> None:
    driver = Driver(
        tiny,
        draft=CHAIN,
        make_proposer=eagle3(tiny, CHAIN),
        graph_max_reqs=None,
        boot=False,
        sanitize=False,
    )
    prompts = dict(zip(ROWS, random_prompts(LENGTHS), strict=True))
    for row, prompt in prompts.items():
        driver.join(row, prompt)
    lens = {row: len(prompt) - 1 for row, prompt in prompts.items()}
    driver.collect(driver.launch_prefill(lens, emits=False))
    check(tiny, Requests(driver, prompts), known=prompts)


def test_a_prompt_ends_with_the_sampled_token(tiny: TinyModel) -> None:
    requests = prefilled(tiny, CHAIN, eagle3(tiny, CHAIN))
    check(tiny, requests, known=known_of(requests))


def test_plain_steps_are_observed(tiny: TinyModel) -> None:
    requests = prefilled(tiny, CHAIN, eagle3(tiny, CHAIN))
    requests.driver.decode(ROWS, 3)
    check(tiny, requests, known=known_of(requests))


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("graph_max_reqs", [8, None], ids=["recorded", "eager"])
def test_rounds_are_observed(tiny: TinyModel, shape, graph_max_reqs: int | None) -> None:
    make = eagle3(tiny, shape)
    requests = prefilled(tiny, shape, make, params=HOT, graph_max_reqs=graph_max_reqs)
    lens = set()
    for company in (ROWS, ROWS, (7, 2), (7, 2), ROWS):
        (outputs,) = requests.driver.rounds(company, 1)
        lens |= {len(tokens) for tokens in outputs.token_ids}
        check(tiny, requests, known=known_of(requests))
    assert lens >= {1, 2, 3}, "drafts are accepted, and not all"


def test_the_first_draft_is_the_heads_best_token(tiny: TinyModel) -> None:
    requests = prefilled(tiny, CHAIN, spied(eagle3(tiny, CHAIN)))
    spy = requests.driver.parts.proposer
    assert isinstance(spy, Spy)
    wanted = {}
    for row, tokens in known_of(requests).items():
        feature = dense_state(tiny, spy.model, tokens).feature
        wanted[row] = 2 * int(spy.model.logits(feature.unsqueeze(0)).argmax())
    requests.driver.rounds(ROWS, 1)
    assert dict(zip(ROWS, spy.trees[0].tokens[:, 1].tolist(), strict=True)) == wanted


def test_a_head_drafts_behind_the_context_it_was_trained_with(tiny: TinyModel) -> None:
    make = eagle3(tiny, CHAIN, max_position=16)
    requests = prefilled(tiny, CHAIN, make, lengths=(5, 30, 14))
    requests.driver.rounds(ROWS, 2)
    check(tiny, requests, known=known_of(requests))
