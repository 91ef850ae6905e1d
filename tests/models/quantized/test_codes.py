"""Codes of the formats against golden words, and sizes that leave a remainder."""

import definitions
import pytest
import torch
from torch import Tensor

from paceline.models.quantized.codes import ScaleBlocks, awq, bit_fields, e2m1, e8m0, gptq, scaled


def words(*values: int) -> Tensor:
    return torch.tensor([value - (1 << 32 if value >> 31 else 0) for value in values]).int()


COUNTING = torch.arange(8.0)


def test_gptq_packs_along_inputs_the_lowest_first() -> None:
    ones = torch.ones(1, 8)
    codes = words(0x76543210).expand(1, 8).contiguous()
    got = gptq(codes, words(0xFFFFFFFF)[None], ones, bits=4, group=8, is_v2=False).numbers()
    assert torch.equal(got, COUNTING.expand(8, 8))  # a stored 15 is a zero point of 0, by wrapping


def test_awq_interleaves_outputs() -> None:
    got = awq(words(0x75316420)[None], words(0)[None], torch.ones(1, 8), group=1).numbers()
    assert torch.equal(got, COUNTING[:, None])


def test_compressed_tensors_offsets_codes_by_half() -> None:
    fields = bit_fields(words(0xBA987654)[None], 4, 8)
    assert (fields - 8).tolist() == [[-4, -3, -2, -1, 0, 1, 2, 3]]


@pytest.mark.parametrize("bits", [4, 8])
def test_the_sign_bit_of_a_word_is_a_code_s(bits: int) -> None:
    top = bit_fields(words(0xFFFFFFFF)[None], bits, 32 // bits)
    assert top.unique().tolist() == [(1 << bits) - 1]


def test_e2m1_and_e8m0() -> None:
    codes = torch.tensor([0x21, 0x43, 0x65, 0x87, 0xFE], dtype=torch.uint8)
    assert e2m1(codes).tolist() == [0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -4, -6]
    powers = e8m0(torch.tensor([0, 120, 127, 128, 254, 255], dtype=torch.uint8))
    assert powers[:5].tolist() == [2.0**-127, 2.0**-7, 1, 2, 2.0**127]
    assert powers[5].isnan()


@pytest.mark.parametrize("stored", [0x77777777, 0x88888888])
def test_zero_points_of_symmetric_gptq_tell_the_version(stored: int) -> None:
    eights = words(0x88888888).expand(1, 8).contiguous()
    got = gptq(eights, words(stored)[None], torch.ones(1, 8), bits=4, group=8, is_v2=None).numbers()
    assert not got.any()


def test_symmetric_gptq_has_no_other_zero_points() -> None:
    words_, stored = words(0x88888888).expand(1, 8).contiguous(), words(0x33333333)[None]
    with pytest.raises(ValueError, match="not those of symmetric weights"):
        gptq(words_, stored, torch.ones(1, 8), bits=4, group=8, is_v2=None)


def test_the_last_group_may_be_partial() -> None:
    """192 columns in groups of 128, as of widths that no power of two divides."""
    torch.manual_seed(0)
    parts = {
        "qweight": torch.randint(-(2**31), 2**31, (24, 16)).int(),
        "qzeros": torch.randint(-(2**31), 2**31, (2, 2)).int(),
        "scales": torch.rand(2, 16).half(),
    }
    wanted = definitions.gptq(parts, 128, 4, plus_one=True)
    got = gptq(*parts.values(), torch.arange(192) // 128, bits=4, group=128, is_v2=False).numbers()
    assert torch.equal(got, wanted)
    columns = torch.randint(-(2**31), 2**31, (192, 2)).int()
    wanted = definitions.awq(parts | {"qweight": columns}, 128)
    assert torch.equal(awq(columns, parts["qzeros"], parts["scales"], group=128).numbers(), wanted)


def test_other_zero_points_follow_the_label() -> None:
    eights, stored = words(0x88888888).expand(1, 8).contiguous(), words(0x33333333)[None]
    for is_v2, zero in ((False, 4), (True, 3)):
        got = gptq(eights, stored, torch.ones(1, 8), bits=4, group=8, is_v2=is_v2).numbers()
        assert torch.equal(got, torch.full((8, 8), 8.0 - zero))


def test_the_last_blocks_are_partial() -> None:
    scale = torch.tensor([[2.0, 3.0], [5.0, 7.0]])
    got = scaled(torch.ones(5, 6), scale, blocks=ScaleBlocks(4, 4, (2, 2)))
    assert got[:, 0].tolist() == [2, 2, 2, 2, 5]
    assert got[4].tolist() == [5, 5, 5, 5, 7, 7]


@pytest.mark.parametrize("zero", [None, torch.tensor([[1.0], [2.0]])])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_scale_that_is_no_factor_is_refused(value: float, zero: Tensor | None) -> None:
    scale = torch.tensor([[1.0], [value]])
    with pytest.raises(ValueError, match="a scale that is no finite number"):
        scaled(torch.ones(2, 3), scale, zero, blocks=ScaleBlocks(1, 3, (2, 1)))


def test_a_scale_of_integers_may_be_negative_and_one_of_floats_may_not() -> None:
    scale, blocks = torch.tensor([[1.0], [-2.0]]), ScaleBlocks(1, 3, (2, 1))
    zero = torch.tensor([[8.0], [8.0]])
    assert scaled(torch.full((2, 3), 5.0), scale, zero, blocks=blocks)[:, 0].tolist() == [-3, 6]
    with pytest.raises(ValueError, match="a negative scale"):
        scaled(torch.ones(2, 3), scale, blocks=blocks)


def test_a_scale_of_zero_is_one_of_zeros_alone() -> None:
    scale, codes = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.0, 2.0], [0.0, 0.0]])
    assert torch.equal(scaled(codes, scale, blocks=ScaleBlocks(1, 2, (2, 1))), codes)
    with pytest.raises(ValueError, match="a scale of 0 over codes that are not 0"):
        scaled(codes + 1, scale, blocks=ScaleBlocks(1, 2, (2, 1)))


def test_activation_order_is_refused() -> None:
    eights = words(0x88888888).expand(1, 8).contiguous()
    order = torch.tensor([0, 0, 0, 0, 1, 1, 0, 1])
    with pytest.raises(ValueError, match="activation order"):
        gptq(eights, words(0, 0)[:, None], torch.ones(2, 8), order, bits=4, group=4, is_v2=False)
