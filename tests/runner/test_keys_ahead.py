"""The keys that a runner runs and captures before the first request."""

import pytest
from tiny_drafters import TREE, eagle3
from tiny_runner import Driver, TinyModel

from paceline.core.modes import MaskKind
from paceline.core.sampling_params import SamplerTier
from paceline.runner.graph_keys import GraphKeys
from paceline.runner.graph_sizes import GraphSizes
from paceline.runner.graphs import GraphKey
from paceline.runner.program import Parts

SIZES = GraphSizes(sizes=(1, 2, 3, 4, 6, 8), tokens=(16, 24, 32, 48))
NO_RAGGED = GraphSizes(sizes=SIZES.sizes, tokens=())
GREEDY = SamplerTier.GREEDY
WIDER = [tier for tier in SamplerTier if tier is not GREEDY]
Told = tuple[int, int | None, int | None, bool, SamplerTier]


@pytest.fixture
def parts(tiny: TinyModel) -> Parts:
    return Driver(tiny, sanitize=False).parts


@pytest.fixture
def drafting(tiny: TinyModel) -> Parts:
    return Driver(tiny, sanitize=False, draft=TREE, make_proposer=eagle3(tiny, TREE)).parts


def told(keys: list[GraphKey]) -> list[Told]:
    return [(k.padded_reqs, k.extend_len, k.ragged_tokens, k.is_round, k.sampler) for k in keys]


def test_a_size_of_each_power_of_two_and_each_sampler_once(parts: Parts) -> None:
    longest = parts.buffers.input_ids.shape[0]
    decodes = [(reqs, 1, None, False, GREEDY) for reqs in (1, 2, 4, 8)]
    samplers = [(8, 1, None, False, tier) for tier in WIDER]
    shapes = [(1, 16), (1, 32), (1, 48), (1, longest), (9, 16), (9, 48)]
    ragged = [(reqs, None, tokens, False, GREEDY) for reqs, tokens in shapes]
    keys = GraphKeys(parts, SIZES).ahead()
    assert told(keys) == decodes + samplers + ragged
    assert {(key.mask, key.logprobs, key.observed) for key in keys} == {
        (MaskKind.CAUSAL, False, True)
    }


def test_who_drafts_decodes_too_and_samples_in_rounds(drafting: Parts) -> None:
    rows = TREE.num_draft_tokens
    decodes = [(reqs, 1, None, False, GREEDY) for reqs in (1, 2, 4, 8)]
    rounds = [(reqs, rows, None, True, GREEDY) for reqs in (1, 2, 4, 8)]
    samplers = [(8, rows, None, True, tier) for tier in WIDER]
    keys = GraphKeys(drafting, NO_RAGGED).ahead()
    assert told(keys) == decodes + rounds + samplers
    assert {key.mask for key in keys if key.is_round} == {MaskKind.TREE}


def test_the_largest_of_each_shape_is_captured_first(parts: Parts, drafting: Parts) -> None:
    keys, drafted = GraphKeys(parts, SIZES), GraphKeys(drafting, NO_RAGGED)
    longest = keys.longest_extend()
    assert longest is not None
    assert told([longest, keys.largest_decode()]) == [
        (1, None, 48, False, GREEDY),
        (8, 1, None, False, GREEDY),
    ]
    assert told([drafted.largest_decode()]) == [(8, TREE.num_draft_tokens, None, True, GREEDY)]
    assert drafted.longest_extend() is None
    assert (keys.ragged_tokens, drafted.ragged_tokens) == (SIZES.tokens, ())
