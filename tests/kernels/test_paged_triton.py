"""The Triton attention kernels, interpreted on the CPU, against the paged definition."""

import subprocess
import sys

import pytest
import torch
from paged_cases import (
    BatchSpec,
    PagedCase,
    Shape,
    first_key_dropped,
    make_case,
    reference,
    worst_error,
)
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.paged_attention import (
    decode_splits,
    decode_workspace,
    paged_decode,
    paged_extend,
)

CPU = torch.device("cpu")
# name: heads, kv_heads, head_dim, v_head_dim, page_size, window, soft_cap, dtype
SHAPES = {
    "mha-64-page1": Shape(num_heads=2, num_kv_heads=2, head_dim=64, v_head_dim=64, page_size=1),
    "gqa2-80-96-page16": Shape(
        num_heads=4, num_kv_heads=2, head_dim=80, v_head_dim=96, page_size=16
    ),
    "gqa4-128-bf16": Shape(
        num_heads=4,
        num_kv_heads=1,
        head_dim=128,
        v_head_dim=128,
        page_size=16,
        dtype=torch.bfloat16,
    ),
    "gqa7-64-fp16": Shape(
        num_heads=7, num_kv_heads=1, head_dim=64, v_head_dim=64, page_size=16, dtype=torch.float16
    ),
    "gqa8-96-64-page64": Shape(
        num_heads=8, num_kv_heads=1, head_dim=96, v_head_dim=64, page_size=64, window=70
    ),
    "mqa20-64": Shape(
        num_heads=20, num_kv_heads=1, head_dim=64, v_head_dim=64, page_size=16, window=1
    ),
    "256-capped": Shape(
        num_heads=1, num_kv_heads=1, head_dim=256, v_head_dim=256, page_size=16, soft_cap=2.0
    ),
    "window-below-page": Shape(
        num_heads=2, num_kv_heads=1, head_dim=64, v_head_dim=64, page_size=16, window=9
    ),
    "window-at-page": Shape(
        num_heads=2, num_kv_heads=1, head_dim=64, v_head_dim=64, page_size=16, window=16
    ),
    "window-above-page-capped": Shape(
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        v_head_dim=64,
        page_size=16,
        window=37,
        soft_cap=5.0,
    ),
}
DECODE = BatchSpec(prefix_lens=(96, 0, 42), extend_lens=(1, 1, 1))
RAGGED = BatchSpec(prefix_lens=(45, 0, 17), extend_lens=(3, 21, 1))


def run_decode(case: PagedCase, kv_lens: Tensor | None = None) -> tuple[Tensor, Tensor]:
    out, lse = case.empty_outputs()
    num_reqs, heads, _ = case.q.shape
    workspace = decode_workspace(
        num_reqs,
        heads,
        case.shape.num_kv_heads,
        v_head_dim=case.shape.v_head_dim,
        device=CPU,
    )
    paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.kv_lens if kv_lens is None else kv_lens,
        scale=case.scale,
        window=case.shape.window,
        soft_cap=case.shape.soft_cap,
        out=out,
        lse=lse,
        partial_out=workspace[0].fill_(float("nan")),
        partial_lse=workspace[1].fill_(float("nan")),
    )
    return out, lse


def run_extend(case: PagedCase, *, prefix_only: bool = False) -> tuple[Tensor, Tensor]:
    out, lse = case.empty_outputs()
    paged_extend(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.prefix_lens,
        case.kv_lens,
        case.cu_seqlens_q,
        max_extend_len=int(case.extend_lens.max()),
        scale=case.scale,
        window=case.shape.window,
        soft_cap=case.shape.soft_cap,
        out=out,
        lse=lse,
        prefix_only=prefix_only,
    )
    return out, lse


def assert_matches(
    case: PagedCase, actual: tuple[Tensor, Tensor], *, prefix_only: bool = False
) -> None:
    out, lse = actual
    assert worst_error(case, out, prefix_only=prefix_only) <= 1.0
    _, expected_lse = reference(case, prefix_only=prefix_only)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=1e-5)
    wrong = first_key_dropped(case, prefix_only=prefix_only)
    assert worst_error(case, wrong, prefix_only=prefix_only) > 1.0


