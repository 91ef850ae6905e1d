"""One case for each thing a graph refuses, as a function of a float tensor of four zeros."""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

REMEDY = "keep it in a device tensor; lengths the host knows come by host_plan"
Case = Callable[[Tensor], Any]

# Tensor method -> a function that calls it.
METHODS: dict[str, Case] = {
    "__array__": lambda y: np.asarray(y),
    "__bool__": lambda y: bool(y.sum() > 0),
    "__complex__": lambda y: complex(y.sum()),
    "__contains__": lambda y: 3.0 in y,
    "__dlpack__": lambda y: np.from_dlpack(y),
    "__float__": lambda y: float(y.sum()),
    "__format__": lambda y: f"{y.sum():.3f}",
    "__index__": lambda y: [1, 2, 3][y.sum().long()],
    "__int__": lambda y: int(y.sum()),
    "__repr__": lambda y: str(y),
    "cpu": lambda y: y.cpu(),
    "cuda": lambda y: y.cuda(),
    "item": lambda y: y.sum().item(),
    "numpy": lambda y: y.numpy(),
    "tolist": lambda y: y.tolist(),
}

# What is called -> (a function that calls it, the operator refused, why).
OPERATORS: dict[str, tuple[Case, str, str]] = {
    "mask index": (lambda y: y[y > 0], "aten::index", "mask index depends on data"),
    "byte mask index": (
        lambda y: torch.ops.aten.index(y, [y.byte()]),
        "aten::index",
        "mask index depends on data",
    ),
    "mask assignment": (
        lambda y: torch.ops.aten.index_put_(y, [y > 0], y[:1]),
        "aten::index_put_",
        "mask index depends on data",
    ),
    "mask assignment out of place": (
        lambda y: torch.index_put(y, [y > 0], y[:1]),
        "aten::index_put",
        "mask index depends on data",
    ),
    "unchecked mask assignment": (
        lambda y: torch._index_put_impl_(y, [y > 0], y[:1]),
        "aten::_index_put_impl_",
        "mask index depends on data",
    ),
    "mask assignment of a number": (
        lambda y: y.__setitem__(y > 0, 1.0),
        "aten::",
        "mask index depends on data|host data enters the region",
    ),
    "masked_select": (
        lambda y: y.masked_select(y > 0),
        "aten::masked_select",
        "its shape depends on data",
    ),
    "nonzero": (lambda y: y.nonzero(), "aten::nonzero", "its shape depends on data"),
    "argwhere": (lambda y: y.argwhere(), "aten::nonzero", "its shape depends on data"),
    "one-argument where": (
        lambda y: torch.where(y > 0),
        "aten::nonzero",
        "its shape depends on data",
    ),
    "repeat_interleave by tensor": (
        lambda y: y.repeat_interleave(y.long()),
        "aten::repeat_interleave",
        "its shape depends on data",
    ),
    "unique": (lambda y: y.unique(), "aten::_unique2", "its shape depends on data"),
    "unique_consecutive": (
        lambda y: y.unique_consecutive(),
        "aten::unique_consecutive",
        "its shape depends on data",
    ),
    "bincount": (
        lambda y: y.long().bincount(),
        "aten::bincount",
        "its shape depends on data",
    ),
    "equal": (lambda y: torch.equal(y, y + 1), "aten::equal", "its result is a host value"),
    "allclose": (
        lambda y: torch.allclose(y, y + 1),
        "aten::",
        "its result is a host value",
    ),
    "is_nonzero": (
        lambda y: torch.is_nonzero(y.sum()),
        "aten::",
        "its result is a host value",
    ),
    "a 0-dim tensor as an index": (
        lambda y: y[y.sum().long()],
        "aten::_local_scalar_dense",
        "its result is a host value",
    ),
    "tensor of a list": (
        lambda y: y.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "tensor of an array": (
        lambda y: y.add_(torch.from_numpy(np.ones(4, dtype=np.float32))),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "as_tensor of a list": (
        lambda y: y.add_(torch.as_tensor([1.0, 2.0, 3.0, 4.0])),
        "aten::lift_fresh",
        "host data enters the region",
    ),
    "lift_fresh_copy": (
        lambda y: torch.ops.aten.lift_fresh_copy(y),
        "aten::lift_fresh_copy",
        "host data enters the region",
    ),
    "rand": (lambda y: torch.rand(4), "aten::rand", "its random state would be frozen"),
    "rand_like": (
        lambda y: torch.rand_like(y),
        "aten::rand_like",
        "its random state would be frozen",
    ),
    "in-place noise": (
        lambda y: y.normal_(),
        "aten::normal_",
        "its random state would be frozen",
    ),
    "multinomial": (
        lambda y: torch.multinomial(y + 1, 1),
        "aten::multinomial",
        "its random state would be frozen",
    ),
    "dropout": (
        lambda y: nn.functional.dropout(y, 0.5),
        "aten::",
        "its random state would be frozen",
    ),
    "a copy to another device": (
        lambda y: y.to("meta"),
        "aten::_to_copy",
        "it mixes devices ['cpu', 'meta']",
    ),
    "a copy from another device": (
        lambda y: y.copy_(torch.empty(4, device="meta")),
        "aten::copy_",
        "it mixes devices ['cpu', 'meta']",
    ),
}
