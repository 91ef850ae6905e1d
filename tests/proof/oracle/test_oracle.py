"""The oracle against torch's own attention, closed forms, and itself told otherwise."""

import ast
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from oracle_cases import PLAIN, TREE, random_case
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import paceline.proof
from paceline.core.model.lookback import Chunk, Lookback
from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.inputs import make_inputs
from paceline.proof.oracle.methods.softmax import attend, attend_both, visible_keys
from paceline.proof.oracle.wrong import answer
from paceline.proof.suite.case import Batch, Case, Layer
from paceline.proof.suite.modes import ForwardMode

ROOT = Path(paceline.proof.__file__).parent


def torch_attention(case: Case, data: BatchData, request: int, allowed: Tensor) -> Tensor:
    """[extend, heads, v_head_dim] by torch, in float64."""
    out = scaled_dot_product_attention(
        data.queries[request][0].transpose(0, 1),
        data.keys[request][0].transpose(0, 1),
        data.values[request][0].transpose(0, 1),
        attn_mask=allowed,
        scale=data.scale,
        enable_gqa=case.num_heads != case.num_kv_heads,
    )
    return out.transpose(0, 1)


def by_request(batch: Batch, out: Tensor) -> tuple[Tensor, ...]:
    return torch.split(out, list(batch.extend_lens))


def test_causal_attention_is_torchs() -> None:
    batch, data = PLAIN.batches[0], make_inputs(PLAIN, 0)
    outs = by_request(batch, attend(PLAIN, batch, data, 0))
    for request, out in enumerate(outs):
        prefix, extend = batch.prefix_lens[request], batch.extend_lens[request]
        allowed = torch.ones(extend, prefix + extend, dtype=torch.bool).tril(prefix)
        torch.testing.assert_close(out, torch_attention(PLAIN, data, request, allowed))


def test_windowed_attention_is_torchs() -> None:
    case = replace(PLAIN, layers=(Layer(4),))
    batch, data = case.batches[0], make_inputs(case, 0)
    for request, out in enumerate(by_request(batch, attend(case, batch, data, 0))):
        prefix, extend = batch.prefix_lens[request], batch.extend_lens[request]
        ones = torch.ones(extend, prefix + extend, dtype=torch.bool)
        allowed = ones.tril(prefix) & ones.triu(prefix - 3)
        torch.testing.assert_close(out, torch_attention(case, data, request, allowed))


