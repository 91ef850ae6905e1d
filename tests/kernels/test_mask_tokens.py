"""mask_tokens: the op and its Triton kernel against the definition, and the samplers behind it."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.draw import draw, draw_reference
from paceline.kernels.edit_logits import SampledRows
from paceline.kernels.greedy import greedy
from paceline.kernels.mask_tokens import (
    NO_MASK,
    Masks,
    mask_tokens,
    mask_tokens_reference,
    num_words,
)
from paceline.layers.sampling import SamplingTable

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ROWS = 5


def mask_triton(logits: Tensor, masks: Masks) -> None:
    """Blocks of 64 tokens, so that small vocabularies have several."""
    from paceline.kernels._triton.mask_tokens import launch_mask_tokens

    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        launch_mask_tokens(logits, masks, block_words=2)


def greedy_triton(logits: Tensor, masks: Masks | None) -> tuple[Tensor, Tensor]:
    from paceline.kernels._triton.greedy import launch_greedy

    token_ids, finite = torch.full(logits.shape[:1], -77), torch.ones(len(logits)).bool()
    mask_ids = None if masks is None else masks.ids
    launch_greedy(logits, token_ids, finite, mask_ids=mask_ids, block_vocab=64)
    return token_ids, finite


def draw_triton(logits: Tensor, *args: object) -> tuple[Tensor, Tensor]:
    from paceline.kernels._triton.draw import launch_draw

    *given, masks = args
    token_ids, finite = torch.full(logits.shape[:1], -77), torch.ones(len(logits)).bool()
    with np.errstate(all="ignore"):
        launch_draw(logits, *given, token_ids, finite, mask_ids=masks.ids, block_vocab=64)
    return token_ids, finite


MASKS = pytest.mark.parametrize("run", [mask_tokens, mask_triton], ids=["op", "triton"])


def packed(allowed: list[set[int]], vocab: int) -> Tensor:
    """[len(allowed), words] int32, written bit by bit."""
    words = np.zeros((len(allowed), num_words(vocab)), dtype=np.uint32)
    for row, tokens in enumerate(allowed):
        for token in tokens:
            words[row, token // 32] |= np.uint32(1 << (token % 32))
    return torch.from_numpy(words.view(np.int32))


def some_masks(vocab: int) -> Masks:
    """Rows 1 and 4 share a mask, row 2 has another; rows 0 and 3 have none."""
    few = {vocab - 1, vocab // 2, 0}
    return Masks(
        torch.tensor([NO_MASK, 1, 0, NO_MASK, 1], dtype=torch.int32),
        packed([set(range(0, vocab, 3)), few], vocab),
    )


def some_logits(vocab: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(vocab)
    return (torch.randn(ROWS, vocab, generator=generator) * 3).to(dtype)


def test_the_worked_example_of_the_module() -> None:
    words = packed([{0, 3, 31, 32, 39}], 40)
    assert words.tolist() == [[-2147483639, 129]]
    logits = torch.zeros(1, 40)
    mask_tokens(logits, Masks(torch.zeros(1, dtype=torch.int32), words))
    assert (logits[0] == 0).nonzero()[:, 0].tolist() == [0, 3, 31, 32, 39]


def test_the_bits_are_where_a_grammar_library_writes_them() -> None:
    llguidance = pytest.importorskip("llguidance")
    from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

    class Bytes:
        """What llguidance asks of a tokenizer that is written in Python."""

        tokens = [*(bytes([byte]) for byte in range(256)), b"<s>", b"</s>"]  # noqa: RUF012
        bos_token_id, eos_token_id = 256, 257
        special_token_ids = (256, 257)

        def __call__(self, text: bytes) -> list[int]:
            return list(text)

    vocab = len(Bytes.tokens)
    tokenizer = llguidance.LLTokenizer(llguidance.TokenizerWrapper(Bytes()), n_vocab=vocab)
    grammar = llguidance.LLMatcher.grammar_from_regex("[0-9~]+x")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    theirs = allocate_token_bitmask(1, vocab)
    fill_next_token_bitmask(matcher, theirs)
    assert theirs.dtype == np.int32
    assert theirs.shape == (1, num_words(vocab))
    assert np.array_equal(theirs, packed([{*b"0123456789~"}], vocab).numpy())


@MASKS
@pytest.mark.parametrize("vocab", [1, 31, 32, 131, 1000])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_has_no_bit_is_forbidden(run: object, vocab: int, dtype: torch.dtype) -> None:
    logits, masks = some_logits(vocab, dtype), some_masks(vocab)
    wanted = mask_tokens_reference(logits, masks)
    assert torch.equal(wanted[[0, 3]], logits[[0, 3]])
    kept = torch.isfinite(wanted)
    assert [row.nonzero()[:, 0].tolist() for row in kept[[1, 2]]] == [
        sorted({0, vocab // 2, vocab - 1}),
        list(range(0, vocab, 3)),
    ]
    run(logits, masks)
    assert torch.equal(logits, wanted)


@MASKS
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_mask_hides_no_row_that_is_not_finite(run: object, bad: float) -> None:
    logits, masks = some_logits(131), some_masks(131)
    logits[2, 0] = logits[4, 1] = logits[3, 7] = bad  # allowed, forbidden, without a mask
    run(logits, masks)
    assert logits[2, 0].isnan()
    assert logits[4, 1].isnan()
    for choose in (greedy, greedy_triton):
        token_ids, finite = choose(logits, masks)
        assert finite.tolist() == [True, True, False, False, False]
        assert token_ids[2:].tolist() == [0, 0, 0]


@pytest.mark.parametrize("choose", [greedy, greedy_triton])
def test_the_best_of_what_is_left_is_chosen(choose: object) -> None:
    logits, masks = some_logits(131), some_masks(131)
    before = logits.clone()
    mask_tokens(logits, masks)
    token_ids, finite = choose(logits, masks)
    assert finite.all()
    allowed = [range(131), (0, 65, 130), range(0, 131, 3), range(131), (0, 65, 130)]
    wanted = [max(tokens, key=lambda t: before[row, t]) for row, tokens in enumerate(allowed)]
    assert token_ids.tolist() == wanted


@pytest.mark.parametrize("choose", [greedy, greedy_triton])
def test_without_a_mask_minus_infinity_is_a_fault_still(choose: object) -> None:
    logits = some_logits(131)
    mask_tokens(logits, some_masks(131))
    assert choose(logits, None)[1].tolist() == [True, False, False, True, False]


@pytest.mark.parametrize("run", [draw, draw_triton], ids=["op", "triton"])
@pytest.mark.parametrize("vocab", [131, 9001])
@pytest.mark.parametrize(
    "wanted",
    [
        {"temperature": 0.0, "logit_bias": {1: 100.0}},
        {"temperature": 0.8},
        {"temperature": 1.5, "top_p": 0.7},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.0, "top_k": 50, "top_p": 0.9, "min_p": 0.01},
    ],
    ids=["greedy", "drawn", "top_p", "top_k", "all"],
)
def test_masked_rows_draw_what_the_definition_draws_of_what_is_left(
    run: object, vocab: int, wanted: dict[str, object]
) -> None:
    if run is draw_triton and vocab > 1000:
        pytest.skip("the interpreter is slow")
    table = SamplingTable(ROWS + 1, torch.device("cpu"))
    for row in range(1, ROWS + 1):
        params = SamplingParams(seed=row, **wanted)
        packed_row = table.pack(params, prompt_len=1, max_len=100, eos_token_ids=(), default_seed=0)
        table.floats[row] = torch.from_numpy(packed_row.floats)
        table.ints[row] = torch.from_numpy(packed_row.ints)
    at = SampledRows(
        torch.arange(1, ROWS + 1),
        torch.arange(3, 3 + ROWS),
        torch.zeros(ROWS + 1, 16, dtype=torch.int32),
        None,
    )
    logits, masks = some_logits(vocab), some_masks(vocab)
    mask_tokens(logits, masks)
    biased = logits.clone()
    for token, bias in wanted.get("logit_bias", {}).items():
        biased[:, token] += bias
    expected = draw_reference(biased, table.laws.of(at.rows), at.positions)
    token_ids, finite = run(logits, at, table.laws, table.edits, masks)
    assert finite.all()
    assert torch.equal(token_ids, expected)
    assert set(token_ids[[1, 4]].tolist()) <= {0, vocab // 2, vocab - 1}


@pytest.mark.parametrize(
    ("logits", "ids", "words", "text"),
    [
        (torch.zeros(4), None, None, r"logits must be float32, bfloat16 or float16 \[num_rows"),
        (
            None,
            torch.zeros(2).long(),
            None,
            r"masks.ids must be int32 \[2\], contiguous, got int64",
        ),
        (None, None, torch.zeros(1, 1).int(), r"masks.words must be int32 \[num_masks, 2\]"),
    ],
)
def test_bad_argument_is_named_with_what_was_expected(
    logits: Tensor | None, ids: Tensor | None, words: Tensor | None, text: str
) -> None:
    logits = torch.zeros(2, 40) if logits is None else logits
    ids = torch.zeros(2).int() if ids is None else ids
    words = torch.zeros(1, 2).int() if words is None else words
    with pytest.raises(KernelArgumentError, match=text):
        mask_tokens(logits, Masks(ids, words))
