"""Layers that read rows of an encoder, through scheduler, cache and runner."""

import random
from dataclasses import replace

import pytest
import torch
from tiny_drafters import CHAIN, TREE, ngram, standalone
from tiny_encoders import MOST_ROWS, EncoderEngine, rows_of, said_of
from tiny_runner import random_prompts
from tiny_states import StateEngine, output

from paceline.core.errors import IntegrityError, RequestError, SanitizerError
from paceline.core.modes import MaskKind
from paceline.core.padding import PAD_PREFIX_LEN
from paceline.core.step import JoinDelta, RunKind
from paceline.runner.derive import derive
from paceline.runner.encoder import EncoderRunner
from paceline.runner.extents import PaddedSize

ENCODER = 2  # the group's index


def check(engine: EncoderEngine, tiny) -> None:
    for request in engine.requests:
        num = request.max_len - request.prompt_len
        said = said_of(tiny, request.prompt_ids, num, request.encoder)
        assert output(request) == said, request.request_id


def joins(engine: EncoderEngine) -> list[JoinDelta]:
    return [d for step in engine.steps for d in step.deltas if isinstance(d, JoinDelta)]


@pytest.mark.parametrize("capture", [False, True])
@pytest.mark.parametrize("chunk", [3, 16])
def test_rows_of_all_lengths_in_one_batch(tiny, chunk, capture):
    engine = EncoderEngine(tiny, chunk=chunk, capture=capture)
    lengths = [None, 1, 4, 5, MOST_ROWS]  # of pages of 4; None: a request without rows
    for seed, (prompt, length) in enumerate(
        zip(random_prompts([9, 2, 17, 8, 1]), lengths, strict=True)
    ):
        engine.add(prompt, 8, None if length is None else rows_of(seed, length))
    engine.run()
    check(engine, tiny)
    assert (RunKind.GRAPH in engine.kinds) == capture
    assert engine.cache.stats().groups[ENCODER].owned == 0


def test_the_rows_matter(tiny):
    """Or the other tests could not fail."""
    (prompt,) = random_prompts([9])
    said = {
        tuple(said_of(tiny, prompt, 8, given)) for given in (None, rows_of(1, 5), rows_of(2, 5))
    }
    assert len(said) == 3


def test_rows_are_written_when_a_request_joins_and_never_after(tiny):
    engine = EncoderEngine(tiny, capture=False)
    engine.add(random_prompts([20])[0], 8, rows_of(3, 6))
    engine.turn()
    (pool,) = engine.runner.parts.encoder.pools
    written = {name: part.clone() for name, part in pool.parts.items()}
    assert all(bool(part.any()) for part in written.values())
    engine.run()
    assert all(torch.equal(pool.parts[name], part) for name, part in written.items())
    check(engine, tiny)


def test_a_prefix_is_found_below_the_same_rows_alone(tiny):
    engine = EncoderEngine(tiny)
    (prompt,) = random_prompts([25])
    same = rows_of(1, 5)
    engine.add(prompt, 4, same)
    engine.run()
    engine.add([*prompt[:20], 7], 4, same)
    engine.add([*prompt[:20], 7], 4, rows_of(2, 5))
    engine.add([*prompt[:20], 7], 4)
    engine.run()
    check(engine, tiny)
    assert [join.prefix_len for join in joins(engine)] == [0, 16, 0, 0]


@pytest.mark.parametrize("capture", [False, True])
def test_who_is_preempted_brings_its_rows_again(tiny, capture):
    engine = EncoderEngine(tiny, num_pages=23, num_slots=12, capture=capture, max_running=4)
    for seed, prompt in enumerate(random_prompts([14, 17, 20, 9, 3])):
        engine.add(prompt, 24, rows_of(seed, 1 + 2 * seed % MOST_ROWS))
    engine.run()
    check(engine, tiny)
    assert sum(request.num_preemptions for request in engine.requests) > 0
    assert len(joins(engine)) > len(engine.requests)


def test_sixteen_ragged_requests_wait_for_pages_of_rows(tiny):
    engine = EncoderEngine(tiny, num_encoded=4, chunk=11, budget=29)
    rng = random.Random(5)
    for seed, prompt in enumerate(random_prompts([rng.randrange(1, 40) for _ in range(16)])):
        given = rows_of(seed, rng.randrange(MOST_ROWS + 1)) if seed % 4 else None
        engine.add(prompt, rng.randrange(1, 12), given)
        engine.turn()
    assert engine.scheduler.num_waiting
    engine.run()
    check(engine, tiny)


def test_steps_that_wait_for_nobody(tiny):
    engine = EncoderEngine(tiny, deferred=True, sanitize=False)
    for seed, prompt in enumerate(random_prompts([20, 3, 11])):
        engine.add(prompt, 12, rows_of(seed, 3 * seed))
    engine.run()
    check(engine, tiny)


