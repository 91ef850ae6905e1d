"""write_kv: the op and its Triton kernel against the token-by-token definition."""

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.write_kv import write_kv, write_kv_reference


def run_triton(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, loc: Tensor) -> None:
    from paceline.kernels._triton.write_kv import launch_write_kv

    launch_write_kv(k, v, k_cache, v_cache, loc)


def operands(page_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Strided k and v out of a fused row, and distinct slots over several pages."""
    generator = torch.Generator().manual_seed(page_size)
    fused = torch.randn(6, 2 * 24 + 2 * 8, generator=generator).to(dtype)
    k = fused[:, :48].view(6, 2, 24)
    v = fused[:, 48:].view(6, 2, 8)
    return k, v, torch.randperm(5 * page_size, generator=generator)[:6]


@pytest.mark.parametrize("run", [write_kv, run_triton], ids=["op", "triton"])
@pytest.mark.parametrize("page_size", [2, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("interleaved", [False, True], ids=["own-pool", "layers-interleaved"])
def test_exactly_the_named_slots_are_written(
    run: object, page_size: int, dtype: torch.dtype, interleaved: bool
) -> None:
    k, v, loc = operands(page_size, dtype)
    layers = 2 if interleaved else 1
    pools = [torch.full((5, layers, page_size, 2, dim), 9.0, dtype=dtype) for dim in (24, 8)]
    expected = [pool.clone() for pool in pools]
    run(k, v, pools[0][:, -1], pools[1][:, -1], loc)
    write_kv_reference(k, v, expected[0][:, -1], expected[1][:, -1], loc)
    for pool, wanted in zip(pools, expected, strict=True):
        assert torch.equal(pool, wanted)
        assert (pool[:, -1] != 9.0).any()


@pytest.mark.parametrize("run", [write_kv, run_triton], ids=["op", "triton"])
def test_tokens_that_share_the_padding_slot_leave_one_of_their_values(run: object) -> None:
    k, v, _ = operands(16, torch.float32)
    k_cache, v_cache = torch.zeros(2, 16, 2, 24), torch.zeros(2, 16, 2, 8)
    run(k, v, k_cache, v_cache, torch.tensor([0, 17, 0, 0, 30, 0]))
    assert any(torch.equal(k_cache[0, 0], k[token]) for token in (0, 2, 3, 5))
    assert torch.equal(v_cache[1, 1], v[1])
    assert torch.equal(v_cache[1, 14], v[4])


def test_bad_argument_is_named_with_what_was_expected() -> None:
    k, v, loc = operands(16, torch.float32)
    k_cache, v_cache = torch.zeros(5, 16, 2, 24), torch.zeros(5, 16, 2, 8)
    with pytest.raises(KernelArgumentError, match=r"k must be \[tokens, kv_heads, dim\]"):
        write_kv(k.flatten(1), v, k_cache, v_cache, loc)
    with pytest.raises(KernelArgumentError, match=r"k_cache must be torch.float32 \[num_pages"):
        write_kv(k, v, k_cache.half(), v_cache, loc)
    with pytest.raises(KernelArgumentError, match=r"v_cache must be torch.float32 \[num_pages"):
        write_kv(k, v, k_cache, k_cache, loc)
    with pytest.raises(KernelArgumentError, match=r"out_cache_loc must be int64 \[6\]"):
        write_kv(k, v, k_cache, v_cache, loc.int())
