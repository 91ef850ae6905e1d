"""Each processor against transformers' own, or against the published formula."""

import pytest
import torch
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from paceline.core.request.sampling_params import SamplingParams
from paceline.kernels.keep_mask import keep_mask
from paceline.layers.sampling import SamplingTable, process_logits

VOCAB = 97
MAX_TOKENS = 40
PROMPT_LEN = 9
KNOWN = 25


def _logits(seed: int, num_rows: int = 1) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def _history(seed: int) -> torch.Tensor:
    """[1, MAX_TOKENS] int32; stale entries, some of them no ids at all, follow the KNOWN tokens."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (1, MAX_TOKENS), generator=generator, dtype=torch.int32)
    unseen = min(set(range(VOCAB)) - set(tokens[0, :KNOWN].tolist()))
    tokens[:, KNOWN:] = torch.tensor([unseen, -7, 2**31 - 1, VOCAB, unseen]).repeat(3)
    return tokens


def _table(params: SamplingParams, eos: tuple[int, ...] = ()) -> SamplingTable:
    table = SamplingTable(2, torch.device("cpu"))
    packed = table.pack(
        params, prompt_len=PROMPT_LEN, max_len=MAX_TOKENS, eos_token_ids=eos, default_seed=0
    )
    table.floats[1] = torch.from_numpy(packed.floats)
    table.ints[1] = torch.from_numpy(packed.ints)
    return table


def _process(logits, params, *, history, known=KNOWN, eos=()):
    token_ids = torch.cat([torch.full_like(history, -1), history])
    return process_logits(
        logits,
        rows=torch.tensor([1]),
        positions=torch.tensor([known]),
        table=_table(params, eos),
        token_ids=token_ids,
    )


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3])
def test_repetition_penalty_equals_transformers(penalty):
    logits, history = _logits(1), _history(1)
    ours = _process(logits, SamplingParams(repetition_penalty=penalty), history=history)
    theirs = RepetitionPenaltyLogitsProcessor(penalty)(history[:, :KNOWN].long(), logits.clone())
    assert torch.equal(ours, theirs)


def test_presence_and_frequency_follow_the_published_formula():
    """OpenAI API reference, "Advanced usage": mu[j] - c[j] * frequency - (c[j] > 0) * presence."""
    logits, history = _logits(2), _history(2)
    history[0, PROMPT_LEN : PROMPT_LEN + 4] = 5
    params = SamplingParams(presence_penalty=0.7, frequency_penalty=-0.3)
    ours = _process(logits, params, history=history)
    expected = logits.double().clone()
    output = history[0, PROMPT_LEN:KNOWN].tolist()
    for token in set(output):
        expected[0, token] -= output.count(token) * -0.3 + 0.7
    torch.testing.assert_close(ours.double(), expected, rtol=1e-6, atol=1e-6)
    prompt_only = set(history[0, :PROMPT_LEN].tolist()) - set(output)
    assert prompt_only
    assert all(ours[0, token] == logits[0, token] for token in prompt_only)


def test_logit_bias_equals_transformers():
    logits, history = _logits(3), _history(3)
    bias = {0: 2.5, 17: -100.0, VOCAB - 1: 0.25}
    ours = _process(logits, SamplingParams(logit_bias=bias), history=history)
    theirs = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    assert torch.equal(ours, theirs(history[:, :KNOWN].long(), logits.clone()))


def test_bias_and_stop_ids_outside_the_vocabulary_touch_nothing():
    logits, history = _logits(3), _history(3)
    params = SamplingParams(logit_bias={VOCAB: 50.0}, stop_token_ids=(VOCAB + 5,), min_tokens=16)
    assert torch.equal(_process(logits, params, history=history, known=PROMPT_LEN), logits)


@pytest.mark.parametrize("known", [PROMPT_LEN, PROMPT_LEN + 3, PROMPT_LEN + 4, KNOWN])
def test_min_tokens_equals_transformers(known):
    logits, history = _logits(4), _history(4)
    params = SamplingParams(min_tokens=4, stop_token_ids=(0, 30))
    ours = _process(logits, params, history=history, known=known, eos=(12,))
    theirs = MinNewTokensLengthLogitsProcessor(PROMPT_LEN, 4, [0, 30, 12])
    assert torch.equal(ours, theirs(history[:, :known].long(), logits.clone()))


def test_neutral_parameters_return_the_input_bit_for_bit():
    logits, history = _logits(5), _history(5)
    logits[0, 3], logits[0, 4] = -0.0, 1e-40
    assert torch.equal(_process(logits, SamplingParams(), history=history, eos=(1,)), logits)
    assert keep_mask(logits - logits.amax(), **_columns(top_k=None, top_p=1.0, min_p=0.0)).all()


def _columns(*, top_k: int | None, top_p: float, min_p: float) -> dict[str, torch.Tensor]:
    table = _table(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    return {"top_k": table.top_k[1:], "top_p": table.top_p[1:], "min_p": table.min_p[1:]}


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0])
@pytest.mark.parametrize(
    "filters",
    [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": VOCAB + 10},
        {"top_p": 0.9},
        {"top_p": 1e-6},
        {"top_p": 0.999},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"top_k": 12, "top_p": 0.8},
        {"top_k": 30, "min_p": 0.1},
        {"top_k": 20, "top_p": 0.95, "min_p": 0.02},
    ],
    ids=str,
)
def test_filters_keep_what_transformers_keeps(filters, temperature):
    """In transformers' order: temperature, top-k, top-p, min-p."""
    neutral = {"top_k": None, "top_p": 1.0, "min_p": 0.0}
    for seed in range(20):
        logits = _logits(seed)
        theirs = TemperatureLogitsWarper(temperature)(None, logits)
        if "top_k" in filters:
            theirs = TopKLogitsWarper(filters["top_k"])(None, theirs)
        if "top_p" in filters:
            theirs = TopPLogitsWarper(filters["top_p"])(None, theirs)
        if "min_p" in filters:
            theirs = MinPLogitsWarper(filters["min_p"])(None, theirs)
        scaled = (logits - logits.amax()) / temperature
        kept = keep_mask(scaled, **_columns(**(neutral | filters)))
        assert torch.equal(kept, theirs > float("-inf"))


