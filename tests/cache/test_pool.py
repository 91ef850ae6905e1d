"""KVPool: a tensor for each stored part, and scales where numbers are stored in 8 bits."""

from dataclasses import replace

import torch

from paceline.cache.pool import KVFormat, KVPool, Scales
from paceline.core.model.cache_groups import CacheGroupSpec
from paceline.core.model.config import kv_parts

SPEC = CacheGroupSpec(
    name="window-9",
    layer_ids=(1, 4),
    window=9,
    page_size=2,
    parts=kv_parts(3, 4, 5),
)
FP8 = KVFormat(dtype=torch.float8_e4m3fn, scales={4: Scales(k=0.25, v=2.0), 3: Scales(k=9.0)})


def make(kv: KVFormat) -> KVPool:
    return KVPool(SPEC, 6, kv=kv, device=torch.device("cpu"))


def test_a_layer_owns_its_part_of_the_pool() -> None:
    pool = make(KVFormat(dtype=torch.bfloat16))
    parts = pool.layer(4).parts
    assert {name: part.shape for name, part in parts.items()} == {
        "k": (6, 2, 3, 4),
        "v": (6, 2, 3, 5),
    }
    assert {part.dtype for part in parts.values()} == {torch.bfloat16}
    parts["k"].fill_(1.0)
    assert not pool.layer(1).parts["k"].any()
    assert pool.layer(4).parts["k"].all()


def test_only_an_8_bit_pool_has_scales() -> None:
    plain = make(KVFormat(dtype=torch.bfloat16))
    assert not plain.layer(1).scales
    assert plain.named_tensors().keys() == {"kv.window-9.k", "kv.window-9.v"}
    assert "kv.window-9.scales" in make(FP8).named_tensors()


def test_scales_go_to_their_layer_and_are_1_where_none_is_known() -> None:
    pool = make(FP8)
    for layer, k, v in ((1, 1.0, 1.0), (4, 0.25, 2.0)):
        pages = pool.layer(layer)
        assert pages.parts["k"].dtype == torch.float8_e4m3fn
        assert torch.equal(pages.scales["k"], torch.tensor([k]))
        assert torch.equal(pages.scales["v"], torch.tensor([v]))


def test_the_reserved_page_starts_finite() -> None:
    for kv in (FP8, KVFormat(dtype=torch.float16)):
        assert make(kv).layer(1).parts["k"].float().abs().max() == 0.0


def test_a_part_of_another_is_a_view_of_its_leading_columns() -> None:
    spec = replace(SPEC, parts=kv_parts(1, 5, 3, v_in_k=True))
    pool = KVPool(spec, 6, kv=FP8, device=torch.device("cpu"))
    assert pool.parts.keys() == {"k"}
    pages = pool.layer(4)
    k, v = pages.parts["k"], pages.parts["v"]
    assert v.shape == (6, 2, 1, 3)
    assert v.data_ptr() == k.data_ptr()
    assert v.stride() == k.stride()
    assert torch.equal(pages.scales["v"], torch.tensor([0.25]))
    assert spec.page_bytes(2) == 2 * 2 * 2 * 5  # layers, tokens, bytes, columns
