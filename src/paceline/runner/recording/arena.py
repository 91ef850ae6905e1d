"""Arena: one storage for the intermediates of all recorded graphs, of which one runs at a time."""

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes; of every piece, as torch's own allocator aligns


class Arena:
    """Storage that grows to the largest graph laid into it.

    limit_bytes: what a graph may take; None: any.
    """

    def __init__(self, *, limit_bytes: int | None = None) -> None:
        self.limit_bytes = limit_bytes
        self._storage = torch.UntypedStorage(0)

    @property
    def nbytes(self) -> int:
        return self._storage.nbytes()

    @property
    def address(self) -> int:
        """Of its first byte; growth changes it."""
        return self._storage.data_ptr()

    def lay(self, owners: Mapping[int, Tensor], tensors: Iterable[Tensor]) -> list[Tensor]:
        """Move `tensors` into the arena, in place; what lies there already is overwritten.

        owners: storage address -> a tensor of it; tensors of other storages stay where they are.
        Returns the pieces, flat, in the dtypes of their owners.
        """
        starts: dict[int, int] = {}
        end = 0
        for address, owner in owners.items():
            starts[address] = end
            end += -(-owner.untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT
        if end > self.nbytes:
            self._storage.resize_(end)  # what was laid here before follows
        pieces = [self._piece(owner, starts[address]) for address, owner in owners.items()]
        for tensor in tensors:
            start = starts.get(tensor.untyped_storage().data_ptr())
            if start is not None:
                offset = start // tensor.element_size() + tensor.storage_offset()
                tensor.set_(self._storage, offset, tensor.size(), tensor.stride())
        return pieces

    def _piece(self, owner: Tensor, start: int) -> Tensor:
        size = owner.element_size()
        elements = owner.untyped_storage().nbytes() // size
        return owner.new_empty(0).set_(self._storage, start // size, (elements,), (1,))