def test_tokens_tied_with_the_last_one_kept_are_kept():
    scaled = torch.tensor([[0.0, -1.0, -1.0, -1.0, -2.0]])
    kept = keep_mask(scaled, **_columns(top_k=2, top_p=1.0, min_p=0.0))
    assert kept.tolist() == [[True, True, True, True, False]]
    kept = keep_mask(scaled, **_columns(top_k=None, top_p=0.5, min_p=0.0))
    assert kept.tolist() == [[True, True, True, True, False]]


def test_top_p_measures_mass_among_the_tokens_top_k_kept():
    """Probabilities 0.4, 0.3, 0.2, 0.1: after top_k=2 the best token has 4/7 of the mass."""
    scaled = torch.tensor([[0.4, 0.3, 0.2, 0.1]]).div(0.4).log()
    kept = keep_mask(scaled, **_columns(top_k=2, top_p=0.5, min_p=0.0))
    assert kept.tolist() == [[True, False, False, False]]
    kept = keep_mask(scaled, **_columns(top_k=None, top_p=0.5, min_p=0.0))
    assert kept.tolist() == [[True, True, False, False]]


def test_top_p_stops_where_the_mass_is_just_reached():
    """Of 1/2, 1/4 and 1/4, the best token alone is half: as in transformers, nothing follows."""
    scaled = torch.tensor([[1.0, 0.5, 0.5]]).log()
    kept = keep_mask(scaled, **_columns(top_k=None, top_p=0.5, min_p=0.0))
    assert kept.tolist() == [[True, False, False]]
    assert torch.equal(kept, TopPLogitsWarper(0.5)(None, scaled) > float("-inf"))
    above = keep_mask(scaled, **_columns(top_k=None, top_p=0.500001, min_p=0.0))
    assert above.tolist() == [[True, True, True]]


def test_filters_are_equivariant_under_permutation_of_the_vocabulary():
    scaled = _logits(8).round()
    scaled -= scaled.amax()
    order = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(3))
    columns = _columns(top_k=40, top_p=0.9, min_p=0.01)
    assert torch.equal(
        keep_mask(scaled[:, order], **columns), keep_mask(scaled, **columns)[:, order]
    )
