"""A model with recurrent states, through scheduler, cache and runner: what it says alone."""

import random
from dataclasses import replace

import pytest
from example_state_backend import SumBackend
from sum_model import said_alone
from tiny_drafters import CHAIN, TREE, eagle3, ngram, nobody, standalone
from tiny_runner import random_prompts
from tiny_states import StateEngine, output, without_layers

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import GraphSupport
from paceline.core.draft_shape import NO_DRAFTS
from paceline.core.errors import ConfigError
from paceline.core.model.cache_groups import CHECKPOINT
from paceline.core.step import JoinDelta, PageDelta, RunKind

STATE = 1  # the group's index


def check(engine: StateEngine, tiny) -> None:
    for request in engine.requests:
        num = request.max_len - request.prompt_len
        assert output(request) == said_alone(tiny.theirs, request.prompt_ids, num), (
            request.request_id
        )


def hits(engine: StateEngine) -> list[int]:
    return [d.prefix_len for step in engine.steps for d in step.deltas if isinstance(d, JoinDelta)]


@pytest.mark.parametrize(
    ("chunk", "capture"),
    [
        *[(1, True), (3, False), (7, True), (16, False)],
        *[pytest.param(chunk, chunk in (3, 16), marks=pytest.mark.slow) for chunk in (1, 3, 7, 16)],
    ],
)
def test_prompts_in_chunks_of_any_size(tiny, chunk, capture):
    engine = StateEngine(tiny, chunk=chunk, capture=capture)
    for prompt in random_prompts([1, 2, 7, 8, 9, 25]):
        engine.add(prompt, 6)
    engine.run()
    check(engine, tiny)
    assert (RunKind.GRAPH in engine.kinds) == capture


