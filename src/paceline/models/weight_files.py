"""Which files of a folder hold its weights."""

import json
import re
from pathlib import Path

from paceline.core.errors import WeightsError

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
_SHARD = re.compile(r"model-(\d+)-of-(\d+)\.safetensors$")
_OTHERS = ("adapter", "consolidated", "optimizer")  # beside weights, and not part of them


def weight_files(folder: Path) -> list[Path]:
    """The files of the index, or model.safetensors, or every file that is part of a model.

    As in transformers, model.safetensors comes before an index that does not name it.  Raises
    WeightsError naming what is absent.
    """
    index, single = folder / INDEX_NAME, folder / SINGLE_NAME
    paths = _indexed_files(index) if index.is_file() else []
    if single.is_file() and single not in paths:
        return [single]
    if not paths:
        paths = sorted({*_any_files(folder), *_numbered_shards(folder)})
    absent = [path.name for path in paths if not path.is_file()]
    other = next(folder.glob("*.gguf"), None)
    if not paths and other is not None:
        raise gguf_refusal(f"weights in {folder}", other.name)
    if not paths or absent:
        raise _incomplete(folder, absent)
    return paths


def are_all_here(folder: Path) -> bool:
    """Whether `weight_files` finds every one of them."""
    try:
        return bool(weight_files(folder))
    except WeightsError:
        return False


def gguf_refusal(what: str, name: str) -> WeightsError:
    """The error about weights in the format of llama.cpp."""
    return WeightsError.about(
        what,
        expected="*.safetensors files",
        got=f"{name}, which is GGUF",
        remedy="name the model it was converted from: GGUF is not read",
    )


def _incomplete(folder: Path, absent: list[str]) -> WeightsError:
    others = sorted(path.name for path in folder.glob("*.safetensors"))
    got, remedy = "none", "convert it to safetensors"
    if absent:
        got, remedy = f"no {', '.join(absent[:10])}", "download the model again"
    elif others:
        got, remedy = f"{', '.join(others)} alone", "add the model's own: these are not read"
    expected = "every shard of the checkpoint" if absent else "*.safetensors files"
    return WeightsError.about(f"weights in {folder}", expected=expected, got=got, remedy=remedy)


def _numbered_shards(folder: Path) -> list[Path]:
    """All shards of the set that any is of, whether they exist or not."""
    sets = {found[2] for path in folder.glob("model-*") if (found := _SHARD.match(path.name))}
    return [
        folder / f"model-{number:0{len(total)}}-of-{total}.safetensors"
        for total in sorted(sets)
        for number in range(1, int(total) + 1)
    ]


def _any_files(folder: Path) -> list[Path]:
    paths = sorted(folder.glob("*.safetensors"))
    return [path for path in paths if not path.name.startswith(_OTHERS)]


def _indexed_files(index: Path) -> list[Path]:
    try:
        files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        return [index.parent / name for name in files]
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise WeightsError.about(
            str(index),
            expected="an index with a weight_map",
            got=f"{type(error).__name__}: {error}",
            remedy="download the model again",
        ) from error
