"""Inputs: exact in the formats they travel in, other ones each time, finite, and never dull."""

from dataclasses import replace

import pytest
import torch
from oracle_cases import PLAIN, TREE, random_case

from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.methods.softmax import visible_keys
from paceline.proof.suite.case import Batch, Case, Inputs, Layer, PageLayout

FP8 = replace(PLAIN, dtype="bfloat16", kv_dtype="float8_e4m3fn", layers=(Layer(), Layer()))


@pytest.mark.parametrize("inputs", Inputs)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_every_number_is_exact_in_the_cases_dtype(dtype: str, inputs: Inputs) -> None:
    data = make_inputs(replace(PLAIN, dtype=dtype, inputs=inputs), 0)
    bait = (data.bait_keys, data.bait_values)
    for number in (*data.queries, *data.keys, *data.values, *bait):
        assert number.dtype is torch.float64
        assert torch.equal(number.to(getattr(torch, dtype)).double(), number)


@pytest.mark.parametrize("inputs", Inputs)
def test_an_fp8_cache_holds_keys_and_values_exactly(inputs: Inputs) -> None:
    data = make_inputs(replace(FP8, inputs=inputs), 0)
    assert data.k_scales is not None
    assert data.v_scales is not None
    pairs = [*((keys, data.k_scales) for keys in (*data.keys, data.bait_keys.unsqueeze(1)))]
    pairs += [(values, data.v_scales) for values in (*data.values, data.bait_values.unsqueeze(1))]
    for numbers, scales in pairs:
        stored = (numbers / scales.view(-1, 1, 1, 1)).to(torch.float8_e4m3fn)
        assert torch.equal(stored.double() * scales.view(-1, 1, 1, 1), numbers)
        assert torch.equal(numbers.bfloat16().double(), numbers)
    scales = torch.cat((data.k_scales, data.v_scales))
    assert bool((scales != 1).all())
    assert bool((data.k_scales != data.v_scales).all())
    assert torch.equal(scales.log2().round(), scales.log2())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_what_a_step_computes_is_rounded_to_what_an_fp8_cache_holds(dtype: str) -> None:
    factor = 0.25
    stored = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double() * factor
    stored = stored[(stored != 0) & stored.isfinite()]
    data = make_inputs(FP8, 0)
    computed = data.computed(stored).to(getattr(torch, dtype)).double()
    assert not bool((computed == stored).any())
    rounded = (computed / factor).to(torch.float8_e4m3fn).double() * factor
    assert torch.equal(rounded, stored)
    assert make_inputs(PLAIN, 0).computed(stored) is stored


def test_shapes_follow_the_case() -> None:
    case = replace(PLAIN, num_heads=8, head_dim=80, v_head_dim=96, layers=(Layer(), Layer(4)))
    data = make_inputs(case, 0)
    assert data.queries[1].shape == (2, 4, 8, 80)
    assert data.keys[2].shape == (2, 19, 2, 80)
    assert data.values[0].shape == (2, 8, 2, 96)
    assert data.bait_keys.shape == (2, 2, 80)
    assert data.sinks is None
    assert data.k_scales is None


def test_batches_and_layers_have_other_numbers_and_calls_the_same() -> None:
    case = replace(PLAIN, layers=(Layer(), Layer()), batches=(PLAIN.batches[0],) * 2)
    first, again, other = make_inputs(case, 0), make_inputs(case, 0), make_inputs(case, 1)
    assert torch.equal(first.queries[0], again.queries[0])
    for name in ("queries", "keys", "values"):
        mine, theirs = getattr(first, name)[2], getattr(other, name)[2]
        assert not torch.equal(mine, theirs)
        assert not torch.equal(mine[0], mine[1])


def test_a_shared_prefix_has_the_same_keys_and_values_in_every_request() -> None:
    case = replace(PLAIN, layout=PageLayout.SHARED_PREFIX, batches=(Batch((18, 9), (1, 3)),))
    data = make_inputs(case, 0)
    assert torch.equal(data.keys[0][:, :8], data.keys[1][:, :8])
    assert torch.equal(data.values[0][:, :8], data.values[1][:, :8])
    assert not torch.equal(data.values[0][:, 8], data.values[1][:, 8])


def scores(case: Case, request: int, row: int, head: int) -> torch.Tensor:
    """[kv_len] of one query."""
    data = make_inputs(case, 0)
    kv_head = head // (case.num_heads // case.num_kv_heads)
    return data.scale * (data.keys[request][0][:, kv_head] @ data.queries[request][0, row, head])


def test_a_query_prefers_the_next_row_to_all_it_sees() -> None:
    case = replace(PLAIN, batches=(Batch((20,), (3,)),))
    found = scores(case, 0, 1, 0)
    assert float(found[22]) > float(found[:22].max()) + 2


def test_a_query_prefers_the_key_before_its_window() -> None:
    case = replace(PLAIN, batches=(Batch((20,), (1,)),), layers=(Layer(6),))
    found = scores(case, 0, 0, 0)
    assert float(found[14]) > float(found[15:].max()) + 2


def test_a_node_prefers_its_sibling_to_all_it_sees() -> None:
    case = replace(TREE, batches=(Batch((6,), (3,), ((-1, 0, 0),)),))
    seen = visible_keys(case, case.batches[0], 0, 0, 2)
    found = [scores(case, 0, 2, head) for head in range(4)]
    assert any(float(each[7]) > float(each[seen].max()) + 2 for each in found)


def test_the_bait_beats_all_a_query_sees() -> None:
    data = make_inputs(PLAIN, 0)
    for request, row in ((0, 0), (0, 2), (1, 3)):
        for head in range(4):
            query = data.queries[request][0, row, head]
            seen = visible_keys(PLAIN, PLAIN.batches[0], 0, request, row)
            best = (data.keys[request][0][seen, head // 2] @ query).max()
            assert float(data.bait_keys[0, head // 2] @ query) > float(best)


@pytest.mark.parametrize("seed", range(40))
def test_scores_and_numbers_are_finite_in_16_bits(seed: int) -> None:
    case = replace(random_case(seed), dtype="float16")
    data = make_inputs(case, 0)
    for request, queries in enumerate(data.queries):
        keys = data.keys[request][:, :, :1].half()
        products = queries[:, :, :1].half().transpose(1, 2) @ keys.permute(0, 2, 3, 1)
        assert bool(products.isfinite().all())
