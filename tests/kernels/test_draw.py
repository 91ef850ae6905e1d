"""draw: each row by its own parameters, token for token what the definition says."""

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.draw import Laws, draw, draw_reference
from paceline.kernels.draw_cpu import SLACK, Row, RowLaw, draw_row, near_noise
from paceline.kernels.edit_logits import NO_DRAFT, Edits, SampledRows, edit_logits
from paceline.kernels.gumbel import gumbel_at, noise_of
from paceline.kernels.keep_mask import keep_mask
from paceline.layers.sampling import SamplingTable, process_logits

VOCAB = 20_011  # beyond what one look at the noise takes
ALL = 2**31 - 1
KINDS = {
    "normal": lambda x: x * 2,
    "flat": lambda x: x * 0.01,
    "equal": lambda x: x * 0,
    "peaked": lambda x: x * 6,
    "ties": lambda x: (x * 2).round(),
    "bfloat16": lambda x: (x * 3).bfloat16().float(),
    "huge": lambda x: x * 1e37,
    "forbidden": lambda x: torch.where(x < -0.5, float("-inf"), x * 2),
    "two levels": lambda x: torch.where(x < 2.5, -9.0, 0.0),
}


def draw_triton(logits: Tensor, at: SampledRows, laws: Laws, edits: Edits) -> tuple[Tensor, Tensor]:
    """Blocks of 64 tokens, so that small vocabularies have several."""
    from paceline.kernels._triton.draw import launch_draw

    token_ids = torch.full(logits.shape[:1], -77)
    finite = torch.ones(logits.shape[0], dtype=torch.bool)
    with np.errstate(all="ignore"):  # the interpreter computes with numpy
        launch_draw(logits, at, laws, edits, token_ids, finite, block_vocab=64)
    return token_ids, finite


def edit_triton(logits: Tensor, at: SampledRows, edits: Edits) -> None:
    from paceline.kernels._triton.edit_logits import launch_edit_logits, zero_counts

    launch_edit_logits(logits, zero_counts(logits), at, edits)


DRAWS = pytest.mark.parametrize("run", [draw, draw_triton], ids=["op", "triton"])
BOTH = pytest.mark.parametrize(
    ("run", "edit"), [(draw, edit_logits), (draw_triton, edit_triton)], ids=["op", "triton"]
)


def logits_of(kind: str, seed: int = 0) -> Tensor:
    """[1, VOCAB] float32."""
    return KINDS[kind](torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)))


def law_columns(law: RowLaw) -> Laws:
    """Columns of one row."""
    floats = (torch.tensor([x]) for x in (law.temperature, law.top_p, law.min_p))
    temperature, top_p, min_p = floats
    return Laws(temperature, torch.tensor([law.top_k]), top_p, min_p, torch.tensor([law.seed]))


def exact(law: RowLaw) -> RowLaw:
    """The same with the float32 numbers that the table holds."""
    columns = law_columns(law)
    temperature, top_p, min_p = (float(x) for x in (columns[0], columns[2], columns[3]))
    return law._replace(temperature=temperature, top_p=top_p, min_p=min_p)


def test_near_noise_is_far_closer_than_its_slack() -> None:
    generator = torch.Generator().manual_seed(0)
    ends = torch.cat((torch.arange(2000), 2**40 - 1 - torch.arange(2000)))
    bits = torch.cat((ends, torch.randint(0, 2**40, (50_000,), generator=generator)))
    error = np.abs(near_noise(bits.numpy()) - noise_of(bits).double().numpy())
    assert error.max() < SLACK / 100


TEMPERATURES = (1e-45, 1e-3, 0.3, 0.8, 2.0, 100.0)


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_rows_sample_is_that_of_the_definition(kind: str, temperature: float) -> None:
    """A third of the filters for each kind of logits and temperature; all for either."""
    filters = itertools.product((1, 50, 5000, ALL), (1.0, 0.95, 0.5, 1e-5, 1e-60), (0.0, 0.05))
    turn = list(KINDS).index(kind) + TEMPERATURES.index(temperature)
    for number, (top_k, top_p, min_p) in list(enumerate(filters))[turn % 3 :: 3]:
        law = exact(RowLaw(temperature, top_k, top_p, min_p, 31 * number - 7, number))
        logits = logits_of(kind, number)
        columns = law_columns(law)
        inverse = (1.0 / columns.temperature).clamp(max=torch.finfo(torch.float32).max)
        scaled = (logits - logits.amax()) * inverse
        keep = keep_mask(scaled, top_k=columns.top_k, top_p=columns.top_p, min_p=columns.min_p)
        kept = Row(logits[0].numpy(), int(logits.argmax()), law).kept()
        if kept is not None:
            assert np.array_equal(kept, keep[0].nonzero()[:, 0])
        wanted = draw_reference(logits, columns, torch.tensor([law.position]))
        assert draw_row(logits[0].numpy(), int(logits.argmax()), law) == int(wanted), law


