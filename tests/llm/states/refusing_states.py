"""Backends of gated delta nets that can do less than the model asks."""

from dataclasses import replace

import torch

from paceline.attention.backends.gdn_torch import TorchGdn
from paceline.core.modes import MaskKind

CAN = TorchGdn.capabilities


class NoTrees(TorchGdn):
    capabilities = replace(CAN, masks=frozenset({MaskKind.CAUSAL}))


class HalfStates(TorchGdn):
    capabilities = replace(CAN, part_dtypes=frozenset({torch.bfloat16}))


class NarrowConv(TorchGdn):
    capabilities = replace(CAN, max_conv_width=3)


class LongChunks(TorchGdn):
    capabilities = replace(CAN, chunk=64)
