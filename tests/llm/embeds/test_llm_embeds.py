"""Prompts that bring rows in place of embeddings: the rows of ids answer as the ids do."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_cases import (
    GREEDY,
    Checkpoint,
    assert_idle,
    make_llm,
    random_prompts,
    recorded_steps,
    tokens_of,
)
from torch import Tensor

from paceline.core.errors import CapacityError, RequestError, SanitizerError
from paceline.core.step import OverlayDelta
from paceline.engine.answers.outputs import RequestOutput
from paceline.layers.embedding import OverlaidRows
from paceline.llm.boot import Knobs
from paceline.llm.embeds import Embeds
from paceline.llm.llm import LLM

PLACEHOLDER = 0
SHORT = replace(GREEDY, max_tokens=12, logprobs=3)
PROMPTS = random_prompts((20, 26, 23), seed=5)
SPANS = ([(0, 20)], [(3, 9), (9, 10), (17, 25)], [(0, 1), (22, 23)])  # all, some, both ends


@pytest.fixture(scope="module")
def table(checkpoint: Checkpoint) -> Tensor:
    """[vocab, hidden]  transformers' embedding of every id."""
    return checkpoint.theirs.get_input_embeddings().weight.detach()


def with_rows(prompt: Sequence[int], spans: Sequence[tuple[int, int]], table: Tensor) -> Any:
    """The prompt with placeholders and the rows of what they stand for."""
    ids = list(prompt)
    for start, stop in spans:
        ids[start:stop] = [PLACEHOLDER] * (stop - start)
    rows = [Embeds(start, table[list(prompt[start:stop])]) for start, stop in spans]
    return {"prompt_token_ids": ids, "prompt_embeds": rows}


def answers(outputs: Sequence[RequestOutput]) -> list[Any]:
    """Tokens and log-probabilities, bit by bit."""
    return [(each.outputs[0].token_ids, each.outputs[0].logprobs) for each in outputs]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"enforce_eager": True, "sanitize": True}, id="eager and sanitized"),
        pytest.param({"sanitize": True, "chunked_prefill_size": 7}, id="graphs, odd chunks"),
        pytest.param({"chunked_prefill_size": 5, "overlap": False}, id="the twin loop"),
        pytest.param(
            {"chunked_prefill_size": 9, "enable_prefix_cache": False}, id="nothing shared"
        ),
        pytest.param({"cuda_graph_max_tokens": 0, "chunked_prefill_size": 1}, id="one by one"),
    ],
)
def test_rows_of_ids_answer_as_the_ids_do(
    checkpoint: Checkpoint, table: Tensor, options: dict[str, Any]
) -> None:
    """Alone, twice (the second time behind prefix hits), and beside plain requests."""
    brought = [with_rows(p, s, table) for p, s in zip(PROMPTS, SPANS, strict=True)]
    with make_llm(checkpoint, page_size=4, max_prompt_embeds=64, **options) as llm:
        plain, again = (answers(llm.generate(PROMPTS, SHORT)) for _ in range(2))
        with recorded_steps(llm) as steps:
            assert answers(llm.generate(brought, SHORT)) == plain
            second = llm.generate(brought, SHORT)
            assert answers(second) == again
        assert any(step.has_overlay for step in steps)
        shares = options.get("enable_prefix_cache", True)
        assert [each.metrics.cached_tokens for each in second] == (
            [16, 24, 20] if shares else [0] * 3
        )
        both = llm.generate([*brought, *PROMPTS], SHORT)
        assert tokens_of(both[:3]) == tokens_of(both[3:]) == [tokens for tokens, _ in plain]
        with recorded_steps(llm) as steps:
            llm.generate(PROMPTS, SHORT)
        assert not any(step.has_overlay for step in steps)
        assert_idle(llm)


