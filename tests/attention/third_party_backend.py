"""What a package outside the engine brings: a backend by name, and two things that are none."""

from dataclasses import replace

from paceline.attention.backends.torch_backend import TorchBackend

NOT_A_CLASS = 3


class OutsideBackend(TorchBackend):
    """Runs pages of 4 only."""

    name = "outside"
    capabilities = replace(TorchBackend.capabilities, page_sizes=frozenset({4}), window=False)


class SaysYesOrNo(TorchBackend):
    """Says of chunks whether it has them, not which."""

    name = "yes-or-no"
    capabilities = replace(TorchBackend.capabilities, chunks=False)


class NotABackend:
    """Has no contract."""
