"""How many drafts are accepted: what a drafter knows may not depend on how the engine got there."""

import itertools
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pytest
from llm_cases import (
    Checkpoint,
    assert_idle,
    make_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    tokens_of,
)
from speculative_cases import (
    LLAMA,
    MODEL_DRAFTERS,
    STEPS,
    Truth,
    llama_truth,
    tight_pages,
)

from covers import Cell, every_cell, pairwise, slow_unless
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import Step
from paceline.engine.answers.outputs import RequestOutput
from paceline.llm.boot import Knobs
from paceline.llm.llm import LLM

GREEDY = SamplingParams(temperature=0.0, max_tokens=26, ignore_eos=True)
NOISY = SamplingParams(temperature=0.8, max_tokens=26, ignore_eos=True, seed=3)
KINDS = {"greedy": GREEDY, "noisy": NOISY}
WINDOWED = "gemma3-untied-full-rope-linear"
DRAFTED = {"drafter": MODEL_DRAFTERS, "topk": (1, 4)}
Depths = list[tuple[int, ...]]  # of each request: rounds that went so deep


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("llama"), kinds=())


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    """Targets that draft for themselves."""
    return {
        case: make_checkpoint(case, tmp_path_factory.mktemp("twins")) for case in (LLAMA, WINDOWED)
    }


@pytest.fixture(params=[LLAMA, WINDOWED])
def twins(request: pytest.FixtureRequest, targets: dict[str, Checkpoint]) -> Checkpoint:
    return targets[request.param]


# Each target with one of the two loops; the other two pairs are slow.
IN_A_LOOP = pytest.mark.parametrize(
    ("twins", "overlap"),
    [
        pytest.param(LLAMA, False, id="llama-twin"),
        pytest.param(WINDOWED, True, id="windowed-overlap"),
        pytest.param(LLAMA, True, id="llama-overlap", marks=pytest.mark.slow),
        pytest.param(WINDOWED, False, id="windowed-twin", marks=pytest.mark.slow),
    ],
    indirect=["twins"],
)


def self_drafting(target: Checkpoint, **options: Any) -> LLM:
    drafts: dict[str, Any] = {
        "speculative_algorithm": "STANDALONE",
        "speculative_draft_model_path": str(target.folder),
        "speculative_num_steps": STEPS,
    }
    return make_llm(target, **drafts | options)


def depths(outputs: list[RequestOutput]) -> Depths:
    return [output.metrics.accepted_by_position for output in outputs]


def assert_all_accepted(outputs: list[RequestOutput]) -> None:
    """Every round took every draft, unless it was the last."""
    for output in outputs:
        metrics = output.metrics
        assert metrics.rounds >= (metrics.output_tokens - 1) // (STEPS + 1)
        assert metrics.accepted_by_position[-1] >= metrics.rounds - 1, metrics


SELF = {"model": (LLAMA, WINDOWED), "page_size": (1, 16, 64), "params": ("greedy", "noisy")}


def is_quick(cell: Cell) -> bool:
    """Each model greedily and with noise, each size of a page."""
    greedy = {(LLAMA, 1), (WINDOWED, 64)}
    noisy = {(LLAMA, 64), (WINDOWED, 16)}
    return (cell["model"], cell["page_size"]) in (greedy if cell["params"] == "greedy" else noisy)


@pytest.mark.parametrize("cell", slow_unless(is_quick, every_cell(SELF)))
def test_a_model_that_drafts_for_itself_is_always_right(
    targets: dict[str, Checkpoint], cell: Cell
) -> None:
    """In chunks, with joins, behind prefix hits; with temperature both draw the same noise."""
    prompts, params = random_prompts((1, 70, 9, 33)), KINDS[cell["params"]]
    options = {"chunked_prefill_size": 7, "max_num_seqs": 2, "page_size": cell["page_size"]}
    with self_drafting(targets[cell["model"]], **options) as llm:
        first = llm.generate(prompts, params)
        assert_all_accepted(first)
        told = [[*p, *tokens, 4] for p, tokens in zip(prompts, tokens_of(first), strict=True)]
        again = llm.generate(told, replace(params, max_tokens=12))
        assert_all_accepted(again)
        cached = [output.metrics.cached_tokens for output in again]
        assert cached[1] >= 64
        assert_idle(llm)