@pytest.mark.parametrize("others", [-40.0, -20.5], ids=["nothing", "little"])
def test_a_cut_that_a_rounded_sum_leaves_in_doubt_is_that_of_exact_masses(others: float) -> None:
    """top-p is the share of the first of two likely tokens, rounded up or down.  others: the logits
    of all others, which together weigh so much."""
    kept = []
    for number in range(24):
        logits = torch.full((1, VOCAB), others)
        logits[0, 1:3] = torch.tensor([0.0, -0.1 - 0.05 * number])
        law = exact(RowLaw(1.0, ALL, float(logits[0].double().softmax(0)[1]), 0.0, 1, 1))
        columns = law_columns(law)
        keep = keep_mask(logits, top_k=columns.top_k, top_p=columns.top_p, min_p=columns.min_p)
        found = Row(logits[0].numpy(), 1, law).kept()
        assert found is not None
        assert found.tolist() == keep[0].nonzero()[:, 0].tolist()
        kept.append(len(found))
    assert {1, 2} <= set(kept), "both happen"


FILTERS = ((5, 1.0), (None, 0.7), (None, 0.97), (None, 1e-5), (12, 0.6), (90, 0.9), (1, 0.5))


@pytest.mark.parametrize(
    ("kind", "temperature"),
    [
        pytest.param(kind, temperature, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, kind in enumerate(KINDS)
        for j, temperature in enumerate((2.5, 0.1))
        if kind not in ("huge", "forbidden")
    ],
)
def test_the_cuts_of_the_kernel_keep_what_the_definition_keeps(
    kind: str, temperature: float
) -> None:
    from paceline.kernels._triton.draw_blocks import launch_best
    from paceline.kernels._triton.draw_cuts import launch_cuts

    params = tuple(SamplingParams(temperature=temperature, top_k=k, top_p=p) for k, p in FILTERS)
    table, num, vocab = table_of(params), len(params), 150
    logits = torch.cat([logits_of(kind, seed)[:, :vocab] for seed in range(num)])
    token_ids = torch.zeros(num + 1, 1, dtype=torch.int32)
    at = SampledRows(torch.arange(1, num + 1), torch.arange(num), token_ids, None)
    blocks = launch_best(logits, at, table.laws, table.edits, block_vocab=64)
    cuts = launch_cuts(
        logits, at, table.laws, table.edits, blocks, block_vocab=64, block_members=32
    )
    inverse = 1.0 / torch.tensor(temperature, dtype=torch.float32)
    scaled = (logits - logits.amax(1, keepdim=True)) * inverse
    kept = (0.0 - scaled).view(torch.int32) <= cuts.unsqueeze(1)
    laws = table.laws.of(at.rows)
    wanted = keep_mask(scaled, top_k=laws.top_k, top_p=laws.top_p, min_p=laws.min_p)
    assert torch.equal(kept, wanted)


def test_tokens_that_tie_for_the_best_score_go_to_the_lowest_id() -> None:
    """At this temperature the logits that are left are infinitely far below: many tie."""
    logits = torch.zeros(1, VOCAB)
    law = exact(RowLaw(1e-45, ALL, 1.0, 0.0, 3, 4))
    noise = gumbel_at(torch.tensor([3]), torch.tensor([4]), torch.arange(VOCAB))
    assert draw_row(logits[0].numpy(), 0, law) == int(noise.argmax())


PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8),
    SamplingParams(temperature=0.8, top_p=0.9),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, frequency_penalty=0.4),
    SamplingParams(temperature=1.1, presence_penalty=0.9, top_k=30),
    SamplingParams(temperature=0.0, logit_bias={3: 100.0, 7: -100.0}),
    SamplingParams(temperature=0.7, min_tokens=60, max_tokens=None, stop_token_ids=(1, 5)),
    SamplingParams(
        temperature=0.9,
        min_tokens=60,
        max_tokens=None,
        stop_token_ids=(5,),
        logit_bias={5: 9.0, VOCAB: 2.0},
        presence_penalty=-0.3,
    ),
)
PROMPT, KNOWN, WIDTH = 20, 50, 64


def table_of(params: tuple[SamplingParams, ...]) -> SamplingTable:
    table = SamplingTable(len(params) + 1, torch.device("cpu"))
    for row, one in enumerate(params, start=1):
        packed = table.pack(
            one, prompt_len=PROMPT, max_len=WIDTH, eos_token_ids=(2,), default_seed=row
        )
        for name, tensor in table.named_tensors().items():
            tensor[row] = torch.from_numpy(getattr(packed, name))
    return table


