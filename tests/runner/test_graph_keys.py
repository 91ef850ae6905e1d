"""The runner puts every fact that is frozen into a graph into the graph's key."""

from dataclasses import fields, replace
from typing import Any

import pytest
from host_planned_backend import HostPlannedBackend
from tiny_runner import GREEDY, Driver, TinyModel, random_prompts, with_logprobs

from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import TokenMask
from paceline.runner.proposer import Nobody
from paceline.runner.recording.graph_keys import GraphKeys, empty_step
from paceline.runner.recording.graph_sizes import GraphSizes
from paceline.runner.recording.graphs import GraphKey
from paceline.runner.recording.recorded import RecordedGraph

LENGTHS = (5, 11, 3)
SAMPLED = SamplingParams(temperature=0.7, seed=1, max_tokens=None, ignore_eos=True)


class Tapping(Nobody):
    """Wants a hidden state, and drafts nothing."""

    taps = ("embed",)


# Field of the key -> driver options, parameters of row 2, and step (rows -> extend length); it
# differs from a greedy decode of rows 1 and 3 in that one fact.
FACTS: dict[str, tuple[dict[str, Any], SamplingParams, dict[int, int]]] = {
    "padded_reqs": ({}, GREEDY, {1: 1, 2: 1, 3: 1}),
    "extend_len": ({}, GREEDY, {1: 2, 2: 2}),
    "backend": ({"backend": HostPlannedBackend()}, GREEDY, {1: 1, 2: 1}),
    "sampler": ({}, SAMPLED, {1: 1, 2: 1}),
    "logprobs": ({}, with_logprobs(2), {1: 1, 2: 1}),
    "masked": ({}, GREEDY, {1: 1, 2: 1}),
    "taps": ({"make_proposer": lambda limits: Tapping()}, GREEDY, {1: 1, 2: 1}),
}
NO_DECODE_STEP_HAS_IT = {
    "mask",
    "is_round",
    "ragged_tokens",
    "pad_len",
    "observed",
    "shares_prefix",
    "has_overlay",
    "ends",
}  # fix graph-key-without-mask, test_ragged_graphs, test_llm_draft_acceptance, the last test here,
# test_llm_embeds, test_embed


def replayed_key(
    driver: Driver, extends: dict[int, int], replays: list[RecordedGraph], **changes: Any
) -> GraphKey:
    """The key under which the second use of a step replays."""
    for _ in range(2):
        replays.clear()
        step = replace(driver.make_step(extends), **changes)
        driver.collect(driver.runner.launch(step))
    graphs = driver.runner._graphs.graphs  # type: ignore[union-attr]
    (found,) = [key for key, held in graphs.items() if [held] == replays]
    return found


def test_every_field_of_a_key_is_told_apart_below() -> None:
    assert set(FACTS) | NO_DECODE_STEP_HAS_IT == {field.name for field in fields(GraphKey)}


@pytest.mark.parametrize("fact", FACTS)
def test_a_step_that_differs_in_one_fact_replays_another_graph(
    tiny: TinyModel, replays: list[RecordedGraph], fact: str
) -> None:
    options, params, extends = FACTS[fact]
    one = Driver(tiny, sanitize=False)
    another = Driver(tiny, sanitize=False, **options) if options else one
    for driver in (one, another):
        prompts = random_prompts(LENGTHS)
        for row, prompt in enumerate(prompts, start=1):
            driver.join(row, prompt, params if row == 2 else GREEDY)
        driver.collect(driver.launch_prefill(dict(enumerate(LENGTHS, start=1))))
    plain = replayed_key(one, {1: 1, 3: 1}, replays)
    words = driver.parts.buffers.mask_words
    every = TokenMask(1, b"\xff" * words[0].nbytes)
    changes = {"masks": (every,)} if fact == "masked" else {}
    other = replayed_key(another, extends, replays, **changes)
    differ = [
        field.name
        for field in fields(GraphKey)
        if getattr(plain, field.name) != getattr(other, field.name)
    ]
    assert differ == [fact]


def test_a_shared_prefix_is_in_the_key_where_the_backend_reads_it_once(tiny: TinyModel) -> None:
    driver = Driver(tiny, sanitize=False)
    for row, prompt in enumerate(random_prompts(LENGTHS), start=1):
        driver.join(row, prompt, GREEDY)
    plain = driver.make_step({1: 1, 3: 1})
    crowded = replace(plain, shares_prefix=True)
    parts = driver.parts
    assert not parts.shares_prefixes  # plain torch reads for each
    sizes = GraphSizes(sizes=(1, 4, 8), tokens=())
    keys = [GraphKeys(each, sizes) for each in (parts, replace(parts, shares_prefixes=True))]
    found = [[each.of(step) for step in (plain, crowded)] for each in keys]
    assert found[0][0] == found[0][1] == found[1][0] != found[1][1]
    assert found[1][1] is not None
    assert empty_step(found[1][1]).shares_prefix
    ahead = [key.padded_reqs for key in keys[1].ahead() if key.shares_prefix]
    assert ahead == [8]
    assert not any(key.shares_prefix for key in keys[0].ahead())
