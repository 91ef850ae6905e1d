"""What a backend holds: the tensors among its buffers, and their bytes."""

from dataclasses import fields, is_dataclass

from torch import Tensor


def tensors_in(name: str, buffers: object) -> dict[str, Tensor]:
    """The tensors of a backend's buffers by name: dataclass fields, and items of tuples."""
    if isinstance(buffers, Tensor):
        return {name: buffers}
    parts: dict[str, object] = {}
    if isinstance(buffers, tuple):
        parts = {f"{name}.{index}": item for index, item in enumerate(buffers)}
    elif is_dataclass(buffers):
        parts = {f"{name}.{item.name}": getattr(buffers, item.name) for item in fields(buffers)}
    return {
        found: tensor
        for part, value in parts.items()
        for found, tensor in tensors_in(part, value).items()
    }


def tensor_bytes(buffers: object) -> int:
    """Bytes of the tensors of a backend's buffers."""
    return sum(tensor.nbytes for tensor in tensors_in("backend", buffers).values())
