"""sample: one law for every batch, tier and position; a broken row never touches its neighbours."""

import math

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from paceline.core.errors import KernelArgumentError, RequestError
from paceline.core.request.sampling_params import MAX_LOGPROBS, SamplerTier, SamplingParams
from paceline.kernels.mask_tokens import NO_MASK, Masks, mask_tokens_reference, num_words
from paceline.layers.sampling import PackedRow, SamplingTable, sample
from paceline.layers.sampling.built_in import NO_TOKEN

VOCAB = 131
MAX_TOKENS = 50
PROMPT_LEN = 6
PARAMS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=5),
    SamplingParams(temperature=1.3, top_p=0.8),
    SamplingParams(temperature=0.9, min_p=0.05, seed=-12),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.9, min_p=0.01, seed=2**62),
    SamplingParams(temperature=0.0, repetition_penalty=1.5),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(logit_bias={3: 50.0, 8: -100.0}),
    SamplingParams(min_tokens=10, stop_token_ids=(4, 5), temperature=1e-30),
)
NUM = len(PARAMS)


def _table(params=PARAMS) -> SamplingTable:
    table = SamplingTable(len(params) + 1, torch.device("cpu"))
    for row, one in enumerate(params, start=1):
        packed = table.pack(
            one, prompt_len=PROMPT_LEN, max_len=MAX_TOKENS, eos_token_ids=(2,), default_seed=row
        )
        for name, tensor in table.named_tensors().items():
            tensor[row] = torch.from_numpy(getattr(packed, name))
    return table