def test_transformers_says_the_same_of_rows_that_are_no_embeddings(
    checkpoint: Checkpoint, table: Tensor
) -> None:
    rows = table[PROMPTS[0]] + 0.1 * torch.randn(20, table.shape[1])
    ids = checkpoint.theirs.generate(
        inputs_embeds=rows[None],
        max_new_tokens=12,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    prompt = {"prompt_token_ids": [PLACEHOLDER] * 20, "prompt_embeds": rows}
    with make_llm(checkpoint, max_prompt_embeds=20, chunked_prefill_size=7) as llm:
        assert tokens_of(llm.generate(prompt, SHORT)) == [tuple(ids[0].tolist())]


def test_other_rows_with_equal_placeholders_share_no_pages(
    checkpoint: Checkpoint, table: Tensor
) -> None:
    """Nor do they share with the placeholders themselves; equal rows do."""
    ids = [PLACEHOLDER] * 20
    first, other = ({"prompt_token_ids": ids, "prompt_embeds": table[p[:20]]} for p in PROMPTS[:2])
    named = [Embeds(0, table[PROMPTS[0]], media_hash=name) for name in ("a", "b")]
    with make_llm(checkpoint, page_size=4, max_prompt_embeds=64) as llm:
        wanted = tokens_of(llm.generate([PROMPTS[0], PROMPTS[1][:20]], SHORT))
        got = [llm.generate(each, SHORT)[0] for each in (first, other, ids, first, other)]
        assert tokens_of(got[:2]) == tokens_of(got[3:]) == wanted
        assert [each.metrics.cached_tokens for each in got] == [0, 0, 0, 16, 16]
        prompts = [{"prompt_token_ids": ids, "prompt_embeds": each} for each in named]
        named_twice = [llm.generate(each, SHORT)[0] for each in (*prompts, *prompts)]
        assert [each.metrics.cached_tokens for each in named_twice] == [0, 0, 16, 16]


def test_a_hit_skips_the_rows_that_it_holds(checkpoint: Checkpoint, table: Tensor) -> None:
    prompt = with_rows(PROMPTS[1], [(3, 25)], table)
    with make_llm(checkpoint, page_size=4, max_prompt_embeds=64) as llm:
        with recorded_steps(llm) as steps:
            llm.generate([prompt], SHORT)
            llm.generate([prompt], SHORT)
        put = [d for step in steps for d in step.deltas if isinstance(d, OverlayDelta)]
        assert [(each.start, len(each.slots)) for each in put] == [(3, 22), (24, 1)]


def test_preempted_requests_bring_their_rows_again(checkpoint: Checkpoint, table: Tensor) -> None:
    """Within their prompts too: pages are short, and the overlay has room for two at a time."""
    prompts = random_prompts((30, 34, 38, 31), seed=9)
    brought = [with_rows(p, [(2, len(p))], table) for p in prompts]
    knobs = Knobs(num_pages=(31,), admission_margin=0, reserve_ahead=0)
    params = replace(GREEDY, max_tokens=30)
    with make_llm(
        checkpoint,
        knobs=knobs,
        page_size=4,
        chunked_prefill_size=16,
        max_prompt_embeds=70,
        enable_prefix_cache=False,
        sanitize=True,
    ) as llm:
        outputs = llm.generate(brought, params)
        assert_idle(llm)
        assert tokens_of(outputs) == [checkpoint.generate(prompt, 30) for prompt in prompts]
        assert sum(each.metrics.preemptions for each in outputs) > 0


def test_a_full_overlay_makes_requests_wait_and_an_abort_gives_its_slots_back(
    checkpoint: Checkpoint, table: Tensor
) -> None:
    brought = [with_rows(PROMPTS[i], [(0, 20)], table) for i in (0, 1)]
    with make_llm(checkpoint, max_prompt_embeds=20, chunked_prefill_size=4) as llm:
        first, second = llm.submit(brought, SHORT)
        slots = llm.engine.scheduler._overlay
        for _ in range(3):
            llm.engine.step()
        assert (slots.counts().owned, llm.engine.scheduler.num_running) == (20, 1)
        llm.abort(first.request.request_id)
        while not second.is_finished:
            llm.engine.step()
        assert tokens_of([second.snapshot()]) == tokens_of(llm.generate([PROMPTS[1]], SHORT))
        assert slots.counts().free == slots.total
        assert_idle(llm)


def test_completions_of_one_prompt_share_its_rows(checkpoint: Checkpoint, table: Tensor) -> None:
    params = replace(SHORT, n=3, temperature=1.0, seed=4)
    with make_llm(checkpoint, page_size=4, max_prompt_embeds=64) as llm:
        wanted, got = (
            [each.token_ids for each in llm.generate([prompt], params)[0].outputs]
            for prompt in (PROMPTS[0], with_rows(PROMPTS[0], SPANS[0], table))
        )
        assert got == wanted


def test_a_drafter_reads_the_placeholders_and_the_text_is_the_same(
    checkpoint: Checkpoint, table: Tensor
) -> None:
    with make_llm(
        checkpoint, max_prompt_embeds=64, speculative_algorithm="NGRAM", sanitize=True
    ) as llm:
        wanted = tokens_of(llm.generate(PROMPTS, SHORT))
        brought = [with_rows(p, s, table) for p, s in zip(PROMPTS, SPANS, strict=True)]
        outputs = llm.generate(brought, SHORT)
        assert tokens_of(outputs) == wanted
        assert sum(each.metrics.rounds for each in outputs) > 0


def test_what_could_never_fit_is_refused(checkpoint: Checkpoint, table: Tensor) -> None:
    prompt = with_rows(PROMPTS[0], [(0, 20)], table)
    for most in (0, 19):
        with make_llm(checkpoint, max_prompt_embeds=most) as llm:
            with pytest.raises(CapacityError) as refused:
                llm.generate(prompt, SHORT)
            told = str(refused.value)
            assert f"at most {most} rows (--max-prompt-embeds)" in told
            assert "got 20; raise --max-prompt-embeds, or bring fewer rows" in told
            assert (llm.engine.scheduler._overlay is None) == (most == 0)


ROWS = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("ids", "brought", "told"),
    [
        ([5] * 4, [1.0], "must be a tensor [num_tokens, hidden], or Embeds, got list"),
        ([5] * 4, ROWS[:, :3], "must be floats [num_tokens, 64], got float32 [4, 3]"),
        ([5] * 4, ROWS.int(), "got int32 [4, 64]"),
        ([5] * 4, ROWS.numpy()[::-1], "must be floats [num_tokens, 64], got At least one stride"),
        ([5] * 4, ROWS.numpy().astype(object), "floats [num_tokens, 64], got can't convert"),
        ([5] * 3, ROWS, "must be rows of tokens 0 to 2, none of them twice, got 4 rows from token"),
        ([5] * 9, [Embeds(0, ROWS), Embeds(3, ROWS)], "must be rows of tokens 4 to 8"),
        ([5] * 9, [Embeds(-1, ROWS)], "got 4 rows from token -1 on"),
        (None, ROWS, "keys beside prompt_embeds must be prompt_token_ids, got prompt"),
    ],
)
def test_wrong_rows_are_refused_by_what_is_wrong(
    checkpoint: Checkpoint, ids: list[int] | None, brought: Any, told: str
) -> None:
    of_text = {"prompt": "aa", "prompt_embeds": brought}
    prompt = of_text if ids is None else {"prompt_token_ids": ids, "prompt_embeds": brought}
    with make_llm(checkpoint, max_prompt_embeds=8) as llm, pytest.raises(RequestError) as refused:
        llm.generate(prompt, SHORT)
    assert told in str(refused.value)


