"""Prompts with blocks, whose tokens see one another in both directions, against transformers."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from llm_cases import (
    GREEDY,
    Checkpoint,
    Tokens,
    assert_idle,
    make_checkpoint,
    make_llm,
    random_prompts,
    recorded_steps,
    tokens_of,
)
from transformers.masking_utils import create_causal_mask
from transformers.models.gemma3.modeling_gemma3 import create_masks_for_vision_model

from paceline.core.errors import BackendUnsupported, CapacityError, RequestError
from paceline.core.modes import MaskKind
from paceline.llm.embeds import Embeds

Spans = Sequence[tuple[int, int]]
SHORT = replace(GREEDY, max_tokens=10)
PROMPTS = random_prompts((20, 26, 23, 30), seed=5)
# All of one step; two neighbours and the end of the prompt; one token, and on a page's edge; one
# longer than the windows of the Gemma below.
BLOCKS: list[Spans] = [[(0, 9)], [(3, 10), (10, 14), (18, 26)], [(5, 6), (8, 16)], [(6, 17)]]


@pytest.fixture(scope="module")
def gemma(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Two layers of three with a window of 9."""
    return make_checkpoint("gemma3-windows-two-ropes", tmp_path_factory.mktemp("gemma"))


@pytest.fixture(scope="module", params=["llama", "gemma"])
def either(request: pytest.FixtureRequest, checkpoint: Checkpoint) -> Checkpoint:
    if request.param == "llama":
        return checkpoint
    found: Checkpoint = request.getfixturevalue("gemma")
    return found


@pytest.fixture(scope="module")
def answers(either: Checkpoint) -> tuple[list[Tokens], list[Tokens]]:
    """To PROMPTS with BLOCKS and without."""
    wanted = [theirs(either, p, b) for p, b in zip(PROMPTS, BLOCKS, strict=True)]
    plain = [theirs(either, p, ()) for p in PROMPTS]
    assert wanted != plain
    return wanted, plain