def test_chunked_attention_is_torchs() -> None:
    case = replace(PLAIN, layers=(Layer(Chunk(4)),))
    batch, data = case.batches[0], make_inputs(case, 0)
    for request, out in enumerate(by_request(batch, attend(case, batch, data, 0))):
        prefix, kv_len = batch.prefix_lens[request], batch.kv_lens[request]
        at = torch.arange(kv_len)
        allowed = (at <= at[prefix:, None]) & (at // 4 == at[prefix:, None] // 4)
        torch.testing.assert_close(out, torch_attention(case, data, request, allowed))


def test_a_block_sees_all_of_itself() -> None:
    case = replace(PLAIN, mode=ForwardMode.DLLM_EXTEND, batches=(Batch((3, 8), (4, 4)),))
    batch, data = case.batches[0], make_inputs(case, 0)
    for request, out in enumerate(by_request(batch, attend(case, batch, data, 0))):
        allowed = torch.ones(4, batch.kv_lens[request], dtype=torch.bool)
        torch.testing.assert_close(out, torch_attention(case, data, request, allowed))


@pytest.mark.parametrize("window", [None, 3])
def test_tokens_of_a_block_see_one_another_as_torch_masks_say(window: int | None) -> None:
    """By the ids of blocks, as transformers makes such masks; the oracle goes by their ends."""
    blocks = (((5, 8),), (), ((19, 21), (21, 23)))
    batch = Batch((5, 0, 18), (3, 4, 6), blocks=blocks)
    case = replace(PLAIN, batches=(batch,), layers=(Layer(window),))
    data = make_inputs(case, 0)
    for request, out in enumerate(by_request(batch, attend(case, batch, data, 0))):
        prefix, kv_len = batch.prefix_lens[request], batch.kv_lens[request]
        at = torch.arange(kv_len)
        of_block = torch.full((kv_len,), -1)
        for number, (start, stop) in enumerate(blocks[request]):
            of_block[start:stop] = number
        own, key = at[prefix:, None], at[None]
        same = (of_block[prefix:, None] == of_block[None]) & (of_block[None] >= 0)
        allowed = (key <= own) | same
        if window is not None:
            allowed &= key > own - window
        torch.testing.assert_close(out, torch_attention(case, data, request, allowed))


def test_a_node_of_a_tree_sees_what_its_branch_would_as_a_chain() -> None:
    case = replace(TREE, layers=(Layer(5),))
    batch, data = case.batches[0], make_inputs(case, 0)
    out = by_request(batch, attend(case, batch, data, 0))[1]
    branch = [0, 3, 4]  # of (-1, 0, 1, 0, 3), behind 11 keys
    keep = [*range(11), *(11 + row for row in branch)]
    chain = replace(case, batches=(Batch((11,), (3,)),))
    cut = replace(
        data,
        queries=(data.queries[1][:, branch],),
        keys=(data.keys[1][:, keep],),
        values=(data.values[1][:, keep],),
    )
    torch.testing.assert_close(out[branch], attend(chain, chain.batches[0], cut, 0))


@pytest.mark.parametrize(
    ("request_", "row", "window", "seen"),
    [
        (0, 0, None, [0, 1, 2, 3, 4, 5, 6]),
        (0, 4, None, [0, 1, 2, 3, 4, 5, 6, 7, 10]),
        (0, 4, 2, [7, 10]),  # depth 2, position 8: the parent is at 7
        (0, 2, 3, [5, 6, 8]),  # depth 1, position 7, in slot 8
        (1, 4, 1, [15]),
        (0, 4, Chunk(8), [10]),  # depth 2, position 8: its branch lies in the chunk before
        (0, 1, Chunk(8), [0, 1, 2, 3, 4, 5, 6, 7]),  # depth 1, position 7
    ],
)
def test_tree_rows_see_prefix_and_ancestors_by_position(
    request_: int, row: int, window: Lookback | None, seen: list[int]
) -> None:
    case = replace(TREE, layers=(Layer(window),))
    assert visible_keys(case, case.batches[0], 0, request_, row) == seen


def test_the_prefix_alone_has_a_window_that_counts_from_the_query() -> None:
    case = replace(PLAIN, prefix_only=True, layers=(Layer(4),))
    batch = case.batches[0]
    # the row at position 20 of a request with prefix 18 sees positions 17..20
    assert visible_keys(
        replace(case, batches=(Batch((18,), (3,)),)), Batch((18,), (3,)), 0, 0, 2
    ) == [17]
    assert visible_keys(case, batch, 0, 1, 0) == []


def test_a_row_without_keys_is_zero_with_lse_minus_infinity() -> None:
    case = replace(PLAIN, prefix_only=True)
    batch, data = case.batches[0], make_inputs(case, 0)
    out, lse = attend(case, batch, data, 0), attend_both(case, batch, data, 0)[1]
    assert bool((out[3:7] == 0).all())
    assert bool((lse[3:7] == -math.inf).all())
    assert bool(lse[:3].isfinite().all())


def test_a_sink_scales_the_output_by_a_sigmoid_and_leaves_lse() -> None:
    case = replace(PLAIN, sinks=True)
    batch, data = case.batches[0], make_inputs(case, 0)
    bare = replace(data, sinks=None)
    lse = attend_both(case, batch, bare, 0)[1]
    assert data.sinks is not None
    share = torch.sigmoid(lse - data.sinks[0]).unsqueeze(2)
    torch.testing.assert_close(attend(case, batch, data, 0), attend(case, batch, bare, 0) * share)
    torch.testing.assert_close(attend_both(case, batch, data, 0)[1], lse)


def test_the_prefix_alone_counts_no_sink() -> None:
    case = replace(PLAIN, sinks=True, prefix_only=True)
    batch, data = case.batches[0], make_inputs(case, 0)
    bare = replace(data, sinks=None)
    assert torch.equal(attend(case, batch, data, 0), attend(case, batch, bare, 0))


def test_a_soft_cap_bends_the_scaled_score() -> None:
    case = replace(PLAIN, soft_cap=5.0, batches=(Batch((1,), (1,)),))
    batch, data = case.batches[0], make_inputs(case, 0)
    scores = [
        5 * math.tanh(data.scale * float(data.queries[0][0, 0, 0] @ data.keys[0][0, j, 0]) / 5)
        for j in (0, 1)
    ]
    expected = math.log(sum(math.exp(score) for score in scores))
    assert float(attend_both(case, batch, data, 0)[1][0, 0]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("seed", range(24))
def test_the_walk_equals_dense_scores(seed: int) -> None:
    case = random_case(seed)
    batch, data = case.batches[0], make_inputs(case, 0)
    for layer in range(len(case.layers)):
        torch.testing.assert_close(
            attend(case, batch, data, layer), answer(case, batch, data, layer), rtol=1e-9, atol=1e-9
        )


def test_lse_is_the_log_of_the_summed_exponentials_of_two_parts() -> None:
    # keys split into prefix and step: their lse add up as exponentials, and so do the outputs
    case = replace(PLAIN, mode=ForwardMode.DECODE, batches=(Batch((9,), (1,)),))
    batch, data = case.batches[0], make_inputs(case, 0)
    prefix = replace(case, prefix_only=True)
    step = replace(case, layers=(Layer(1),))
    parts = [attend_both(each, batch, data, 0)[1] for each in (prefix, step)]
    whole = torch.logaddexp(*parts)
    torch.testing.assert_close(whole, attend_both(case, batch, data, 0)[1])
    outs = [attend(each, batch, data, 0) for each in (prefix, step)]
    merged = sum(
        (out * (lse - whole).exp().unsqueeze(2) for out, lse in zip(outs, parts, strict=True)),
        start=torch.zeros(()),
    )
    torch.testing.assert_close(merged, attend(case, batch, data, 0))


def imports_of(path: Path) -> set[str]:
    """Absolute names a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found.add(node.module or "")
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize(
    "name",
    [
        "oracle/methods/softmax",
        "oracle/inputs",
        "oracle/wrong",
        "oracle/tolerance",
        "oracle/states",
        "rig/placement",
    ],
)
def test_the_oracle_shares_no_code_with_what_it_judges(name: str) -> None:
    seen, todo = set(), [name]
    while todo:
        module = todo.pop()
        seen.add(module)
        source = (ROOT / f"{module}.py").read_text()
        assert "torch.ops" not in source, f"{module} may call a kernel of ours"
        assert "__import__" not in source, f"{module} hides an import"
        for imported in imports_of(ROOT / f"{module}.py"):
            room = imported.split(".")
            if room[0] != "paceline":
                assert room[0] in {
                    "torch",
                    "math",
                    "dataclasses",
                    "functools",
                    "collections",
                    "random",
                    "zlib",
                    "typing",
                    "enum",
                    "abc",
                }, f"{module} imports {imported}"
                continue
            assert room[1:2] in ([], ["core"], ["proof"]), f"{module} imports {imported}"
            if room[1:2] == ["proof"] and len(room) > 3:
                assert room[2] != "emulators", f"{module} imports {imported}"
                for inner in ("/".join(room[2:4]), "/".join(room[2:5])):
                    if (ROOT / f"{inner}.py").exists() and inner not in seen:
                        todo.append(inner)
    assert "oracle/batch_data" in seen or name == "rig/placement"
    assert "oracle/methods/running_sum" in seen or name != "oracle/states"