def test_an_engine_that_was_not_asked_for_rows_holds_none(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as plain, make_llm(checkpoint, max_prompt_embeds=64) as asked:
        names = [set(held(each)) for each in (plain, asked)]
        assert names[1] - names[0] == {"table.overlay.rows", "table.overlay.slots"}
        planned = [each.prepared.fit.workspace_bytes for each in (plain, asked)]
        added = sum(held(asked)[name].nbytes for name in names[1] - names[0])
        assert planned[1] - planned[0] >= added
        assert held(plain)["step.overlay_slot"].numel() == 0


def held(llm: LLM) -> dict[str, Tensor]:
    named: dict[str, Tensor] = llm._live.runner.parts.named_tensors()
    return named


def next_slots(overlay: Any, view: Any) -> None:
    """A faulty derivation: the slots of the tokens behind."""
    rows = view.row_ids.index_select(0, view.req_ids)
    index = rows * overlay.slots.shape[1] + view.positions + 1
    view.overlay_slot.copy_(overlay.slots.view(-1).index_select(0, index))


def mixed(self: OverlaidRows, embedded: Tensor) -> Tensor:
    """A faulty sum: what stands for no row is multiplied by 0."""
    taken = (self.slot > 0).unsqueeze(1).to(embedded.dtype)
    return self.rows.index_select(0, self.slot) * taken + embedded * (1 - taken)


@pytest.mark.parametrize(
    ("place", "fault", "told"),
    [
        ("paceline.runner.derive.derive_overlay", next_slots, "table.overlay.slots, of tokens"),
        ("paceline.layers.embedding.OverlaidRows.over", mixed, "table.overlay.rows, that no token"),
    ],
)
def test_the_sanitizer_names_rows_and_slots_that_are_not_the_steps(
    checkpoint: Checkpoint,
    table: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    fault: Any,
    told: str,
) -> None:
    monkeypatch.setattr(place, fault)
    options = {"sanitize": True, "enforce_eager": True, "chunked_prefill_size": 7}
    llm = make_llm(checkpoint, max_prompt_embeds=64, **options)
    with llm, pytest.raises(SanitizerError) as found:
        llm.generate(with_rows(PROMPTS[1], SPANS[1], table), SHORT)
    assert told in str(found.value)


def test_prompt_log_probabilities_are_of_the_ids_that_the_caller_names(
    checkpoint: Checkpoint, table: Tensor
) -> None:
    ids, params = PROMPTS[1], replace(SHORT, prompt_logprobs=2)
    with make_llm(checkpoint, max_prompt_embeds=64, chunked_prefill_size=7) as llm:
        [plain], [brought] = (
            llm.generate(prompt, params)
            for prompt in (ids, {"prompt_token_ids": ids, "prompt_embeds": table[ids]})
        )
    assert brought.prompt_logprobs == plain.prompt_logprobs
    assert answers([brought]) == answers([plain])


@pytest.mark.parametrize("drafts", ["off", "auto"])
def test_the_bundled_model_answers_rows_as_ids_with_its_head_and_without(drafts: str) -> None:
    """The head drafts from placeholders; each of its drafts is the target's to accept."""
    with LLM(
        "bundled",
        threads=1,
        max_model_len=64,
        max_num_seqs=2,
        max_prompt_embeds=40,
        chunked_prefill_size=7,
        speculative_algorithm=drafts,
        enable_prefix_cache=False,
    ) as llm:
        ids = [*llm.tokenizer.encode("def fibonacci(n):\n    if n < 2:\n        return n\n")]
        weight = llm._live.runner.parts.model.decoder.embedding.weight
        prompt = with_rows(ids, [(1, 6), (9, len(ids))], weight.detach())
        plain, brought = (llm.generate(each, SHORT) for each in (ids, prompt))
        assert brought[0].outputs[0].text == plain[0].outputs[0].text
        assert (brought[0].metrics.rounds > 0) == (drafts == "auto")
        if drafts == "off":
            assert answers(brought) == answers(plain)
        assert_idle(llm)
