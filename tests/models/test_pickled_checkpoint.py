"""Files in torch's own format: read as tensors, run as nothing, refused by name where damaged."""

from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.core.errors import WeightsError
from paceline.models.pickled_checkpoint import open_pickled


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "pytorch_model.bin"


def test_names_shapes_dtypes_and_contents_are_those_stored(path: Path) -> None:
    stored = {"fc.weight": torch.randn(3, 2).bfloat16(), "d2t": torch.arange(4)}
    torch.save(stored, path)
    checkpoint = open_pickled(path)
    assert checkpoint.names == ["fc.weight", "d2t"]
    assert [checkpoint.shape(name) for name in stored] == [(3, 2), (4,)]
    assert [checkpoint.dtype(name) for name in stored] == ["BF16", "I64"]
    assert all(torch.equal(checkpoint.tensor(name), stored[name]) for name in stored)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 cut"])
def test_a_damaged_file_is_named(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(
        WeightsError, match=r"pytorch_model\.bin must be a complete file of named tensors, got"
    ):
        open_pickled(path)


def test_a_truncated_file_is_named(path: Path) -> None:
    torch.save({"fc.weight": torch.zeros(500)}, path)
    path.write_bytes(path.read_bytes()[:-700])
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin must be a complete file"):
        open_pickled(path)


def test_a_file_whose_bytes_changed_is_named(path: Path) -> None:
    """Unpickling them reads lengths and texts that were never written."""
    torch.save({"fc.weight": torch.zeros(500)}, path)
    content = bytearray(path.read_bytes())
    begin = content.find(b"data.pkl") + 60
    for at in range(begin, begin + 60):
        content[at] ^= 0x5A
    path.write_bytes(content)
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin must be a complete file"):
        open_pickled(path)


class Payload:
    """What a hostile file may hold: a call that unpickling would make."""

    def __init__(self, victim: Path) -> None:
        self.victim = victim

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.victim,)


def test_code_in_a_file_is_not_run(tmp_path: Path, path: Path) -> None:
    victim = tmp_path / "victim"
    torch.save({"fc.weight": Payload(victim)}, path)
    with pytest.raises(WeightsError, match=r"named tensors, got UnpicklingError"):
        open_pickled(path)
    assert not victim.exists()


@pytest.mark.parametrize("stored", [[1, 2], {"fc.weight": 3}])
def test_a_file_of_other_things_than_tensors_is_refused(path: Path, stored: object) -> None:
    torch.save(stored, path)
    with pytest.raises(WeightsError, match=r"file of named tensors, got something else"):
        open_pickled(path)
