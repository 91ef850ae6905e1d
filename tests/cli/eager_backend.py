"""A backend of somebody else that no graph can hold."""

from dataclasses import replace
from typing import ClassVar

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import Capabilities, GraphSupport


class EagerBackend(TorchBackend):
    """The torch backend without graphs."""

    name: ClassVar[str] = "eager"
    capabilities: ClassVar[Capabilities] = replace(
        TorchBackend.capabilities, graph=GraphSupport.NEVER
    )