def test_a_model_that_drafts_for_itself_is_right_to_the_end_of_the_context(
    twins: Checkpoint,
) -> None:
    with self_drafting(twins) as llm:
        outputs = llm.generate(random_prompts((96, 97, 98, 99)), replace(GREEDY, max_tokens=None))
        assert [output.metrics.output_tokens for output in outputs] == [32, 31, 30, 29]
        assert_all_accepted(outputs)


@IN_A_LOOP
def test_a_model_that_drafts_for_itself_is_right_behind_plain_steps(
    twins: Checkpoint, overlap: bool
) -> None:
    """Alone by rounds, with others plainly, then by rounds again: both caches hold every token."""
    long, *short = random_prompts((9, 20, 12))
    options = {"speculative_max_batch": 2, "overlap": overlap, "sanitize": True}
    with self_drafting(twins, **options) as llm, recorded_steps(llm) as steps:
        (first,) = llm.submit([long], replace(GREEDY, max_tokens=60))
        while first.num_tokens < 16:
            llm.engine.step()
        others = llm.submit(short, replace(GREEDY, max_tokens=9))
        while not all(tracker.is_finished for tracker in (first, *others)):
            llm.engine.step()
        assert_idle(llm)
    rounds, plain = "round", "decode step"
    assert _changes(steps) == [rounds, plain, rounds]
    assert all(step.observed for step in steps)
    metrics = first.snapshot().metrics
    assert metrics.accepted_by_position[-1] >= metrics.rounds - 1 > 0
    for tracker, prompt, length in zip((first, *others), (long, *short), (60, 9, 9), strict=True):
        assert tokens_of([tracker.snapshot()])[0] == twins.generate(prompt, length)


@IN_A_LOOP
def test_who_met_company_where_one_may_draft_is_followed_no_more(
    twins: Checkpoint, overlap: bool
) -> None:
    """By rounds alone, plainly from then on; who goes on from its text drafts as rightly as ever:
    what the drafter has not seen, it does not find in the cache."""
    long, short = random_prompts((9, 20))
    options = {"speculative_max_batch": 1, "overlap": overlap, "sanitize": True, "page_size": 4}
    with self_drafting(twins, **options) as llm, recorded_steps(llm) as steps:
        (first,) = llm.submit([long], replace(GREEDY, max_tokens=60))
        while first.num_tokens < 16:
            llm.engine.step()
        (second,) = llm.submit([short], replace(GREEDY, max_tokens=9))
        while not (first.is_finished and second.is_finished):
            llm.engine.step()
        decodes = [step for step in steps if not step.is_ragged]
        assert _changes(steps) == ["round", "decode step"]
        assert [step.observed for step in decodes] == [step.is_round for step in decodes]
        told = first.snapshot()
        for tracker, prompt, length in ((first, long, 60), (second, short, 9)):
            assert tokens_of([tracker.snapshot()])[0] == twins.generate(prompt, length)
        (again,) = llm.generate([[*long, *tokens_of([told])[0]]], replace(GREEDY, max_tokens=24))
        assert_all_accepted([again])
        # Its prompt and what its rounds brought, but nothing of its plain steps.
        assert 0 < again.metrics.cached_tokens <= len(long) + 16 + 2 * STEPS
        assert_idle(llm)


def _changes(steps: list[Step]) -> list[str]:
    """Kinds of decode steps, each once per change."""
    kinds = [step.kind for step in steps if not step.is_ragged]
    return [kind for kind, _ in itertools.groupby(kinds)]


@pytest.mark.parametrize(
    ("twins", "page_size"),
    [
        (LLAMA, 1),
        (WINDOWED, 16),
        pytest.param(LLAMA, 16, marks=pytest.mark.slow),
        pytest.param(WINDOWED, 1, marks=pytest.mark.slow),
    ],
    indirect=["twins"],
)
def test_a_resumed_request_is_drafted_for_as_well(twins: Checkpoint, page_size: int) -> None:
    groups = 2 if twins.theirs.config.model_type == "llama" else 4
    pages = tight_pages(page_size, groups, STEPS + 1)[page_size]
    knobs = Knobs(num_pages=pages, reserve_ahead=0, admission_margin=0)
    with self_drafting(twins, page_size=page_size, knobs=knobs) as llm:
        outputs = llm.generate(random_prompts((60, 50, 55)), replace(GREEDY, max_tokens=60))
        assert_idle(llm)
    assert sum(output.metrics.preemptions for output in outputs) > 0
    for output in outputs:
        metrics = output.metrics
        assert metrics.accepted_by_position[-1] >= metrics.rounds - 1 - metrics.preemptions


