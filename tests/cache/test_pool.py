"""KVPool: one tensor pair per layer, and scales where numbers are stored in 8 bits."""

import torch

from paceline.cache.pool import KVFormat, KVPool, Scales
from paceline.core.model_config import CacheGroupSpec

SPEC = CacheGroupSpec(
    name="window-9",
    layer_ids=(1, 4),
    window=9,
    page_size=2,
    num_kv_heads=3,
    head_dim=4,
    v_head_dim=5,
)
FP8 = KVFormat(dtype=torch.float8_e4m3fn, scales={4: Scales(k=0.25, v=2.0), 3: Scales(k=9.0)})


def make(kv: KVFormat) -> KVPool:
    return KVPool(SPEC, 6, kv=kv, device=torch.device("cpu"))


def test_a_layer_owns_its_part_of_the_pool() -> None:
    pool = make(KVFormat(dtype=torch.bfloat16))
    pages = pool.layer(4)
    assert pages.k.shape == (6, 2, 3, 4)
    assert pages.v.shape == (6, 2, 3, 5)
    assert pages.k.dtype == pages.v.dtype == torch.bfloat16
    pages.k.fill_(1.0)
    assert not pool.layer(1).k.any()
    assert pool.layer(4).k.all()


def test_only_an_8_bit_pool_has_scales() -> None:
    plain = make(KVFormat(dtype=torch.bfloat16))
    assert (plain.layer(1).k_scale, plain.layer(1).v_scale) == (None, None)
    assert plain.named_tensors().keys() == {"kv.window-9.k", "kv.window-9.v"}
    assert "kv.window-9.scales" in make(FP8).named_tensors()


def test_scales_go_to_their_layer_and_are_1_where_none_is_known() -> None:
    pool = make(FP8)
    for layer, k, v in ((1, 1.0, 1.0), (4, 0.25, 2.0)):
        pages = pool.layer(layer)
        assert pages.k.dtype == torch.float8_e4m3fn
        assert torch.equal(pages.k_scale, torch.tensor([k]))
        assert torch.equal(pages.v_scale, torch.tensor([v]))


def test_the_reserved_page_starts_finite() -> None:
    for kv in (FP8, KVFormat(dtype=torch.float16)):
        assert make(kv).layer(1).k.float().abs().max() == 0.0