@pytest.mark.parametrize("name", SHAPES)
def test_decode_matches_reference_and_not_a_dropped_key(name: str) -> None:
    case = make_case(DECODE, SHAPES[name], seed=11)
    assert_matches(case, run_decode(case))


@pytest.mark.parametrize("name", SHAPES)
def test_extend_matches_reference_and_not_a_dropped_key(name: str) -> None:
    case = make_case(RAGGED, SHAPES[name], seed=12)
    assert_matches(case, run_extend(case))


@pytest.mark.parametrize("name", ["gqa2-80-96-page16", "window-above-page-capped"])
def test_prefix_only_leaves_out_the_step(name: str) -> None:
    case = make_case(RAGGED, SHAPES[name], seed=13)
    assert_matches(case, run_extend(case, prefix_only=True), prefix_only=True)


def test_rows_behind_their_window_are_zero_with_lse_minus_infinity() -> None:
    batch = BatchSpec(prefix_lens=(20,), extend_lens=(15,))
    case = make_case(batch, SHAPES["window-below-page"], seed=14)
    out, lse = run_extend(case, prefix_only=True)
    assert out[8:].eq(0).all()
    assert lse[8:].isneginf().all()
    assert lse[:8].isfinite().all()


def test_request_without_keys_gives_zeros() -> None:
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=15)
    out, lse = run_decode(case, kv_lens=torch.tensor([97, 0, 43], dtype=torch.int32))
    assert out[1].eq(0).all()
    assert lse[1].isneginf().all()
    assert out[0].isfinite().all()


def test_padded_rows_do_not_change_the_others() -> None:
    case = make_case(DECODE, SHAPES["window-at-page"], seed=16)
    lens = torch.tensor([97, 2, 43], dtype=torch.int32)  # the middle row reads page 0, all NaN
    table = case.page_table.clone()
    table[1] = 0
    padded = PagedCase(
        shape=case.shape,
        q=case.q,
        k_cache=case.k_cache,
        v_cache=case.v_cache,
        page_table=table,
        prefix_lens=case.prefix_lens,
        extend_lens=case.extend_lens,
        kv_lens=lens,
        cu_seqlens_q=case.cu_seqlens_q,
    )
    plain, with_padding = run_decode(case), run_decode(padded)
    for mine, other in zip(plain, with_padding, strict=True):
        assert torch.equal(mine[[0, 2]], other[[0, 2]])
        assert other[1].isnan().all()


def test_nan_keys_reach_the_output() -> None:
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=17)
    page = int(case.page_table[0, 30])
    case.k_cache[page, 0] = float("nan")
    out, lse = run_decode(case)
    assert out[0].isnan().all()
    assert lse[0].isnan().all()
    assert out[2].isfinite().all()


def test_one_split_equals_many() -> None:
    from paceline.kernels._triton.paged_decode import launch_paged_decode

    case = make_case(DECODE, SHAPES["gqa2-80-96-page16"], seed=18)
    out, lse = case.empty_outputs()
    unused = torch.empty(0)
    launch_paged_decode(
        case.q,
        case.k_cache,
        case.v_cache,
        case.page_table,
        case.kv_lens,
        scale=case.scale,
        window=None,
        soft_cap=None,
        splits=1,
        out=out,
        lse=lse,
        partial_out=unused,
        partial_lse=unused,
    )
    assert decode_splits(3, 2, device=CPU) > 1
    torch.testing.assert_close((out, lse), run_decode(case), rtol=1e-5, atol=1e-6)


def test_decode_workspace_covers_every_number_of_requests() -> None:
    partial_out, partial_lse = decode_workspace(70, 8, 2, v_head_dim=16, device=CPU)
    for num_reqs in range(1, 71):
        splits = decode_splits(num_reqs, 2, device=CPU)
        assert 1 <= splits <= 64
        assert num_reqs * splits <= partial_out.shape[0] == partial_lse.shape[0]


