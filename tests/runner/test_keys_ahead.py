"""The keys that a runner runs and captures before the first request, and the steps of keys."""

from dataclasses import replace

import pytest
from tiny_drafters import TREE, eagle3
from tiny_runner import Driver, TinyModel

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import GraphSupport
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier
from paceline.core.step import Step, StepLayout
from paceline.runner.program import Parts
from paceline.runner.recording.graph_keys import GraphKeys, empty_step
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import GraphKey

SIZES = GraphSizes(sizes=(1, 2, 3, 4, 6, 8), tokens=(16, 24, 32, 48))
NO_RAGGED = GraphSizes(sizes=SIZES.sizes, tokens=())
GREEDY = SamplerTier.GREEDY
WIDER = [tier for tier in SamplerTier if tier is not GREEDY]
MASKED = [GREEDY, SamplerTier.BY_ROW]
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
    few = [(reqs, tokens) for tokens in (16, 32, 48) for reqs in (1, 4, 9)]
    shapes = [*few, (1, longest), (4, longest), (9, 16), (9, 48)]
    ragged = [(reqs, None, tokens, False, GREEDY) for reqs, tokens in shapes]
    keys = GraphKeys(parts, SIZES).ahead()
    masked = [(8, 1, None, False, tier) for tier in MASKED]
    assert told([key for key in keys if not key.masked]) == decodes + samplers + ragged
    assert told([key for key in keys if key.masked]) == masked
    assert {(key.mask, key.logprobs, key.observed) for key in keys} == {
        (MaskKind.CAUSAL, False, True)
    }


def test_who_drafts_decodes_too_and_samples_in_rounds(drafting: Parts) -> None:
    rows = TREE.num_draft_tokens
    decodes = [(reqs, 1, None, False, GREEDY) for reqs in (1, 2, 4, 8)]
    rounds = [(reqs, rows, None, True, GREEDY) for reqs in (1, 2, 4, 8)]
    samplers = [(8, rows, None, True, tier) for tier in WIDER]
    keys = GraphKeys(drafting, NO_RAGGED).ahead()
    masked = [(8, rows, None, True, tier) for tier in MASKED]
    assert told(keys) == decodes + rounds + samplers + masked
    assert {key.mask for key in keys if key.is_round} == {MaskKind.TREE}


def test_the_largest_of_each_shape_is_captured_first(parts: Parts, drafting: Parts) -> None:
    keys, drafted = GraphKeys(parts, SIZES), GraphKeys(drafting, NO_RAGGED)
    longest = keys.longest_extend()
    assert longest is not None
    assert told([longest, keys.largest_decode()]) == [
        (9, None, 48, False, GREEDY),  # eight requests and the row of what is left over
        (8, 1, None, False, GREEDY),
    ]
    assert told([drafted.largest_decode()]) == [(8, TREE.num_draft_tokens, None, True, GREEDY)]
    assert drafted.longest_extend() is None
    assert (keys.ragged_tokens, drafted.ragged_tokens) == (SIZES.tokens, ())


def ragged_step(**facts: object) -> Step:
    """Rows of 30, 1 and 2 tokens."""
    return Step(
        epoch=1,
        layout=StepLayout(rows=(1, 2, 3), extend_lens=(30, 1, 2), emits=(True,) * 3),
        is_ragged=True,
        prefix_lens_bound=(0, 4, 0),
        sampler=GREEDY,
        logprobs=False,
        deltas=(),
        **facts,  # type: ignore[arg-type]
    )


def test_a_ragged_step_is_padded_by_its_tokens_and_its_rows(parts: Parts) -> None:
    (key,) = told([GraphKeys(parts, SIZES).of(ragged_step())])  # type: ignore[list-item]
    assert key == (4, None, 48, False, GREEDY)


@pytest.mark.parametrize(
    ("support", "captured"),
    [
        (GraphSupport.NEVER, set()),
        (GraphSupport.DECODE, {1}),
        (GraphSupport.UNIFORM, {1, 2}),
        (GraphSupport.ALWAYS, {1, 2, None}),
    ],
)
def test_a_backend_captures_the_steps_it_supports(
    parts: Parts, support: GraphSupport, captured: set[int | None]
) -> None:
    able = type("Able", (TorchBackend,), {})()
    able.capabilities = replace(TorchBackend.capabilities, graph=support)
    keys = GraphKeys(replace(parts, backend=able), SIZES)
    found = set()
    for extend in (1, 2, None):
        step = ragged_step()
        if extend is not None:
            layout = replace(step.layout, extend_lens=(extend,) * 3)
            step = replace(step, layout=layout, is_ragged=False)
        found |= {extend} if keys.of(step) is not None else set()
    assert found == captured


@pytest.mark.parametrize("observed", [True, False])
def test_a_key_and_its_empty_step_say_whether_the_drafter_looks(
    parts: Parts, observed: bool
) -> None:
    key = GraphKeys(parts, SIZES).of(ragged_step(observed=observed))
    assert key is not None
    assert (key.observed, empty_step(key).observed) == (observed, observed)


@pytest.mark.parametrize("is_round", [True, False])
@pytest.mark.parametrize("mask", [MaskKind.CAUSAL, MaskKind.TREE])
@pytest.mark.parametrize("extend_len", [3, None])
def test_an_empty_step_is_of_its_keys_kind(
    parts: Parts, extend_len: int | None, mask: MaskKind, is_round: bool
) -> None:
    """The host spells out the parents of a tree, unless a proposer writes them on the device."""
    key = GraphKeys(parts, SIZES).largest_decode()
    step = empty_step(replace(key, extend_len=extend_len, mask=mask, is_round=is_round))
    assert (step.is_ragged, step.mask, step.is_round) == (extend_len is None, mask, is_round)
    has_parents = mask is MaskKind.TREE and not is_round
    assert step.layout.parents == (() if has_parents else None)
