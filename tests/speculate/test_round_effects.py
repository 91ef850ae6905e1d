"""What rounds leave behind: the text of plain decoding, its KV, and nothing after the end."""

from dataclasses import replace

import pytest
import torch
from rounds import ROWS, Requests, cache_of, prefilled, rounds_in_changing_company
from tiny_drafters import CHAIN, TREE, eagle3, ngram, nobody, standalone
from tiny_runner import CONTEXT, GREEDY, Driver, TinyModel

from paceline.core.draft_shape import NO_DRAFTS
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import FinishCode

NOISE = 0.1  # a drafter that is right now and then
SEEDED = SamplingParams(temperature=0.8, top_p=0.9, seed=7, max_tokens=None, ignore_eos=True)
# Three tokens take turns, each until it was said too often.
ROUND_ROBIN = replace(GREEDY, frequency_penalty=2.0, logit_bias={10: 60.0, 11: 59.3, 12: 58.7})


def plain_text(tiny: TinyModel, requests: Requests, params: SamplingParams) -> dict[int, list[int]]:
    """What plain decoding says for as long."""
    plain = prefilled(tiny, NO_DRAFTS, nobody, params=(params,) * 3)
    said = requests.driver.tokens
    plain.driver.decode(ROWS, max(map(len, said.values())))
    return {row: plain.driver.tokens[row][: len(said[row])] for row in ROWS}


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_the_text_is_that_of_plain_decoding(tiny: TinyModel, shape, params) -> None:
    make = standalone(tiny, shape, noise=NOISE)
    requests = prefilled(tiny, shape, make, params=(params,) * 3)
    rounds_in_changing_company(requests)
    requests.driver.rounds(ROWS, 4)
    assert requests.driver.tokens == plain_text(tiny, requests, params)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_round_that_nobody_drafts_is_a_decode_step(tiny: TinyModel, params) -> None:
    requests = prefilled(tiny, NO_DRAFTS, nobody, params=(params,) * 3)
    outputs = requests.driver.rounds(ROWS, 4)
    assert {len(tokens) for each in outputs for tokens in each.token_ids} == {1}
    assert requests.driver.tokens == plain_text(tiny, requests, params)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_penalties_count_the_drafts_of_the_path(tiny: TinyModel, shape) -> None:
    requests = prefilled(tiny, shape, ngram(shape), params=(ROUND_ROBIN,) * 3)
    requests.driver.rounds(ROWS, 8)
    said = requests.driver.tokens
    assert said == plain_text(tiny, requests, ROUND_ROBIN)
    assert len(said[2]) > 1 + 8, "no draft was accepted"


@pytest.mark.parametrize("page_size", [1, 4])
def test_the_cache_is_that_of_a_prefill_of_the_text(tiny: TinyModel, page_size: int) -> None:
    make = standalone(tiny, TREE, noise=NOISE, page_size=page_size)
    requests = prefilled(tiny, TREE, make, page_size=page_size)
    rounds_in_changing_company(requests)
    requests.driver.rounds(ROWS, 4)
    fresh = Driver(
        tiny,
        draft=TREE,
        make_proposer=make,
        page_size=page_size,
        graph_max_reqs=None,
        boot=False,
        sanitize=False,
    )
    texts = {row: requests.known(row)[: requests.committed(row)] for row in ROWS}
    fresh.prefill(texts)
    for row, text in texts.items():
        wanted = cache_of(Requests(fresh, texts), row, len(text))
        for name, got in cache_of(requests, row, len(text)).items():
            error = (got - wanted[name]).abs().amax((1, 2))
            wrong = torch.nonzero(error > 1e-4).flatten().tolist()
            assert not wrong, f"{name} of row {row} differs at positions {wrong}"


def test_a_request_that_does_not_draft_emits_one_token_a_round(tiny: TinyModel) -> None:
    params = (GREEDY, replace(GREEDY, speculative=False), GREEDY)
    requests = prefilled(tiny, CHAIN, standalone(tiny, CHAIN), params=params)
    for outputs in requests.driver.rounds(ROWS, 3):
        lens = [len(tokens) for tokens in outputs.token_ids]
        assert lens == [4, 1, 4], f"tokens of a round: {lens}"


def test_a_request_that_has_ended_emits_nothing_more(tiny: TinyModel) -> None:
    make = standalone(tiny, CHAIN)
    requests = prefilled(tiny, CHAIN, make, max_lens=(8, CONTEXT, CONTEXT))
    first, second, third = requests.driver.rounds(ROWS, 3)
    assert [len(outputs.token_ids[0]) for outputs in (first, second, third)] == [2, 0, 0]
    assert first.finish[0] is FinishCode.LENGTH
    assert requests.committed(2) == 7


def test_a_round_ends_with_an_end_token(tiny: TinyModel) -> None:
    requests = prefilled(tiny, CHAIN, standalone(tiny, CHAIN))
    (outputs,) = requests.driver.rounds(ROWS, 1)
    path = outputs.token_ids[1]
    stop = next(token for token in path[1:3] if path.count(token) == 1)
    params = (GREEDY, replace(GREEDY, stop_token_ids=(stop,)), GREEDY)
    again = prefilled(tiny, CHAIN, standalone(tiny, CHAIN), params=params)
    (ended,) = again.driver.rounds(ROWS, 1)
    assert ended.token_ids[1] == path[: path.index(stop) + 1]
    assert ended.finish[1] is FinishCode.STOP_TOKEN


def test_rounds_run_to_the_end_of_the_context(tiny: TinyModel) -> None:
    requests = prefilled(tiny, CHAIN, eagle3(tiny, CHAIN), lengths=(40, 107, 100))
    requests.driver.rounds(ROWS, 80)
    assert [len(requests.known(row)) for row in ROWS] == [CONTEXT] * 3
