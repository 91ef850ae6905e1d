"""A backend of somebody else that no graph can hold."""

from dataclasses import replace

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import GraphSupport


class EagerBackend(TorchBackend):
    """The torch backend without graphs."""

    name = "eager"
    capabilities = replace(TorchBackend.capabilities, graph=GraphSupport.NEVER)
