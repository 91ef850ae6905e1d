"""A record is run again: the same tokens, and the same failure in the same step."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from box_cases import boxed, replayed_as_it_was, trip_token, tripping, written
from grammar_turns import Turns
from llm_cases import GREEDY, Checkpoint, make_checkpoint, make_llm, random_prompts, shared_prompts
from speculative_cases import DRAFTERS, Truth, llama_truth

from paceline.core.errors import CapacityError, ConfigError
from paceline.core.request.sampling_params import SamplingParams
from paceline.llm.box.record import NON_FINITE, STUCK, Record
from paceline.llm.box.replay import OF_STEPS, options_of, replay
from paceline.llm.llm import LLM

RAISES = {"logits_processors": ["planted:Raises"], "enforce_eager": True}
GRAPHS = ("cuda_graph_max_bs", "cuda_graph_max_tokens")
SLOW = ("EAGLE", "STANDALONE")  # a head and the lookup stand for them
FEW = 6  # steps: less than any answer has


def serve(llm: LLM, turns: int = 10**6, **more: Any) -> None:
    """Prompts that share prefixes, some of which come when others are half done."""
    prompts, params = shared_prompts(), SamplingParams(max_tokens=30, seed=3, **more)
    llm.submit(prompts[:3], [GREEDY, params, replace(params, top_p=0.9)])
    for turn in range(turns):
        if turn in (9, 14):
            llm.submit(prompts[3:5] if turn == 9 else prompts[5:], params)
        if not llm.engine.has_work:
            return
        llm.engine.step()


def kept(llm: LLM, folder: Path) -> Record:
    """What a watchdog would have written now."""
    told = llm.keep_stuck("nowhere")
    [record] = written(folder)
    assert told is not None
    assert told.startswith("its last steps are in paceline-")
    assert (record.failure.kind, record.failure.text) == (STUCK, "in nowhere")
    return record


OPTIONS: dict[str, dict[str, Any]] = {
    "pages of 16": {},
    "pages of 4, chunks": {"page_size": 4, "chunked_prefill_size": 7},
    "pages of 1, eager, twin": {"page_size": 1, "enforce_eager": True, "overlap": False},
    "no prefixes": {"enable_prefix_cache": False},
    "few rows": {"max_num_seqs": 2},
}


@pytest.mark.parametrize(
    ("options", "turns"), [*zip(OPTIONS, (17, 22, 10**6, 19, 21), strict=True)]
)
def test_all_steps_say_the_same(checkpoint: Checkpoint, tmp_path: Path, options, turns) -> None:
    with boxed(checkpoint, tmp_path, **OPTIONS[options]) as llm:
        serve(llm, turns)
        record = kept(llm, tmp_path)
    found = replayed_as_it_was(record)
    assert found.num_restored == 0
    assert found.num_compared >= 30


@pytest.mark.parametrize(
    ("options", "turns"), [*zip(OPTIONS, (12, 18, 24, 31, 27), strict=True), ("pages of 16", 18)]
)
def test_the_last_few_say_the_same_over_a_cache_that_is_computed_again(
    checkpoint: Checkpoint, tmp_path: Path, options, turns
) -> None:
    with boxed(checkpoint, tmp_path, kept_steps=FEW, **OPTIONS[options]) as llm:
        serve(llm, turns)
        record = kept(llm, tmp_path)
    assert len(record.steps) == FEW
    found = replayed_as_it_was(record, sanitize=True)
    assert found.num_restored > 20


@pytest.mark.parametrize(
    ("case", "turns"),
    [
        ("gemma3-windows-two-ropes", 18),  # joins behind a hit in pages that a running row left
        pytest.param("gemma3-windows-two-ropes", 31, marks=pytest.mark.slow),
        ("gpt-oss-sinks-alternating-windows", 17),
    ],
)
def test_pages_behind_a_window_are_left_to_whoever_has_them(
    tmp_path: Path, case: str, turns: int
) -> None:
    model = make_checkpoint(case, tmp_path / "model")
    box = tmp_path / "box"
    with boxed(model, box, kept_steps=FEW, page_size=4) as llm:
        serve(llm, turns)
        record = kept(llm, box)
    replayed_as_it_was(record, sanitize=True)


@pytest.fixture(scope="module")
def truth(tmp_path_factory: pytest.TempPathFactory) -> Truth:
    return llama_truth(tmp_path_factory.mktemp("truth"), ("greedy",))


@pytest.mark.parametrize(
    ("drafter", "topk"),
    [
        pytest.param(drafter, topk, marks=pytest.mark.slow if drafter in SLOW else ())
        for drafter, topk in zip(DRAFTERS, (1, 2, 2, 1), strict=True)
    ],
)
def test_rounds_accept_the_same(truth: Truth, tmp_path: Path, drafter: str, topk: int) -> None:
    options = truth.speculation(drafter, topk)
    with boxed(truth.checkpoint, tmp_path, kept_steps=FEW, page_size=4, **options) as llm:
        serve(llm, 18)
        record = kept(llm, tmp_path)
    assert any(step.is_round for step in record.steps)
    several = [ids for landed in record.landed for ids in landed.token_ids if len(ids) > 1]
    assert several or drafter == "NGRAM"
    replayed_as_it_was(record, sanitize=True)


def test_masks_and_scores_come_along(checkpoint: Checkpoint, tmp_path: Path) -> None:
    grammar = Turns([range(10, 20), range(40, 90, 7)], length=30)
    with boxed(checkpoint, tmp_path) as llm:
        llm.submit(random_prompts((9,)), GREEDY, grammar=grammar)
        llm.submit(random_prompts((12,)), {"prompt_logprobs": 2, "max_tokens": 4, "logprobs": 1})
        for _ in range(12):
            llm.engine.step()
        record = kept(llm, tmp_path)
    assert any(step.masks for step in record.steps)
    assert any(step.prompt_spans for step in record.steps)
    replayed_as_it_was(record)


@pytest.mark.parametrize("kept_steps", [256, FEW])
def test_a_planted_exception_comes_again(
    checkpoint: Checkpoint, tmp_path: Path, kept_steps: int
) -> None:
    prompts = random_prompts((20, 9))
    with make_llm(checkpoint) as plain:
        token = trip_token(plain, prompts[0], at=15)
    with boxed(checkpoint, tmp_path, kept_steps=kept_steps, **RAISES) as llm:
        with pytest.raises(ZeroDivisionError, match="a planted fault") as caught:
            llm.generate(prompts, [tripping(token), GREEDY])
        [note] = caught.value.__notes__
    [record] = written(tmp_path)
    assert note == f"its last steps are in {next(tmp_path.iterdir()).name}"
    assert (record.failure.kind, record.failure.text) == ("ZeroDivisionError", "a planted fault")
    assert record.failure.trace[-1].endswith("apply")
    assert not record.failure.is_hosts
    found = replay(record, {})
    assert found.is_reproduced
    assert found.difference is None
    steps = len(record.steps)
    assert found.end == f"ZeroDivisionError in step {steps} of {steps}: a planted fault"
    assert (found.num_restored > 0) == (kept_steps == FEW)


def test_without_its_cause_it_does_not_come(checkpoint: Checkpoint, tmp_path: Path) -> None:
    prompts = random_prompts((20, 9))
    with make_llm(checkpoint) as plain:
        token = trip_token(plain, prompts[0], at=8)
    with boxed(checkpoint, tmp_path, **RAISES) as llm, pytest.raises(ZeroDivisionError):
        llm.generate(prompts, [tripping(token), GREEDY])
    [record] = written(tmp_path)
    found = replay(record, {"logits_processors": ["planted:Trip"]})
    assert not found.is_reproduced
    assert found.end == f"all {len(record.steps)} steps ended"
    early = replace(record, steps=record.steps[:-1], landed=record.landed[:-1])
    assert not replay(early, {}).is_reproduced
    later = replace(record, steps=(*record.steps, record.steps[-1]))
    late = replay(later, {})
    assert not late.is_reproduced
    assert late.end.startswith(f"ZeroDivisionError in step {len(record.steps)} of ")


@pytest.mark.parametrize(
    ("kept_steps", "options"),
    [(256, {}), (FEW, {}), (FEW, {"enforce_eager": True, "overlap": False})],
    ids=str,
)
def test_a_planted_nan_comes_again_and_its_request_is_told(
    checkpoint: Checkpoint, tmp_path: Path, kept_steps: int, options: dict[str, Any]
) -> None:
    prompts, box = random_prompts((20, 9)), tmp_path / "box"
    with make_llm(checkpoint) as plain:
        token = trip_token(plain, prompts[1], at=12)

    def poison(model: Any) -> None:
        model.get_input_embeddings().weight[token] = math.nan

    sick = make_checkpoint("llama-gqa2-untied", tmp_path / "sick", change=poison)
    healthy = replace(GREEDY, logit_bias=((token, -100.0),))
    with boxed(sick, box, kept_steps=kept_steps, **options) as llm:
        other, failed = llm.generate(prompts, [healthy, GREEDY])
    assert other.outputs[0].error is None
    [path] = box.iterdir()
    assert failed.outputs[0].error.endswith(f"weights and dtype; its last steps are in {path.name}")
    [record] = written(box)
    assert (record.failure.kind, record.failure.rows) == (NON_FINITE, (1,))
    assert "logits of request 'request-1' must be finite" in record.failure.text
    found = replay(record, {})
    assert found.is_reproduced
    assert found.difference is None
    step = len(record.steps)
    assert found.end == f"logits, vector or scores of row 1 of step {step} are not finite"
    cured = replay(record, {"model": str(checkpoint.folder)})
    assert not cured.is_reproduced
    last = f"step {len(record.steps)}, row 1 (request-1): recorded no token (non_finite), here "
    assert str(cured.difference).startswith(last)


def test_other_options_run_the_same_steps(checkpoint: Checkpoint, tmp_path: Path) -> None:
    with boxed(checkpoint, tmp_path, kept_steps=FEW) as llm:
        serve(llm, 20)
        record = kept(llm, tmp_path)
    for asked in ({"enforce_eager": True}, {"overlap": False}, {"device": "cpu", "threads": 2}):
        replayed_as_it_was(record, **asked)


def test_a_model_of_other_weights_differs_at_a_row_that_is_named(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    other = make_checkpoint("llama-rope-yarn", tmp_path / "model")
    with boxed(checkpoint, tmp_path / "box") as llm:
        serve(llm, 12)
        record = kept(llm, tmp_path / "box")
    found = replay(record, {"model": str(other.folder)})
    assert str(found.difference).startswith("step 1, row 0 (request-0): recorded ")
    assert found.num_steps == len(record.steps)


def test_where_there_are_fewer_pages_the_ones_that_are_named_are_numbered_anew(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    with boxed(checkpoint, tmp_path, kept_steps=FEW) as llm:
        serve(llm, 20)
        record = kept(llm, tmp_path)
    replayed_as_it_was(of_pages(record, 10**9))
    with pytest.raises(
        CapacityError, match=r"pages of cache group 'full' must be at least \d+, wh"
    ):
        replay(of_pages(record, 10**9), {"kv_cache_bytes": 73728})
    with pytest.raises(ConfigError, match=r"cache groups .* must be 2, as recorded, got 1"):
        replay(of_pages(record, 10, 10), {})


def of_pages(record: Record, *num_pages: int) -> Record:
    return replace(record, made=msgspec.structs.replace(record.made, num_pages=num_pages))


@pytest.fixture(scope="module")
def short(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Record:
    folder = tmp_path_factory.mktemp("short")
    with boxed(checkpoint, folder) as llm:
        serve(llm, 3)
        return kept(llm, folder)


@pytest.mark.parametrize("name", sorted(OF_STEPS))
def test_what_steps_are_made_for_cannot_be_another(short: Record, name: str) -> None:
    value: object = {"prompt_blocks": True, "speculative_algorithm": "NGRAM"}.get(name, 8)
    with pytest.raises(ConfigError, match=f"{name} must be as recorded .* leave it out"):
        options_of(short, {name: value})


def test_another_device_has_what_an_engine_chooses_for_it(short: Record) -> None:
    assert "threads" not in short.made.chosen
    here, there = options_of(short, {"device": "cpu"}), options_of(short, {"device": "cuda"})
    assert here == short.made.options
    assert here.keys() - there.keys() == {"attention_backend", "kv_cache_bytes", *GRAPHS}
    assert there["threads"] == 1  # as somebody asked
    assert options_of(short, {"no_overlap": True}) == here | {"overlap": False}


def test_what_was_chosen_by_another_cache_format_is_chosen_anew(short: Record) -> None:
    """A record of expanded latents, which float8 rows cannot be; one that asked for it keeps it,
    and is refused."""
    made = short.made
    options = {**made.options, "latent_expand_from": 171, "attention_backend": "triton"}
    options["latent_expand_backend"] = "own"
    names = ("latent_expand_from", "latent_expand_backend", "attention_backend")
    chosen, asked = (
        replace(short, made=msgspec.structs.replace(made, options=options, chosen=each))
        for each in (names, ())
    )
    assert not set(names) & options_of(chosen, {"kv_cache_dtype": "fp8"}).keys()
    assert options_of(chosen, {"enforce_eager": True}).keys() >= set(names)
    assert options_of(asked, {"kv_cache_dtype": "fp8"})["latent_expand_from"] == 171
