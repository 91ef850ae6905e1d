"""What a request brings beside token ids, on a GPU: masks of tokens, positions, input rows."""

from dataclasses import replace

import pytest
import torch
from grammar_turns import Turns
from step_cases import rubbish_view

from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.derive_rope import RopeRows, derive_rope, derive_rope_reference
from paceline.kernels.greedy import greedy, greedy_reference
from paceline.kernels.mask_tokens import (
    NO_MASK,
    Masks,
    mask_tokens,
    mask_tokens_reference,
    num_words,
)
from paceline.llm.embeds import Embeds
from paceline.llm.llm import LLM

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
PROMPTS = [[5 + row, 6, 7, 8 + row] * (3 + row) for row in range(4)]


@pytest.mark.parametrize("vocab", [32, 4097, 128256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_masks_equal_their_reference_and_greedy_obeys(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits = torch.randn(70, vocab, generator=generator).to(dtype)
    logits[2, vocab // 2] = float("nan")
    words = torch.randint(-(2**31), 2**31, (3, num_words(vocab)), generator=generator)
    ids = torch.randint(NO_MASK, 3, (70,), generator=generator).int()
    masks = Masks(ids, words.int())
    wanted = mask_tokens_reference(logits, masks)
    mine, on_device = logits.cuda(), Masks(ids.cuda(), masks.words.cuda())
    mask_tokens(mine, on_device)
    assert torch.equal(mine.cpu().nan_to_num(7.0), wanted.nan_to_num(7.0))
    for found, expected in zip(
        greedy(mine, on_device), greedy_reference(wanted, masks), strict=True
    ):
        assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("tokens", [1, 64, 8192])
def test_positions_of_several_axes_equal_their_reference(tokens: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    rope = RopeRows.make(9, 400, 3, torch.device("cpu"))
    rope.given.copy_(torch.randint(0, 400, rope.given.shape, generator=generator))
    rope.ahead.copy_(torch.randint(0, 200, rope.ahead.shape, generator=generator))
    view = replace(
        rubbish_view(8, tokens, (4,), "cpu"),
        row_ids=torch.randperm(8, generator=generator) + 1,
        req_ids=torch.randint(0, 8, (tokens,), generator=generator).sort().values,
        positions=torch.randint(0, 400, (tokens,), generator=generator),
        rope_positions=torch.full((tokens, 3), -7).T,
    )
    names = "row_ids", "req_ids", "positions"
    on_device = replace(
        view,
        rope_positions=torch.full((tokens, 3), -7, device="cuda").T,
        **{name: getattr(view, name).cuda() for name in names},
    )
    derive_rope(RopeRows(rope.given.cuda(), rope.ahead.cuda()), on_device)
    derive_rope_reference(rope, view)
    assert torch.equal(on_device.rope_positions.cpu(), view.rope_positions)


@pytest.mark.parametrize("drafts", ["off", "EAGLE3"])
def test_a_grammar_binds_its_request_and_no_other(drafts: str) -> None:
    turns = Turns([range(10, 20), range(40, 90, 7)], length=24)
    with LLM("bundled", device="cuda", max_num_seqs=4, speculative_algorithm=drafts) as llm:
        free = llm.generate(PROMPTS, GREEDY)
        bound = llm.generate(PROMPTS, GREEDY, grammar=[None, turns, None, turns])
    for index in (0, 2):
        assert bound[index].outputs[0].token_ids == free[index].outputs[0].token_ids
    for index in (1, 3):
        said = bound[index].outputs[0].token_ids
        assert all(token in range(10, 20) for token in said[::2]), said
        assert all(token in range(40, 90, 7) for token in said[1::2]), said
        assert len(said) == 24


@pytest.mark.parametrize("eager", [False, True], ids=["graphs", "eager"])
def test_rows_of_ids_answer_as_the_ids_do(eager: bool) -> None:
    with LLM(
        "bundled",
        device="cuda",
        max_num_seqs=4,
        max_prompt_embeds=64,
        enforce_eager=eager,
        speculative_algorithm="off",
        enable_prefix_cache=False,
        chunked_prefill_size=7,
    ) as llm:
        weight = llm._live.runner.parts.model.decoder.embedding.weight.detach()
        brought = [
            {"prompt_token_ids": [3] * len(ids), "prompt_embeds": [Embeds(0, weight[ids].cpu())]}
            for ids in PROMPTS
        ]
        plain, answered = llm.generate(PROMPTS, GREEDY), llm.generate(brought, GREEDY)
    for one, other in zip(plain, answered, strict=True):
        assert one.outputs[0].token_ids == other.outputs[0].token_ids
