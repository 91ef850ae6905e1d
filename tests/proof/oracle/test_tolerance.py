"""The comparison: takes what is right in any precision, and refuses every mistake."""

import math
from dataclasses import replace

import pytest
import torch
from oracle_cases import PLAIN, TREE, random_case
from torch import Tensor

from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.methods.softmax import attend
from paceline.proof.oracle.tolerance import Expectation, expect
from paceline.proof.oracle.wrong import wrong_answers
from paceline.proof.suite.case import Batch, Case, Layer
from paceline.proof.suite.modes import ForwardMode

DECODE = replace(PLAIN, name="decode", mode=ForwardMode.DECODE, batches=(Batch((300, 40), (1, 1)),))


def expected(case: Case) -> Expectation:
    return expect(case, 0, make_inputs(case, 0))


def blocked(case: Case, block: int) -> Tensor:
    """[num_tokens, heads, v_head_dim] of a causal case as a paged kernel computes: a running
    maximum over blocks of keys, weights rounded, the sum of what was not."""
    batch, data, dtype = case.batches[0], make_inputs(case, 0), getattr(torch, case.dtype)
    outs = []
    for request, extend in enumerate(batch.extend_lens):
        for row in range(extend):
            for head in range(case.num_heads):
                seen = batch.prefix_lens[request] + row + 1
                kv_head = head // (case.num_heads // case.num_kv_heads)
                query = data.queries[request][0, row, head].float()
                best, total = torch.tensor(-math.inf), torch.tensor(0.0)
                out = torch.zeros(case.v_head_dim)
                for start in range(0, seen, block):
                    keys = data.keys[request][0, start : min(start + block, seen), kv_head].float()
                    values = data.values[request][0, start : min(start + block, seen), kv_head]
                    scores = (keys @ query) * (data.scale * math.log2(math.e))
                    new = torch.maximum(best, scores.max())
                    weights = torch.exp2(scores - new)
                    shrink = torch.exp2(best - new)
                    total = total * shrink + weights.sum()
                    out = out * shrink + weights.to(dtype).float() @ values.float()
                    best = new
                outs.append((out / total).to(dtype))
    return torch.stack(outs).view(batch.num_tokens, case.num_heads, case.v_head_dim)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("case", [PLAIN, DECODE], ids=["extend", "decode"])
def test_a_kernel_that_works_in_blocks_is_right(case: Case, dtype: str) -> None:
    case = replace(case, dtype=dtype)
    for block in (8, 64):
        judgement = expected(case).judge(0, blocked(case, block))
        assert judgement.is_right, judgement
        assert judgement.error > 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_allowance_is_near_what_the_format_costs(dtype: str) -> None:
    wanted = expected(replace(PLAIN, dtype=dtype))
    relative = wanted.allowed[0] / wanted.sizes[0]
    most = {"bfloat16": 2e-2, "float16": 2.5e-3, "float32": 3e-5}[dtype]
    assert float(relative.max()) < most
    assert float(relative.min()) > most / 30


def test_one_number_that_is_not_one_is_infinitely_wrong_and_named() -> None:
    wanted = expected(PLAIN)
    out = wanted.exact[0].clone()
    out[4, 3, 7] = float("nan")
    judgement = wanted.judge(0, out)
    assert judgement.error == math.inf
    assert not judgement.is_right
    assert judgement.where == "batch 0, request 1, row 1, head 3"


def test_the_worst_head_is_named() -> None:
    wanted = expected(PLAIN)
    out = wanted.exact[0].clone()
    out[7, 2] *= 1.05
    judgement = wanted.judge(0, out)
    assert judgement.where == "batch 0, request 2, row 0, head 2"
    assert 0.01 < judgement.error < 0.06


def test_another_shape_is_wrong_and_named() -> None:
    judgement = expected(PLAIN).judge(0, torch.zeros(3, 4, 64))
    assert not judgement.is_right
    assert judgement.where == "shape (3, 4, 64), not (8, 4, 64)"


def test_where_nothing_is_visible_anything_but_zero_is_wrong() -> None:
    case = replace(PLAIN, prefix_only=True)
    wanted = expected(case)
    assert wanted.judge(0, wanted.exact[0]).error == 0
    out = wanted.exact[0].clone()
    out[3, 0, 0] = 1e-3
    assert not wanted.judge(0, out).is_right


@pytest.mark.parametrize("seed", range(64))
def test_no_mistake_hides_in_the_allowance(seed: int) -> None:
    case = random_case(seed)
    wanted = expected(case)
    for layer in range(len(case.layers)):
        assert wanted.blind(layer) == []


def test_a_comparison_that_would_take_a_mistake_says_which() -> None:
    wanted = expected(replace(PLAIN, dtype="bfloat16"))
    generous = replace(wanted, allowed=tuple(100 * allowed for allowed in wanted.allowed))
    assert "first key dropped" in generous.blind(0)
    assert "all zero" in generous.blind(0)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        (
            PLAIN,
            "all zero,no scale,head_dim ** -0.5 for the scale,"
            "KV heads striped (h % kv_heads),first page another's,middle page another's,"
            "last page another's,key behind the end,first key dropped,last key dropped,"
            "prefix only,next row visible,full mask,top-left causal",
        ),
        (
            replace(TREE, layers=(Layer(6),)),
            "all zero,no scale,head_dim ** -0.5 for the scale,"
            "KV heads striped (h % kv_heads),first page another's,last page another's,"
            "key behind the end,first key dropped,last key dropped,"
            "window one wider,window one narrower,no window,prefix only,next row visible,"
            "full mask,a chain,siblings visible,window by row,"
            "window by depth of keys and row of queries",  # keys by row: none is so far
        ),
        (
            replace(
                DECODE, num_kv_heads=4, soft_cap=20.0, sinks=True, batches=(Batch((0,), (1,)),)
            ),
            "all zero,no sinks,sinks counted twice,first page another's,key behind the end,"
            "first key dropped,last key dropped,prefix only",
        ),
        (
            replace(
                PLAIN, prefix_only=True, dtype="bfloat16", kv_dtype="float8_e4m3fn", num_kv_heads=1
            ),
            "all zero,no scale,head_dim ** -0.5 for the scale,K scale ignored,V scale ignored,"
            "K scale used for V,first page another's,"
            "middle page another's,last page another's,first key dropped,last key dropped,"
            "the step too",
        ),
    ],
    ids=["plain", "windowed tree", "one key", "fp8 prefix"],
)
def test_mistakes_are_those_that_change_a_row(case: Case, names: str) -> None:
    data = make_inputs(case, 0)
    found = wrong_answers(case, case.batches[0], data, 0)
    assert set(found) == set(names.split(","))
    truth = attend(case, case.batches[0], data, 0)
    for name, out in found.items():
        assert out.shape == truth.shape
        assert not torch.allclose(out, truth, rtol=1e-3), name