def rows_at(vocab: int, drafts: Tensor | None = None) -> SampledRows:
    generator = torch.Generator().manual_seed(3)
    num = len(PARAMS)
    token_ids = torch.randint(0, vocab, (num + 1, WIDTH), generator=generator).int()
    token_ids[:, 5], token_ids[:, 30:34] = VOCAB + 9, 11
    return SampledRows(torch.arange(1, num + 1), torch.full((num,), KNOWN), token_ids, drafts)


def defined(logits: Tensor, at: SampledRows, table: SamplingTable, **more: Tensor) -> Tensor:
    """[num_rows, vocab] float32: what the processors make of `logits`."""
    rest = {"rows": at.rows, "positions": at.positions, "token_ids": at.token_ids}
    return process_logits(logits.float(), table=table, **rest, **more)


@pytest.mark.parametrize(
    ("run", "edit", "vocab"),
    [(draw, edit_logits, VOCAB), (draw, edit_logits, 97), (draw_triton, edit_triton, 97)],
    ids=["op", "small", "triton"],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_batch_of_every_kind_says_what_the_definition_says(
    run: object, edit: object, vocab: int, dtype: torch.dtype
) -> None:
    table, at = table_of(PARAMS), rows_at(vocab)
    for seed in range(2 if run is draw else 1):
        generator = torch.Generator().manual_seed(seed)
        logits = (torch.randn(len(PARAMS), vocab, generator=generator) * 3).to(dtype)
        before = logits.clone()
        token_ids, finite = run(logits, at, table.laws, table.edits)
        processed = defined(before, at, table)
        wanted = draw_reference(processed, table.laws.of(at.rows), at.positions)
        assert torch.equal(token_ids, wanted)
        assert finite.all()
        assert torch.equal(logits, before), "the logits are not as they were"
        changed = before.float()
        edit(changed, at, table.edits)
        assert torch.equal(changed, processed)


@DRAWS
@pytest.mark.parametrize("known", [PROMPT, PROMPT + 3, PROMPT + 4])
def test_a_stop_is_forbidden_until_its_limit_and_no_longer(run: object, known: int) -> None:
    params = SamplingParams(temperature=0.0, min_tokens=4, stop_token_ids=(9,))
    table, logits = table_of((params,)), torch.zeros(1, 97)
    logits[0, 9] = 1.0
    at = SampledRows(torch.tensor([1]), torch.tensor([known]), torch.zeros(2, WIDTH).int(), None)
    wanted = 0 if known < PROMPT + 4 else 9
    assert run(logits, at, table.laws, table.edits)[0].tolist() == [wanted]


@BOTH
def test_drafts_count_as_tokens_known(run: object, edit: object) -> None:
    """Rows that know two of the tokens as drafts, one beside it on another path."""
    table, plain = table_of(PARAMS), rows_at(97)
    tail = plain.token_ids[1:, KNOWN - 2 : KNOWN].long()
    elsewhere = torch.full_like(tail[:, :1], NO_DRAFT)
    drafts = torch.cat((tail[:, :1], elsewhere, tail[:, 1:]), 1)
    stale = plain.token_ids.clone()
    stale[:, KNOWN - 2 :] = 88
    logits = torch.randn(len(PARAMS), 97, generator=torch.Generator().manual_seed(1))
    changed = logits.clone()
    edit(changed, plain._replace(token_ids=stale, drafts=drafts), table.edits)
    assert torch.equal(changed, defined(logits, plain, table))


@DRAWS
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_fails_alone(run: object, bad: float) -> None:
    vocab = VOCAB if run is draw else 97
    table, at = table_of(PARAMS), rows_at(vocab)
    logits = torch.randn(len(PARAMS), vocab, generator=torch.Generator().manual_seed(2))
    clean, _ = run(logits, at, table.laws, table.edits)
    for row in (0, 2, 7) if run is draw else (2,):
        broken = logits.clone()
        broken[row, 77] = bad
        token_ids, finite = run(broken, at, table.laws, table.edits)
        others = torch.arange(len(PARAMS)) != row
        assert torch.equal(finite, others)
        assert torch.equal(token_ids[others], clean[others])
        assert token_ids[row] == 0


def test_bad_arguments_are_named() -> None:
    table, at = table_of(PARAMS), rows_at(97)
    with pytest.raises(KernelArgumentError, match=r"logits must be float32 \[num_rows, vocab\]"):
        edit_logits(torch.zeros(8, 97).bfloat16(), at, table.edits)
    with pytest.raises(KernelArgumentError, match="logits must be float32, bfloat16 or float16"):
        draw(torch.zeros(8, 97).int(), at, table.laws, table.edits)