def theirs(checkpoint: Checkpoint, prompt: Sequence[int], blocks: Spans) -> Tokens:
    """What transformers says under the masks that it makes for Gemma 3's pictures, all of it
    computed anew for every token."""
    model, tokens = checkpoint.theirs, list(prompt)
    for _ in range(SHORT.max_tokens or 0):
        ids = torch.tensor([tokens])
        block_ids = torch.full_like(ids, -1)
        for number, (start, stop) in enumerate(blocks):
            block_ids[0, start:stop] = number
        given: dict[str, Any] = {
            "config": model.config,
            "inputs_embeds": model.get_input_embeddings()(ids),
            "attention_mask": None,
            "past_key_values": None,
            "position_ids": None,
            "block_sequence_ids": block_ids,
        }
        is_gemma = model.config.model_type == "gemma3_text"
        mask: Any = (create_masks_for_vision_model if is_gemma else create_causal_mask)(**given)
        with torch.inference_mode():
            logits = model(ids, attention_mask=mask, use_cache=False).logits
        tokens.append(int(logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


def with_blocks(prompt: Sequence[int], blocks: Spans) -> dict[str, Any]:
    return {"prompt_token_ids": list(prompt), "prompt_blocks": blocks}


BROUGHT = [with_blocks(p, b) for p, b in zip(PROMPTS, BLOCKS, strict=True)]


WAYS: dict[str, dict[str, Any]] = {
    "eager and sanitized": {"enforce_eager": True, "sanitize": True},
    "graphs, odd chunks": {"sanitize": True, "chunked_prefill_size": 11},
    "the twin loop": {"chunked_prefill_size": 13, "overlap": False},
    "nothing shared": {"chunked_prefill_size": 12, "enable_prefix_cache": False},
    "crowded steps": {"max_num_batched_tokens": 24, "max_num_seqs": 4, "kv_cache_bytes": 1 << 22},
}


@pytest.mark.parametrize(
    ("either", "options"),
    [
        pytest.param(
            model,
            options,
            id=f"{model}-{way}",  # what the loop does is the same for windows
            marks=pytest.mark.slow if model == "gemma" and "sanitize" not in options else (),
        )
        for model in ("llama", "gemma")
        for way, options in WAYS.items()
    ],
    indirect=["either"],
)
def test_transformers_says_the_same(
    either: Checkpoint, answers: tuple[list[Tokens], list[Tokens]], options: dict[str, Any]
) -> None:
    """Twice, the second time behind prefix hits, which end within no block; and beside the same
    prompts without blocks."""
    wanted, plain = answers
    with make_llm(either, page_size=4, prompt_blocks=True, **options) as llm:
        with recorded_steps(llm) as steps:
            assert tokens_of(llm.generate(BROUGHT, SHORT)) == wanted
            again = llm.generate(BROUGHT, SHORT)
        assert tokens_of(again) == wanted
        assert {step.mask for step in steps} == {MaskKind.CAUSAL, MaskKind.BLOCK}
        shares = options.get("enable_prefix_cache", True)
        found = [each.metrics.cached_tokens for each in again]
        assert found == ([16, 16, 20, 28] if shares else [0] * 4)
        both = llm.generate([*BROUGHT, *PROMPTS], SHORT)
        assert tokens_of(both) == wanted + plain
        with recorded_steps(llm) as steps:
            llm.generate(PROMPTS, SHORT)
        assert {step.mask for step in steps} == {MaskKind.CAUSAL}
        assert_idle(llm)


def test_what_a_block_holds_further_on_keeps_its_first_pages_apart(checkpoint: Checkpoint) -> None:
    """Prompts that begin alike and whose blocks end otherwise share no page of the block; nor does
    one share with its own ids without blocks, or with other blocks.  The page before they share."""
    first = PROMPTS[1]
    other = [*first[:15], (first[15] + 1) % 50 + 4, *first[16:]]
    asked = [(first, [(6, 18)]), (other, [(6, 18)]), (first, [(6, 17)]), (first, [])]
    with make_llm(checkpoint, page_size=4, prompt_blocks=True) as llm:
        for turn in range(2):
            got = [
                llm.generate(with_blocks(p, b) if b else p, SHORT)[0] for p, b in (*asked, *asked)
            ]
            wanted = [theirs(checkpoint, p, b) for p, b in asked]
            assert tokens_of(got) == wanted * 2
            hits = [each.metrics.cached_tokens for each in got]
            assert hits[4:] == [24, 24, 24, 24]
            assert turn or hits[:4] == [0, 4, 4, 4]


def test_rows_in_place_of_embeddings_see_one_another(checkpoint: Checkpoint) -> None:
    """As a picture's do; other rows behind equal placeholders, pages on, are another block."""
    table = checkpoint.theirs.get_input_embeddings().weight.detach()
    prompts = [PROMPTS[3], [*PROMPTS[3][:16], 9, *PROMPTS[3][17:]]]
    brought = []
    for prompt in prompts:
        ids = [*prompt[:6], *[0] * 11, *prompt[17:]]
        rows = [Embeds(start, table[prompt[start : start + 1]]) for start in range(6, 17)]
        brought.append(with_blocks(ids, [(6, 17)]) | {"prompt_embeds": rows})
    wanted = [theirs(checkpoint, prompt, [(6, 17)]) for prompt in prompts]
    with make_llm(
        checkpoint, page_size=4, prompt_blocks=True, max_prompt_embeds=32, sanitize=True
    ) as llm:
        asked = replace(SHORT, logprobs=1)
        got = [llm.generate(each, asked)[0] for each in brought * 2]
    assert tokens_of(got) == wanted * 2
    first, again = ([row.chosen for row in got[at].outputs[0].logprobs or ()] for at in (1, 3))
    assert first == pytest.approx(again, abs=1e-5)
    assert [each.metrics.cached_tokens for each in got] == [0, 4, 28, 28]


def test_rounds_behind_blocks_say_the_same(checkpoint: Checkpoint) -> None:
    options = {"speculative_algorithm": "NGRAM", "sanitize": True, "chunked_prefill_size": 11}
    wanted = [theirs(checkpoint, p, b) for p, b in zip(PROMPTS, BLOCKS, strict=True)]
    with make_llm(checkpoint, page_size=4, prompt_blocks=True, **options) as llm:
        with recorded_steps(llm) as steps:
            assert tokens_of(llm.generate(BROUGHT, SHORT)) == wanted
        assert any(step.is_round for step in steps)
        assert not any(step.is_round and step.mask is MaskKind.BLOCK for step in steps)


def test_siblings_and_scores_of_a_prompt_take_blocks(checkpoint: Checkpoint) -> None:
    wanted = theirs(checkpoint, PROMPTS[0], BLOCKS[0])
    asked = replace(SHORT, n=2, seed=1, prompt_logprobs=1)
    with make_llm(checkpoint, page_size=4, prompt_blocks=True, sanitize=True) as llm:
        (got,) = llm.generate(BROUGHT[0], asked)
        assert [each.token_ids for each in got.outputs] == [wanted] * 2


def test_a_block_that_no_step_holds_is_refused(checkpoint: Checkpoint) -> None:
    """A step has room for it beside whatever decodes."""
    cases = [({"chunked_prefill_size": 8}, 8), ({"max_num_batched_tokens": 15}, 8)]
    for options, most in cases:
        with make_llm(checkpoint, prompt_blocks=True, **options) as llm:
            with pytest.raises(CapacityError) as refused:
                llm.generate(BROUGHT[0], SHORT)
            told = str(refused.value)
            assert f"of at most {most} tokens: a step computes one whole, got 9; raise" in told
            held = with_blocks(PROMPTS[0], [(0, most)])
            assert tokens_of(llm.generate(held, SHORT)) == [
                theirs(checkpoint, PROMPTS[0], [(0, most)])
            ]


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([(3, 3)], r"at least one token each, ascending and apart, got \[\(3, 3\)\]"),
        ([(3, 5), (4, 6)], "ascending and apart"),
        ([(-1, 4)], "ascending and apart"),
        ([], r"ascending and apart, got \[\]"),
        ([(3, 21)], r"within the prompt's 20 tokens, got \[\(3, 21\)\]"),
        ([(3, 4.5)], r"\(start, stop\) of each block, token positions, got \(3, 4.5\)"),
        ("3-4", "token positions, got '3-4'"),
        (7, "token positions, got 7"),
    ],
)
def test_what_are_no_blocks_is_refused(checkpoint: Checkpoint, given: Any, told: str) -> None:
    with make_llm(checkpoint, prompt_blocks=True) as llm:
        with pytest.raises(RequestError, match=f"prompt_blocks must be .*{told}"):
            llm.generate(with_blocks(PROMPTS[0], given), SHORT)
        text = {"prompt": "aa", "prompt_blocks": [(0, 1)]}
        with pytest.raises(RequestError, match="keys beside prompt_blocks must be prompt_token_id"):
            llm.generate(text, SHORT)


def test_an_engine_that_was_not_asked_for_blocks_refuses_them(checkpoint: Checkpoint) -> None:
    with make_llm(checkpoint) as llm:
        assert llm.engine._runner.parts.table.block_ends is None
        with pytest.raises(RequestError, match=r"left out, .* with --prompt-blocks"):
            llm.generate(BROUGHT[0], SHORT)


def test_a_backend_that_sees_no_blocks_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(
        BackendUnsupported, match=r"mask kind must be .*, got \['block', 'causal'\]"
    ):
        make_llm(checkpoint, prompt_blocks=True, attention_backend="flashinfer")