@dataclass(frozen=True)
class Drafted:
    """A drafter, and how it does by the shortest way: nothing shared, nothing split."""

    truth: Truth
    drafter: str
    topk: int
    engines: ExitStack
    known: dict[tuple[int, ...], tuple[int, ...]] = field(default_factory=dict)

    @cached_property
    def shares_nothing(self) -> LLM:
        return self.engines.enter_context(self.llm(enable_prefix_cache=False))

    def llm(self, **options: Any) -> LLM:
        drafts = self.truth.speculation(self.drafter, self.topk)
        return make_llm(self.truth.checkpoint, **drafts | options)

    def cold(self, prompts: Sequence[Sequence[int]]) -> Depths:
        new = [prompt for prompt in prompts if tuple(prompt) not in self.known]
        if new:
            answered = self.shares_nothing.generate(new, GREEDY)
            for prompt, found in zip(new, depths(answered), strict=True):
                self.known[tuple(prompt)] = found
        return [self.known[tuple(prompt)] for prompt in prompts]


@pytest.fixture(scope="module")
def drafters(truth: Truth) -> Iterator[dict[tuple[str, int], Drafted]]:
    """By name and width."""
    pairs = itertools.product(*DRAFTED.values())
    with ExitStack() as engines:
        yield {(name, topk): Drafted(truth, name, topk, engines) for name, topk in pairs}


def each_drafter_once() -> list[Any]:
    """Every cell of DRAFTED, the quick ones in turn."""
    return slow_unless(is_in_turn, every_cell(DRAFTED))


def is_in_turn(cell: Cell) -> bool:
    """One width for each drafter, both widths in turn."""
    width = dict(zip(MODEL_DRAFTERS, itertools.cycle(DRAFTED["topk"])))
    return bool(width[cell["drafter"]] == cell["topk"])


def of_cell(drafters: dict[tuple[str, int], Drafted], cell: Cell) -> Drafted:
    return drafters[cell["drafter"], cell["topk"]]


@pytest.fixture
def eagle3(drafters: dict[tuple[str, int], Drafted]) -> Drafted:
    return drafters["EAGLE3", 4]


# Tokens per round, greedy and noisy, of drafters made from the target: a little less than measured.
FLOORS = {
    ("EAGLE", 1): (1.35, 1.35),
    ("EAGLE", 4): (1.65, 1.8),
    ("EAGLE3", 1): (2.1, 2.15),
    ("EAGLE3", 4): (2.15, 2.4),
    ("STANDALONE", 1): (1.85, 2.3),
    ("STANDALONE", 4): (2.2, 2.6),
}


@pytest.mark.parametrize("cell", each_drafter_once())
def test_drafters_made_from_the_target_guess_well(
    drafters: dict[tuple[str, int], Drafted], cell: Cell
) -> None:
    drafted = of_cell(drafters, cell)
    prompts = random_prompts((3, 40, 22, 9, 60, 33))
    with drafted.llm() as llm:
        for params, floor in zip(
            (GREEDY, NOISY), FLOORS[drafted.drafter, drafted.topk], strict=True
        ):
            found = llm.generate(prompts, replace(params, max_tokens=46, seed=1))
            rounds = sum(output.metrics.rounds for output in found)
            tokens = sum(output.metrics.output_tokens - 1 for output in found)
            assert tokens / rounds > floor


WAYS: dict[str, dict[str, Any]] = {
    "chunks": {"chunked_prefill_size": 7, "overlap": False, "max_num_seqs": 2},
    "chunks-of-1": {"chunked_prefill_size": 1, "page_size": 1},
    "eager": {"enforce_eager": True, "page_size": 64},
}


STEPWISE = pairwise(DRAFTED | {"way": tuple(WAYS)})