@pytest.mark.parametrize("length", [7, 8, 9, 16, 17, 20])
def test_hits_on_a_state_and_beside_one(tiny, length):
    engine = StateEngine(tiny, chunk=6)
    (prompt,) = random_prompts([33])
    engine.add(prompt, 5)
    engine.run()
    for tail in ([], [11], [12, 13, 14]):
        engine.add([*prompt[:length], *tail], 9)
    engine.run()
    check(engine, tiny)
    full = [(length + len(tail) - 1) // 8 * 8 for tail in ([], [11], [12, 13, 14])]
    assert hits(engine)[1:] == [min(hit, length // 8 * 8) for hit in full]


def test_text_that_was_generated_is_found_where_a_step_kept_its_state(tiny):
    engine = StateEngine(tiny)
    (prompt,) = random_prompts([5])
    first = engine.add(prompt, 30)
    engine.run()
    engine.add([*first.token_ids, 9], 4)
    engine.run()
    check(engine, tiny)
    assert hits(engine)[1] == 32


@pytest.mark.parametrize("capture", [pytest.param(False, marks=pytest.mark.slow), True])
def test_who_is_preempted_goes_on_from_a_state(tiny, capture):
    engine = StateEngine(tiny, num_pages=23, num_slots=12, capture=capture, max_running=4)
    for prompt in random_prompts([14, 17, 20, 9, 3]):
        engine.add(prompt, 24)
    engine.run()
    check(engine, tiny)
    assert sum(request.num_preemptions for request in engine.requests) > 0


def test_sixteen_ragged_requests_in_few_slots(tiny):
    engine = StateEngine(tiny, num_slots=8, chunk=11, budget=29)
    rng = random.Random(3)
    (family,) = random_prompts([30])
    for index, prompt in enumerate(random_prompts([rng.randrange(1, 40) for _ in range(16)])):
        shared = family[: rng.randrange(30)] if index % 2 else []
        engine.add([*shared, *prompt], rng.randrange(1, 16))
        engine.turn()
    engine.run()
    check(engine, tiny)
    assert any(hits(engine))
    assert engine.cache.stats().groups[STATE].owned == 0


def test_steps_that_wait_for_nobody(tiny):
    engine = StateEngine(tiny, deferred=True, sanitize=False)
    for prompt in random_prompts([20, 3, 11]):
        engine.add(prompt, 20)
    engine.run()
    check(engine, tiny)


@pytest.mark.parametrize(
    ("shape", "drafter", "capture"),
    [
        (TREE, "standalone", True),
        (TREE, "eagle3", False),
        pytest.param(CHAIN, "standalone", False, marks=pytest.mark.slow),
        (CHAIN, "ngram", True),
        pytest.param(CHAIN, "standalone", True, marks=pytest.mark.slow),
        pytest.param(TREE, "standalone", False, marks=pytest.mark.slow),
        pytest.param(TREE, "eagle3", True, marks=pytest.mark.slow),
        pytest.param(CHAIN, "ngram", False, marks=pytest.mark.slow),
    ],
)
def test_rounds_commit_the_state_behind_what_was_accepted(tiny, shape, drafter, capture):
    make = {
        "eagle3": lambda: eagle3(tiny, shape),
        "standalone": lambda: standalone(tiny, shape),
        "ngram": lambda: ngram(shape),
    }[drafter]()
    engine = StateEngine(tiny, draft=shape, make_proposer=make, capture=capture, chunk=7)
    prompts = random_prompts([5, 9, 20, 2])
    for prompt in prompts:
        engine.add([*prompt, *prompt], 16)
    engine.run()
    first = engine.requests[0].token_ids
    engine.add([*first, 9], 10)  # behind states that rounds kept
    engine.run()
    check(engine, tiny)
    assert any(step.is_round for step in engine.steps)
    accepted = [sum(request.acceptance.accepted) for request in engine.requests]
    assert sum(accepted) > 0 or drafter != "standalone"


@pytest.mark.parametrize(
    ("shape", "drafter", "page_size", "capture"),
    [
        (NO_DRAFTS, "nobody", 8, False),
        (TREE, "ngram", 8, True),
        pytest.param(CHAIN, "standalone", 4, False, marks=pytest.mark.slow),
        pytest.param(NO_DRAFTS, "nobody", 8, True, marks=pytest.mark.slow),
        pytest.param(TREE, "ngram", 8, False, marks=pytest.mark.slow),
        pytest.param(CHAIN, "standalone", 4, True, marks=pytest.mark.slow),
    ],
)
def test_a_model_none_of_whose_layers_keeps_rows(tiny, shape, drafter, page_size, capture):
    """Alone, and beside a drafter that keeps some."""
    bare = without_layers(tiny)
    make = {"nobody": nobody, "ngram": ngram(shape), "standalone": standalone(tiny, shape)}[drafter]
    engine = StateEngine(
        bare,
        page_size=page_size,
        num_slots=60,
        chunk=7,
        capture=capture,
        draft=shape,
        make_proposer=make,
    )
    prompts = random_prompts([5, 9, 20, 2, 17, 1])
    for prompt in prompts:
        engine.add([*prompt, *prompt], 12)
        engine.turn()
    engine.run()
    for length in (16, 17, 24, 31):
        engine.add([*(prompts[2] * 2)[:length], 9], 8)
    engine.run()
    check(engine, bare)
    assert hits(engine)[-4:] == [16, 16, 24, 24]
    assert any(step.is_round for step in engine.steps) == shape.has_drafts
    assert (RunKind.GRAPH in engine.kinds) == capture
    parts = engine.runner.parts
    assert parts.backend.name == "none"
    assert [pool.spec.name for pool in parts.all_pools] == ["draft-full"] * (
        drafter == "standalone"
    )


def test_requests_that_keep_states_alone_wait_for_slots_and_are_never_preempted(tiny):
    bare = without_layers(tiny)
    engine = StateEngine(bare, page_size=8, num_slots=4, max_running=6)
    for prompt in random_prompts([14, 17, 20, 9, 3]):
        engine.add(prompt, 24)
    engine.run()
    check(engine, bare)
    assert max(len(step.layout.rows) for step in engine.steps) == 3
    assert sum(request.num_preemptions for request in engine.requests) == 0


def test_steady_decode_stages_nothing_but_at_boundaries(tiny):
    engine = StateEngine(tiny, page_size=16, every=32, sanitize=False)
    (prompt,) = random_prompts([5])
    engine.add(prompt, 50)
    engine.run()
    slots = [
        d for s in engine.steps for d in s.deltas if isinstance(d, PageDelta) and d.group == STATE
    ]
    columns = [(delta.start, len(delta.page_ids)) for delta in slots]
    assert columns == [(0, 2), (0, 1), (CHECKPOINT, 1)]  # join, the step behind it, 32 tokens


def test_a_model_with_states_and_no_backend_for_them_is_refused(tiny):
    with pytest.raises(
        ConfigError,
        match="backend of cache group 'sum', whose layers keep states, must be a StateBackend, "
        "got 'torch', of another kind; name one",
    ):
        StateEngine(tiny, states=TorchBackend())


def test_a_backend_that_no_graph_can_hold_runs_eagerly(tiny):
    class Eager(SumBackend):
        capabilities = replace(SumBackend.capabilities, graph=GraphSupport.NEVER)

    engine = StateEngine(tiny, states=Eager(-1))
    engine.add(random_prompts([9])[0], 12)
    engine.run()
    check(engine, tiny)
    assert set(engine.kinds) == {RunKind.EAGER}