@pytest.mark.parametrize(
    ("shape", "drafter", "capture"),
    [
        (TREE, "standalone", True),
        (CHAIN, "ngram", False),
        pytest.param(TREE, "standalone", False, marks=pytest.mark.slow),
        pytest.param(CHAIN, "ngram", True, marks=pytest.mark.slow),
    ],
)
def test_rounds_read_the_rows_in_every_branch(tiny, shape, drafter, capture):
    make = standalone(tiny, shape) if drafter == "standalone" else ngram(shape)
    engine = EncoderEngine(tiny, draft=shape, make_proposer=make, capture=capture, chunk=7)
    for seed, prompt in enumerate(random_prompts([5, 9, 20, 2])):
        engine.add([*prompt, *prompt], 12, rows_of(seed, 2 * seed))
    engine.run()
    check(engine, tiny)
    assert any(step.is_round for step in engine.steps)


@pytest.mark.parametrize("given", [rows_of(1, 0), rows_of(1, 2)], ids=["no rows", "rows"])
def test_a_model_without_an_encoder_takes_no_input_for_one(tiny, given):
    engine = StateEngine(tiny)
    with pytest.raises(RequestError, match="must be at most 0, the model's max_encoder_len, got"):
        engine.add(random_prompts([4])[0], 6, given)


def test_a_model_that_makes_other_rows_than_were_declared_is_named(tiny):
    engine = EncoderEngine(tiny)
    given = rows_of(1, 3)
    engine.add(random_prompts([4])[0], 6, replace(given, num_rows=2))
    with pytest.raises(
        IntegrityError,
        match=r"rows of K and V that the model makes of encoder input 1 must be 2 of each of the "
        r"layers \[4, 5\], got {4: \(3, 3\), 5: \(3, 3\)}; declare in num_rows",
    ):
        engine.run()


def test_what_is_recorded_over_padding_reads_rows(tiny):
    """A graph that was captured over none has been one without cross attention."""
    parts = EncoderEngine(tiny, capture=False).runner.parts
    size = PaddedSize.uniform(3, 1)
    parts.buffers.pad(size)
    view = parts.buffers.view(size, MaskKind.CAUSAL)
    derive(parts.buffers, parts.table, view, parts.page_sizes)
    group = view.groups[ENCODER]
    assert group.prefix_lens.tolist() == [PAD_PREFIX_LEN] * 3
    assert group.kv_lens.tolist() == [PAD_PREFIX_LEN + 1] * 3
    assert view.groups[0].kv_lens is view.kv_lens
    assert not group.out_cache_loc.numel()


@pytest.mark.parametrize(
    ("lens", "named"),
    [
        (lambda lens: lens + 1, r"encoder\.kv\.2\.v: slots behind kv_len"),
        (lambda lens: lens.roll(1), r"encoder\.kv\.2"),
    ],
    ids=["one more", "another request's"],
)
def test_rows_that_are_not_the_requests_own_are_named(tiny, monkeypatch, lens, named):
    plan = EncoderRunner.plan

    def planned(encoder, view):
        group = view.groups[ENCODER]
        wrong = replace(group, prefix_lens=lens(group.prefix_lens))
        return plan(encoder, replace(view, groups=(*view.groups[:ENCODER], wrong)))

    monkeypatch.setattr(EncoderRunner, "plan", planned)
    engine = EncoderEngine(tiny, capture=False)
    for seed, prompt in enumerate(random_prompts([9, 3])):
        engine.add(prompt, 4, rows_of(seed, 5 - 3 * seed))
    with pytest.raises(SanitizerError, match=named):
        engine.run()


def test_guard_and_bytes_know_rows_and_their_lengths(tiny):
    runner = EncoderEngine(tiny).runner
    named = runner.parts.named_tensors()
    assert {"step.encoder_lens", "step.encoder_kv_lens", "table.encoder_lens"} <= named.keys()
    places = {name for name, _, _ in runner._guard._places}
    assert {"kv.encoder.k", "kv.encoder.v"} <= places
    (pool,) = runner.parts.encoder.pools
    held = sum(part.nbytes for part in pool.parts.values())
    assert held == pool.num_pages * pool.spec.page_bytes(torch.float32.itemsize)


def test_more_rows_than_the_model_has_are_refused_and_others_go_on(tiny):
    engine = EncoderEngine(tiny)
    (prompt,) = random_prompts([4])
    engine.add(prompt, 6, rows_of(1, 2))
    with pytest.raises(
        RequestError,
        match="rows of an encoder that request 'r1' brings must be at most 8, the model's "
        "max_encoder_len, got 9; bring less for it to read",
    ):
        engine.add(prompt, 6, rows_of(2, MOST_ROWS + 1))
    engine.requests.pop()
    engine.run()
    check(engine, tiny)
