"""ragged_attention and paged_extend on a GPU where groups of warps take them: no interpreter runs
these."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from paged_cases import BatchSpec, PagedCase, Shape, make_case, reference, worst_error
from torch import Tensor

from paceline.kernels._triton import paged_extend as extend_kernels
from paceline.kernels._triton import ragged_groups as kernel
from paceline.kernels.paged_attention import PagedCall, paged_extend, split_workspace
from paceline.kernels.paged_attention.splits import SHORT_ROWS
from paceline.kernels.ragged_attention import ragged_attention

# Warnings of drivers and compilers are shown and fail nothing.
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9,
        reason="other GPUs take the other kernel",
    ),
]

DIM = 128
LENS = (1, 64, 0, 65, 127, 128, 129, 300, 513)  # 1,327 tokens
LENS_K = {"own": LENS, "more": tuple(each + 70 for each in LENS), "fewer": (0, *LENS[:-1])}
SCALE = DIM**-0.5


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A mark for each launch of groups."""
    marks, real = [], kernel.launch_ragged_groups

    def launch(*args: Any, **asked: Any) -> None:
        marks.append(True)
        real(*args, **asked)

    monkeypatch.setattr(kernel, "launch_ragged_groups", launch)
    return marks


def make(
    lens_k: tuple[int, ...], heads: int, kv_heads: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """On the CPU; queries with 30 rows behind the last request, keys and values of one tensor."""
    generator = torch.Generator().manual_seed(heads)
    q = torch.randn(sum(LENS) + 30, heads, DIM, generator=generator).to(dtype)
    kv = torch.randn(sum(lens_k), 2 * kv_heads, DIM, generator=generator).to(dtype)
    cus = [torch.tensor([0, *lens]).cumsum(0).int() for lens in (LENS, lens_k)]
    return q, *kv.split(kv_heads, dim=1), *cus


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("keys", LENS_K)
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (8, 1)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_groups_give_what_the_definition_gives(
    dtype: torch.dtype, heads: tuple[int, int], keys: str, causal: bool, taken: list[bool]
) -> None:
    given = make(LENS_K[keys], *heads, dtype)
    out, lse = ragged_attention(*(each.cuda() for each in given), causal=causal, scale=SCALE)
    assert taken
    wide = (each.double() if each.is_floating_point() else each for each in given)
    wanted, wanted_lse = ragged_attention(*wide, causal=causal, scale=SCALE)
    torch.testing.assert_close(out.cpu().double(), wanted, rtol=1e-2, atol=1e-2)
    error = (out.cpu().double() - wanted).norm() / wanted.norm()
    assert error < (3e-3 if dtype == torch.bfloat16 else 5e-4), error
    torch.testing.assert_close(lse.cpu(), wanted_lse, rtol=0.0, atol=2e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_a_request_is_the_same_whatever_stands_beside_it(causal: bool, taken: list[bool]) -> None:
    """Behind its last tile of keys stand those of the next, which are not finite here."""
    given = [each.cuda() for each in make(LENS, 4, 2, torch.bfloat16)]
    wanted, _ = ragged_attention(*given, causal=causal, scale=SCALE)
    start, stop = sum(LENS[:-1]), sum(LENS)
    for each in given[:3]:
        each[start:stop] = float("nan")
    given[2][start:stop:2] = float("inf")
    out, _ = ragged_attention(*given, causal=causal, scale=SCALE)
    assert torch.equal(out[:start], wanted[:start])
    assert out[start:stop].isnan().all()
    assert not out[stop:].any()
    assert len(taken) == 2


def test_many_short_requests(taken: list[bool]) -> None:
    """More than are looked at together, and of fewer queries than a tile."""
    lens = [3] * 400
    q = torch.randn(1200, 2, DIM, device="cuda", dtype=torch.bfloat16)
    cu = torch.tensor([0, *lens], device="cuda").cumsum(0).int()
    out, _ = ragged_attention(q, q, q, cu, cu, causal=True, scale=SCALE)
    scores = torch.einsum("rqhd,rkhd->rhqk", *[q.double().view(400, 3, 2, DIM)] * 2) * SCALE
    scores.masked_fill_(torch.ones(3, 3, device="cuda").triu(1).bool(), -torch.inf)
    wanted = torch.einsum("rhqk,rkhd->rqhd", scores.softmax(-1), q.double().view(400, 3, 2, DIM))
    torch.testing.assert_close(out.double(), wanted.reshape(out.shape), rtol=1e-2, atol=1e-2)
    assert taken


LLAMA = Shape(num_heads=32, num_kv_heads=8, head_dim=128, v_head_dim=128, dtype=torch.bfloat16)
# Heads that pair off and such that do not, pages of which a tile has several, or one.
SHAPES = {
    "32 of 8": LLAMA,
    "24 of 8, page 32": Shape(
        num_heads=24, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=32,
        dtype=torch.float16,
    ),
    "32 of 1, page 64": Shape(
        num_heads=32, num_kv_heads=1, head_dim=128, v_head_dim=128, page_size=64,
        dtype=torch.bfloat16,
    ),
    "32 of 4, page 128": Shape(
        num_heads=32, num_kv_heads=4, head_dim=128, v_head_dim=128, page_size=128,
        dtype=torch.bfloat16,
    ),
    "32 of 8, codes": replace(LLAMA, kv_dtype=torch.float8_e4m3fn),
    "24 of 8, page 32, codes": Shape(
        num_heads=24, num_kv_heads=8, head_dim=128, v_head_dim=128, page_size=32,
        dtype=torch.float16, kv_dtype=torch.float8_e4m3fn,
    ),
    "32 of 1, page 128, codes": Shape(
        num_heads=32, num_kv_heads=1, head_dim=128, v_head_dim=128, page_size=128,
        dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn,
    ),
}  # fmt: skip
PROMPTS = BatchSpec(prefix_lens=(0, 0, 0, 0), extend_lens=(300, 65, 800, 128))
CHUNKS = BatchSpec(prefix_lens=(700, 16, 31, 0), extend_lens=(513, 64, 1, 700))
MIXED = BatchSpec(
    prefix_lens=(700, 0, 100, 31, 16, 5, 0, 1000, 64, 77, 33, 15, 0, *range(9)),
    extend_lens=(1, 64, 3, 65, 127, 1, 128, 129, 300, 513, 1, 2, 5, *(1,) * 9),
)
LONG = BatchSpec(prefix_lens=(70, 0), extend_lens=(2500, 30))


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What each launch of groups was asked for."""
    marks: list[dict[str, Any]] = []
    real = kernel.launch_paged_groups

    def launch(call: PagedCall, **options: Any) -> None:
        marks.append(options)
        real(call, **options)

    monkeypatch.setattr(kernel, "launch_paged_groups", launch)
    return marks


def assert_matches(case: PagedCase, call: PagedCall) -> None:
    assert worst_error(case, call.out) <= 1.0
    torch.testing.assert_close(call.lse, reference(case)[1], rtol=0.0, atol=1e-4)


@pytest.mark.parametrize("batch", [PROMPTS, CHUNKS, MIXED, LONG])
@pytest.mark.parametrize("name", SHAPES)
def test_prompts_in_pages_give_what_the_definition_gives(
    name: str, batch: BatchSpec, asked: list[dict[str, Any]]
) -> None:
    """Dead slots and free pages are NaN, and the tables name free pages behind a request's last."""
    case = make_case(batch, SHAPES[name], seed=5, device="cuda")
    call = case.call()
    paged_extend(call)
    assert asked
    assert_matches(case, call)


def test_decodes_beside_prompts_are_those_of_any_mixed_step(
    asked: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = make_case(MIXED, LLAMA, seed=6, device="cuda")
    ours, other = case.call(), case.call()
    paged_extend(ours)
    assert asked == [{"above": 4, "leads": True}]
    monkeypatch.setattr(extend_kernels, "takes_groups", lambda call: False)
    paged_extend(other)
    for request, extend in enumerate(MIXED.extend_lens):
        if extend <= 4:
            rows = case.rows_of(request)
            assert torch.equal(ours.out[rows], other.out[rows])


FEW = BatchSpec(prefix_lens=(3000, 0, 700, 0, 45), extend_lens=(1, 1100, 4, 65, 1))


# So few tokens that one launch splits the keys of all; many of one KV head's are not split.
FEWER = BatchSpec(prefix_lens=(3000, 2500, 700, 0, 45), extend_lens=(1, 30, 3, 9, 1))


@pytest.mark.parametrize(
    ("batch", "is_taken"), [(FEW, True), (FEW, False), (FEWER, False)], ids=str
)
@pytest.mark.parametrize("name", SHAPES)
def test_few_decodes_beside_prompts_split_their_keys(
    name: str,
    batch: BatchSpec,
    is_taken: bool,
    asked: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a step and in a graph that has been replayed with other lengths in between."""
    if not is_taken:
        monkeypatch.setattr(extend_kernels, "takes_groups", lambda call: False)
    case = make_case(batch, SHAPES[name], seed=9, device="cuda")
    call, shape = case.call(), SHAPES[name]
    workspace = split_workspace(
        8, [(shape.num_heads, shape.num_kv_heads)], v_head_dim=128, device=call.q.device
    )
    workspace.partial_out.fill_(float("nan"))
    paged_extend(call, workspace)
    assert_matches(case, call)
    found = call.out.clone()
    has_short = shape.num_heads <= SHORT_ROWS * shape.num_kv_heads
    assert workspace.partial_out.isnan().all() != has_short  # which splits have written
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_extend(call, workspace)
    assert bool(asked) == is_taken
    lens = case.kv_lens.clone()
    for turn in range(4):
        call.out.fill_(float("nan"))
        case.kv_lens.copy_(torch.where(lens > 2000, lens - 2000, lens) if turn % 2 else lens)
        case.prefix_lens.copy_(case.kv_lens - case.extend_lens)
        graph.replay()
        torch.cuda.synchronize()
        assert not workspace.finished.any()
        live = batch.num_live
        wanted, _ = reference(case)
        error = (call.out[:live].double() - wanted[:live]).norm() / wanted[:live].norm()
        assert error < 3e-3
        assert turn % 2 == 1 or torch.equal(call.out, found)


@pytest.mark.parametrize("name", ["32 of 8", "32 of 8, codes"])
def test_a_prompt_is_the_same_in_chunks_and_beside_others(
    name: str, asked: list[dict[str, Any]]
) -> None:
    batch = BatchSpec(prefix_lens=(40, 500), extend_lens=(300, 1400))
    whole = make_case(batch, SHAPES[name], seed=7, device="cuda")
    call = whole.call()
    paged_extend(call)
    rows = call.rows
    first, stop = 300, 1700
    # The second request again, as two chunks of one step.
    lens = torch.tensor([[500, 833], [833, 1900]], device="cuda", dtype=torch.int32)
    again = whole.call()._replace(
        q=call.q[first:],
        rows=rows._replace(
            page_table=rows.page_table[[1, 1]],
            prefix_lens=lens[0],
            kv_lens=lens[1],
            cu_seqlens_q=torch.tensor([0, 333, 1400], device="cuda", dtype=torch.int32),
        ),
    )
    assert again.lse is not None
    again = again._replace(out=again.out[first:], lse=again.lse[first:])
    paged_extend(again)
    assert len(asked) == 2
    assert torch.equal(again.out, call.out[first:stop])


@pytest.mark.parametrize("name", ["32 of 8", "32 of 8, codes"])
def test_a_graph_follows_the_lengths(name: str, asked: list[dict[str, Any]]) -> None:
    """Captured with decodes and prompts, replayed with other ones, with decodes alone and with no
    prompt that a tile would hold."""
    batch = BatchSpec(prefix_lens=(600,) * 20, extend_lens=(60,) * 20)
    case = make_case(batch, SHAPES[name], seed=8, device="cuda")
    call = case.call()
    call = call._replace(rows=call.rows._replace(max_extend_len=1200))
    paged_extend(call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_extend(call)
    assert len(asked) == 2
    for extends in ([60] * 20, [1] * 19 + [640], [4, 5] * 10, [1] * 20, [0] * 19 + [650]):
        extend = torch.tensor(extends, device="cuda", dtype=torch.int32)
        case.extend_lens.copy_(extend)
        case.prefix_lens.copy_((660 - extend).clamp(max=600))
        case.kv_lens.copy_(case.prefix_lens + extend)
        case.cu_seqlens_q[1:].copy_(extend.cumsum(0))
        for _ in range(2):
            call.out.fill_(float("nan"))
            graph.replay()
            torch.cuda.synchronize()
            live = sum(extends)
            wanted, _ = reference(case)
            error = (call.out[:live].double() - wanted[:live]).norm() / wanted[:live].norm()
            assert error < 3e-3, extends