def _inputs(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {
        "logits": torch.randn(NUM, VOCAB, generator=generator) * 2,
        "rows": torch.arange(1, NUM + 1),
        "positions": torch.randint(PROMPT_LEN, MAX_TOKENS, (NUM,), generator=generator),
        "token_ids": torch.randint(
            0, VOCAB, (NUM + 1, MAX_TOKENS), generator=generator, dtype=torch.int32
        ),
    }


def _sample(inputs, table, tier=SamplerTier.PLUG_INS, top_logprobs=0):
    logits, rest = inputs["logits"], {k: v for k, v in inputs.items() if k != "logits"}
    return sample(logits, **rest, table=table, tier=tier, top_logprobs=top_logprobs)


def _take(inputs, index):
    picked = {name: inputs[name][index] for name in ("logits", "rows", "positions")}
    return picked | {"token_ids": inputs["token_ids"]}


def test_a_row_gets_the_same_token_in_any_batch():
    table = _table()
    for seed in range(20):
        inputs = _inputs(seed)
        whole = _sample(inputs, table).token_ids
        order = torch.randperm(NUM, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(_sample(_take(inputs, order), table).token_ids, whole[order])
        for row in range(NUM):
            alone = _sample(_take(inputs, slice(row, row + 1)), table).token_ids
            assert alone.item() == whole[row].item()


def test_a_request_gets_the_same_token_in_any_table_row():
    inputs, table = _inputs(), _table()
    moved = SamplingTable(2 * NUM + 1, torch.device("cpu"))
    for name, tensor in moved.named_tensors().items():
        tensor[NUM + 1 :] = table.named_tensors()[name][1:]
    history = torch.full((2 * NUM + 1, MAX_TOKENS), -1, dtype=torch.int32)
    history[NUM + 1 :] = inputs["token_ids"][1:]
    elsewhere = inputs | {"rows": inputs["rows"] + NUM, "token_ids": history}
    assert torch.equal(_sample(elsewhere, moved).token_ids, _sample(inputs, table).token_ids)


def test_a_wider_tier_gives_the_same_token():
    table = _table()
    tiers = torch.tensor([params.sampler_tier for params in PARAMS])
    for seed in range(50):
        inputs = _inputs(seed)
        full = _sample(inputs, table).token_ids
        for tier in SamplerTier:
            narrow = _sample(inputs, table, tier).token_ids
            assert torch.equal(narrow[tiers <= tier], full[tiers <= tier])


def test_temperature_zero_is_the_plain_argmax_even_among_ties():
    inputs, table = _inputs(), _table((SamplingParams(temperature=0.0),) * NUM)
    inputs["logits"] = inputs["logits"].round()
    for tier in SamplerTier:
        sampled = _sample(inputs, table, tier)
        assert torch.equal(sampled.token_ids, inputs["logits"].argmax(-1))


def test_a_tiny_temperature_is_greedy():
    inputs = _inputs()
    for temperature in (1e-3, 1e-30, 1e-45):
        table = _table((SamplingParams(temperature=temperature),) * NUM)
        assert torch.equal(_sample(inputs, table).token_ids, inputs["logits"].argmax(-1))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tier", list(SamplerTier))
def test_a_non_finite_row_fails_alone(bad, tier):
    inputs, table = _inputs(), _table()
    clean = _sample(inputs, table, tier, MAX_LOGPROBS)
    for row in (0, 5, NUM - 1):
        broken = inputs | {"logits": inputs["logits"].clone()}
        broken["logits"][row, VOCAB // 2] = bad
        sampled = _sample(broken, table, tier, MAX_LOGPROBS)
        others = torch.arange(NUM) != row
        assert torch.equal(sampled.finite, others)
        assert sampled.token_ids[row] == 0
        assert torch.equal(sampled.token_ids[others], clean.token_ids[others])
        assert torch.equal(sampled.chosen_logprob[others], clean.chosen_logprob[others])
        assert torch.equal(sampled.top_values[others], clean.top_values[others])


def test_sampled_frequencies_follow_the_filtered_softmax():
    num_draws = 20_000
    logits = torch.tensor([[1.0, 0.0, 2.0, -1.0, 1.5, -4.0, 0.5]])
    params = SamplingParams(temperature=0.8, top_k=5, top_p=0.95, seed=3)
    sampled = sample(
        logits.expand(num_draws, -1).contiguous(),
        rows=torch.ones(num_draws, dtype=torch.int64),
        positions=torch.arange(num_draws),
        table=_table((params,)),
        token_ids=torch.zeros(2, 1, dtype=torch.int32),
        tier=SamplerTier.BY_ROW,
        top_logprobs=0,
    )
    probs = torch.softmax(logits[0].double() / 0.8, 0)
    kept = [2, 4, 0, 6]  # 0.95 of the mass of the best five
    expected = torch.zeros(7, dtype=torch.float64)
    expected[kept] = probs[kept] / probs[kept].sum() * num_draws
    counts = torch.bincount(sampled.token_ids, minlength=7).double()
    assert counts[expected == 0].sum() == 0
    chi_square = ((counts - expected) ** 2)[kept] / expected[kept]
    assert chi_square.sum() < 11.34  # 3 degrees of freedom, 1%


def test_logprobs_are_of_the_raw_distribution():
    inputs, table = _inputs(), _table()
    sampled = _sample(inputs, table, top_logprobs=MAX_LOGPROBS)
    reference = torch.log_softmax(inputs["logits"].double(), -1)
    chosen = reference.gather(-1, sampled.token_ids[:, None])[:, 0]
    values, ids = reference.topk(MAX_LOGPROBS)
    torch.testing.assert_close(sampled.chosen_logprob.double(), chosen, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sampled.top_values.double(), values, rtol=1e-5, atol=1e-5)
    assert torch.equal(sampled.top_ids, ids)


def test_logprobs_do_not_change_tokens_and_are_absent_unless_asked():
    inputs, table = _inputs(), _table()
    without, with_them = _sample(inputs, table), _sample(inputs, table, top_logprobs=5)
    assert torch.equal(without.token_ids, with_them.token_ids)
    assert (without.chosen_logprob, without.top_ids, without.top_values) == (None, None, None)
    assert with_them.top_ids.shape == (NUM, 5)


class _RecordedOps(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tier", list(SamplerTier))
def test_no_host_read_and_a_sort_behind_plug_ins_alone(tier):
    inputs, table = _inputs(), _table()
    with _RecordedOps() as ops:
        _sample(inputs, table, tier, MAX_LOGPROBS)
    host_reads = {"_local_scalar_dense", "nonzero", "masked_select", "item", "lift_fresh"}
    assert not host_reads & set(ops.names)
    assert ops.names.count("sort") == (1 if tier is SamplerTier.PLUG_INS else 0)


def test_the_greedy_tier_is_one_operation():
    inputs, table = _inputs(), _table()
    with _RecordedOps() as ops:
        _sample(inputs, table, SamplerTier.GREEDY)
    assert [name for name in ops.names if name != "empty"] == ["greedy"]


def test_padded_rows_of_garbage_change_nothing():
    inputs, table = _inputs(), _table()
    clean = _sample(inputs, table).token_ids
    padded = {
        "logits": torch.cat([inputs["logits"], torch.full((2, VOCAB), math.nan)]),
        "rows": torch.cat([inputs["rows"], torch.zeros(2, dtype=torch.int64)]),
        "positions": torch.cat([inputs["positions"], torch.tensor([1, MAX_TOKENS])]),
        "token_ids": inputs["token_ids"].clone(),
    }
    padded["token_ids"][0] = torch.tensor([-1, 2**31 - 1]).repeat(MAX_TOKENS // 2)
    assert torch.equal(_sample(padded, table).token_ids[:NUM], clean)


@pytest.mark.parametrize("tier", list(SamplerTier))
def test_logits_of_half_precision_give_what_their_float32_copies_give(tier):
    inputs, table = _inputs(), _table()
    inputs["logits"] = inputs["logits"].to(torch.bfloat16)
    sampled = _sample(inputs, table, tier, MAX_LOGPROBS)
    widened = _sample(inputs | {"logits": inputs["logits"].float()}, table, tier, MAX_LOGPROBS)
    assert sampled.top_values.dtype == torch.float32
    for name in ("token_ids", "finite", "chosen_logprob", "top_ids", "top_values"):
        assert torch.equal(getattr(sampled, name), getattr(widened, name)), name


def test_logits_that_are_no_floating_point_matrix_are_refused():
    inputs = _inputs()
    inputs["logits"] = inputs["logits"].int()
    text = r"logits must be floating-point \[num_rows, vocab\], got torch.int32 \[10, 131\]; pass"
    with pytest.raises(KernelArgumentError, match=text):
        _sample(inputs, _table())


def test_a_packed_row_reads_back_through_the_named_columns():
    params = SamplingParams(
        temperature=0.5, top_k=7, top_p=0.25, min_p=0.125, repetition_penalty=1.5,
        presence_penalty=-0.5, frequency_penalty=0.75, logit_bias={9: -4.0, 4: 2.0},
        min_tokens=3, stop_token_ids=(8, 1), seed=-5,
    )  # fmt: skip
    table = _table((params,))
    bias, penalties, min_tokens = (stage.columns for stage in table.stages)
    shared = {
        "temperature": 0.5, "top_p": 0.25, "min_p": 0.125, "top_k": 7, "seed": -5,
        "prompt_len": PROMPT_LEN, "max_len": MAX_TOKENS, "num_stop_ids": 3,
    }  # fmt: skip
    for name, value in shared.items():
        assert getattr(table, name)[1].item() == value, name
    of_penalties = {"repetition": 1.5, "presence": -0.5, "frequency": 0.75}
    assert {name: column[1].item() for name, column in penalties.items()} == of_penalties
    assert min_tokens["min_len"][1] == PROMPT_LEN + 3
    assert table.stop_ids[1].tolist()[:4] == [8, 1, 2, NO_TOKEN]
    assert bias["ids"][1].tolist()[:3] == [4, 9, NO_TOKEN]
    assert bias["values"][1].tolist()[:3] == [2.0, -4.0, 0.0]
    assert bias["count"][1] == 2


def test_rows_start_neutral_and_widths_match_the_packed_row():
    table = SamplingTable(3, torch.device("cpu"))
    assert table.temperature.tolist() == [0.0, 0.0, 0.0]
    assert table.num_stop_ids.tolist() == [0, 0, 0]
    packed = table.pack(
        SamplingParams(), prompt_len=1, max_len=2, eos_token_ids=(), default_seed=77
    )
    assert packed._fields == PackedRow._fields == tuple(table.named_tensors())
    assert packed.ints.shape == table.ints.shape[1:]
    assert packed.floats.shape == table.floats.shape[1:]
    assert packed.ints.dtype == np.int64
    assert packed.ints[1] == 77  # the default seed


def test_too_many_stop_ids_are_refused_when_packing():
    params = SamplingParams(stop_token_ids=tuple(range(32)))
    with pytest.raises(RequestError, match="stop_token_ids must be at most 32 ids with the"):
        _table().pack(params, prompt_len=1, max_len=2, eos_token_ids=(40,), default_seed=0)


def _masks() -> Masks:
    """Every other row has one: even tokens, or the three from 96 on."""
    words = torch.full((2, num_words(VOCAB)), 0x55555555, dtype=torch.int32)
    words[1] = 0
    words[1, 3] = 0b111
    ids = torch.full((NUM,), NO_MASK, dtype=torch.int32)
    ids[1::4], ids[3::4] = 0, 1
    return Masks(ids, words)


@pytest.mark.parametrize("tier", list(SamplerTier))
def test_a_mask_comes_first_and_all_else_acts_on_what_is_left(tier):
    table, masks = _table(), _masks()
    for seed in range(10):
        inputs = _inputs(seed)
        sampled = _sample(inputs | {"masks": masks}, table, tier)
        assert sampled.finite.all()
        # What nobody allows as if the model could never say it.
        left = mask_tokens_reference(inputs["logits"], masks).clamp(min=-1e30)
        assert torch.equal(
            sampled.token_ids, _sample(inputs | {"logits": left}, table, tier).token_ids
        )
        free = masks.ids == NO_MASK
        plain = _sample(inputs, table, tier)
        assert torch.equal(sampled.token_ids[free], plain.token_ids[free])
        assert (sampled.token_ids[1::4] % 2 == 0).all()
        assert set(sampled.token_ids[3::4].tolist()) <= {96, 97, 98}


@pytest.mark.parametrize("tier", list(SamplerTier))
def test_log_probabilities_are_of_the_distribution_before_the_mask(tier):
    inputs, table = _inputs(), _table()
    before = inputs["logits"].clone()
    sampled = _sample(inputs | {"masks": _masks()}, table, tier, MAX_LOGPROBS)
    assert torch.equal(inputs["logits"], before)
    raw = before.log_softmax(-1)
    assert torch.equal(sampled.chosen_logprob, raw.gather(1, sampled.token_ids[:, None])[:, 0])
    assert torch.equal(sampled.top_values, raw.topk(MAX_LOGPROBS).values)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("tier", list(SamplerTier))
def test_a_mask_hides_no_row_that_is_not_finite(bad, tier):
    inputs, table, masks = _inputs(), _table(), _masks()
    for row, token in ((1, 1), (1, 2), (3, 96), (0, 5)):  # forbidden, allowed, without a mask
        broken = inputs | {"logits": inputs["logits"].clone(), "masks": masks}
        broken["logits"][row, token] = bad
        assert _sample(broken, table, tier).finite.logical_not().nonzero().tolist() == [[row]]