@pytest.mark.parametrize(
    "cell",
    slow_unless(
        lambda cell: (
            cell in STEPWISE and (cell["drafter"] == "EAGLE3" or cell["way"] != "chunks-of-1")
        ),
        every_cell(DRAFTED | {"way": tuple(WAYS)}),
    ),
)
def test_acceptance_is_the_same_whatever_the_steps(
    drafters: dict[tuple[str, int], Drafted], cell: Cell
) -> None:
    drafted, prompts = of_cell(drafters, cell), random_prompts((3, 40, 1))
    expected = drafted.cold(prompts)
    assert min(sum(each) for each in expected) > 0
    with drafted.llm(**WAYS[cell["way"]]) as llm:
        assert depths(llm.generate(prompts, GREEDY)) == expected


@pytest.mark.parametrize("cell", each_drafter_once())
def test_acceptance_is_the_same_alone(drafters: dict[tuple[str, int], Drafted], cell: Cell) -> None:
    drafted, prompts = of_cell(drafters, cell), random_prompts((3, 40, 1))
    together = drafted.cold(prompts)
    alone = [drafted.shares_nothing.generate([prompt], GREEDY) for prompt in prompts]
    assert [depths(outputs)[0] for outputs in alone] == together


PAGE_SIZES = dict(zip(MODEL_DRAFTERS, (16, 1, 16), strict=True))  # of what is quick


@pytest.mark.parametrize(
    "cell",
    slow_unless(
        lambda cell: is_in_turn(cell) and cell["page_size"] == PAGE_SIZES[cell["drafter"]],
        every_cell(DRAFTED | {"page_size": (1, 16)}),
    ),
)
def test_a_prefix_hit_drafts_as_if_it_were_computed(
    drafters: dict[tuple[str, int], Drafted], cell: Cell
) -> None:
    """The same text again, its answer as part of the next prompt, and texts that part from it."""
    drafted, page_size = of_cell(drafters, cell), cell["page_size"]
    prompt, other = random_prompts((50, 9))
    with drafted.llm(page_size=page_size) as llm:
        first = llm.generate([prompt], GREEDY)[0].outputs[0].token_ids
        prompts = [prompt, [*prompt, *first[:20], *other]]
        prompts += [[*prompt[:at], *other] for at in (16, 32, 33)]
        hits = [llm.generate([each], GREEDY)[0] for each in prompts]
    assert depths(hits) == drafted.cold(prompts)
    cached = [output.metrics.cached_tokens for output in hits]
    assert min(cached) >= 15 // page_size * page_size, cached
    assert cached[1] >= 64 - page_size


@pytest.mark.parametrize("cell", each_drafter_once())
def test_what_was_decoded_without_drafts_is_known_to_the_drafter(
    drafters: dict[tuple[str, int], Drafted], cell: Cell
) -> None:
    drafted = of_cell(drafters, cell)
    prompt, other = random_prompts((20, 5))
    with drafted.llm(page_size=1) as llm, recorded_steps(llm) as steps:
        plain = llm.generate([prompt], replace(GREEDY, speculative=False))[0]
        assert {step.kind for step in steps[1:]} == {"decode step"}
        told = [*prompt, *plain.outputs[0].token_ids, *other]
        hit = llm.generate([told], GREEDY)[0]
    assert hit.metrics.cached_tokens >= 45
    assert depths([hit]) == drafted.cold([told])


def test_a_request_without_drafts_leaves_those_of_others_alone(eagle3: Drafted) -> None:
    prompts = random_prompts((20, 31))
    with eagle3.llm() as llm, recorded_steps(llm) as steps:
        on, off = llm.generate(prompts, [GREEDY, replace(GREEDY, speculative=False)])
    assert depths([on]) == eagle3.cold(prompts[:1])
    assert (off.metrics.rounds, off.metrics.drafted_tokens) == (0, 0)
    assert off.metrics.output_tokens == GREEDY.max_tokens
    first = on.metrics.rounds + 1
    assert all(step.is_round for step in steps[1:first])
    alone = steps[first + 1 :]  # one more round was in flight when its end was seen
    assert alone
    assert {step.kind for step in alone} == {"decode step"}