def test_cpu_without_interpreter_is_refused_with_a_remedy() -> None:
    program = (
        "import torch\n"
        "from paceline.kernels.paged_attention import decode_workspace, paged_decode\n"
        "cpu = torch.device('cpu')\n"
        "cache = torch.zeros(2, 16, 1, 64)\n"
        "lens = torch.ones(1, dtype=torch.int32)\n"
        "a, b = decode_workspace(1, 1, 1, v_head_dim=64, device=cpu)\n"
        "paged_decode(torch.zeros(1, 1, 64), cache, cache, lens[:, None], lens, scale=1.0,\n"
        "    window=None, soft_cap=None, out=torch.zeros(1, 1, 64), lse=torch.zeros(1, 1),\n"
        "    partial_out=a, partial_lse=b)\n"
    )
    env = {"TRITON_INTERPRET": "0", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False
    )
    assert "q of paged_decode must be on a CUDA device, got a CPU tensor" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


@pytest.mark.parametrize("run", [run_decode, run_extend], ids=["decode", "extend"])
def test_missing_triton_is_named_with_a_remedy(
    run: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.kernels.paged_attention.checks.find_spec", lambda name: None)
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=20)
    with pytest.raises(KernelArgumentError, match=r"must be run where triton is installed.*torch"):
        run(case)


BAD_ARGUMENTS = {
    "q": (lambda t: t[0], r"q must be \[tokens, heads, head_dim\]"),
    "k_cache": (lambda t: t.half(), r"k_cache must be torch.float32 \[num_pages"),
    "v_cache": (lambda t: t[:2], r"v_cache must be torch.float32"),
    "page_table": (lambda t: t.long(), r"page_table must be int32 \[3, max_pages\]"),
    "kv_lens": (lambda t: t[:2], r"kv_lens must be contiguous int32 \[3\]"),
    "out": (lambda t: t.half(), r"out must be torch.float32 \[3, 2, 64\]"),
    "lse": (lambda t: t.half(), r"lse must be contiguous float32 \[3, 2\]"),
    "partial_out": (lambda t: t[:1], r"partial_out must be contiguous float32 with at least"),
}


@pytest.mark.parametrize("name", BAD_ARGUMENTS)
def test_bad_argument_is_named_with_what_was_expected(name: str) -> None:
    spoil, text = BAD_ARGUMENTS[name]
    case = make_case(DECODE, SHAPES["mha-64-page1"], seed=19)
    out, lse = case.empty_outputs()
    partial_out, partial_lse = decode_workspace(3, 2, 2, v_head_dim=64, device=CPU)
    arguments = {
        "q": case.q,
        "k_cache": case.k_cache,
        "v_cache": case.v_cache,
        "page_table": case.page_table,
        "kv_lens": case.kv_lens,
        "out": out,
        "lse": lse,
        "partial_out": partial_out,
        "partial_lse": partial_lse,
    }
    arguments[name] = spoil(arguments[name])
    with pytest.raises(KernelArgumentError, match=text):
        paged_decode(**arguments, scale=1.0, window=None, soft_cap=None)


@pytest.mark.parametrize("name", ["prefix_lens", "kv_lens", "cu_seqlens_q"])
def test_bad_extend_lengths_are_named(name: str) -> None:
    case = make_case(RAGGED, SHAPES["mha-64-page1"], seed=21)
    out, lse = case.empty_outputs()
    lengths = {
        "prefix_lens": case.prefix_lens,
        "kv_lens": case.kv_lens,
        "cu_seqlens_q": case.cu_seqlens_q,
    }
    lengths[name] = lengths[name].long()
    with pytest.raises(KernelArgumentError, match=f"{name} must be contiguous int32"):
        paged_extend(
            case.q,
            case.k_cache,
            case.v_cache,
            case.page_table,
            **lengths,
            max_extend_len=21,
            scale=1.0,
            window=None,
            soft_cap=None,
            out=out,
            lse=lse,
        )
