"""Token ids as bytes: of ints alone, of 32 bits."""

from typing import Any

import numpy as np
import pytest
import torch

from paceline.core.request.token_ids import exact_ids, packed_ids


class Id(int):
    """Not an int to a frame."""


@pytest.mark.parametrize("ids", [[], [0], [5, -1, 2**31 - 1, -(2**31)], [105, 0x69696969] * 300])
def test_exact_ids_are_packed_alike_in_lists_and_tuples(ids: list[int]) -> None:
    wanted = np.array(ids, np.int32).tobytes()
    assert exact_ids(ids) == exact_ids(tuple(ids)) == packed_ids(ids) == wanted


@pytest.mark.parametrize(
    "other",
    [
        True,
        None,
        2**31,
        -(2**31) - 1,
        2**70,
        1.0,
        "4",
        b"i1234",
        "i123",
        Id(4),
        np.int32(4),
        np.int64(4),
        np.bool_(True),
        torch.tensor(4),
        [4],
        (),
        bytearray(b"4"),
    ],
    ids=repr,
)
def test_nothing_but_an_int_of_32_bits_is_exact(other: Any) -> None:
    """Wherever it stands, and however its bytes look."""
    for ids in ([other], [4, other], [other, 4], [4] * 9 + [other] + [4] * 9, [4, other, other]):
        assert exact_ids(ids) is None
    short = [4, *([None] * 5), b"iiiii", 4]  # as long as some ints, and made of their code
    assert exact_ids(short) is None
    assert exact_ids(range(3)) is None
    assert exact_ids(np.arange(3)) is None


def test_an_id_that_is_no_int32_is_told() -> None:
    with pytest.raises(OverflowError, match=r"^a token id is no int32"):
        packed_ids([2**31])
