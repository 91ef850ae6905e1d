"""Which operators run, for tests."""

from collections.abc import Mapping, Sequence
from typing import Any

from paceline.kernels.custom_op import DispatchMode


class Operators(DispatchMode):
    """Notes the name of every operator that reaches the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))
