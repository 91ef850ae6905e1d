"""Backends as a third party might write them, each with one fault."""

import os
import time
from dataclasses import replace
from typing import Any

import torch

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.attention.contract import AttentionBackend


class Faultless(TorchBackend):
    """None: the others differ from it by their fault alone."""

    name = "rogue"


class WrongShape(Faultless):
    """Returns heads first."""

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out.transpose(0, 1), lse


class FewerRows(Faultless):
    """Returns no rows for the last token."""

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out[:-1], lse


class WrongDtype(Faultless):
    """Returns float64."""

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return out.double(), lse


class ReturnsNothing(Faultless):
    """Computes and forgets to return."""

    def forward(self, q, k, v, layer, plan, part):
        super().forward(q, k, v, layer, plan, part)


class ScribblesOnThePool(Faultless):
    """Leaves its own numbers in the last slot of the cache."""

    def forward(self, q, k, v, layer, plan, part):
        found = super().forward(q, k, v, layer, plan, part)
        layer.v_cache[-1, -1].fill_(1.5)
        return found


class ScribblesOnTheStep(Faultless):
    """Uses the step's lengths as a scratchpad, which other layers and backends read."""

    def plan(self, view, buffers):
        made = super().plan(view, buffers)
        view.kv_lens.add_(1)
        return made


class ScribblesOnThePageTable(Faultless):
    """Rewrites the pages behind the first, after its plan has read them."""

    def plan(self, view, buffers):
        made = super().plan(view, buffers)
        view.groups[0].page_table[:, 1:].zero_()
        return made


class ReadsOnTheHost(Faultless):
    """Asks the device how long the longest request is."""

    def plan(self, view, buffers):
        assert int(view.kv_lens.max()) > 0
        return super().plan(view, buffers)


class PlansOnce(Faultless):
    """Keeps the first plan's page table for ever."""

    def make_buffers(self, limits):
        return {"made": super().make_buffers(limits), "first": {}}

    def plan(self, view, buffers):
        table = view.groups[0].page_table
        first = buffers["first"].setdefault(table.shape, table.clone())
        stale = replace(view, groups=tuple(replace(g, page_table=first) for g in view.groups))
        return super().plan(stale, buffers["made"])


class ForgetsHostPlan(Faultless):
    """Declares that it plans on the host, and does not."""

    capabilities = replace(TorchBackend.capabilities, host_plan=True)


class ForgetsPlan(AttentionBackend):
    """Lacks a method that every backend must have."""

    name = "rogue"
    capabilities = TorchBackend.capabilities

    def make_buffers(self, limits: Any) -> None:
        return None

    def forward(self, q, k, v, layer, plan, part):
        return torch.zeros_like(q), None


class ForgetsCapabilities(AttentionBackend):
    """Says nothing about what it can do."""

    name = "rogue"

    def make_buffers(self, limits: Any) -> None:
        return None

    def plan(self, view: Any, buffers: Any) -> None:
        return None

    def forward(self, q, k, v, layer, plan, part):
        return torch.zeros_like(q), None


class ForgetsName(AttentionBackend):
    """Is complete but for what messages call it."""

    capabilities = TorchBackend.capabilities
    make_buffers = TorchBackend.make_buffers
    plan = TorchBackend.plan
    forward = TorchBackend.forward


class ForgetsDefaults(Faultless):
    """Can be made by those alone who know what it wants."""

    def __init__(self, depth: int, *, width: int = 1, **others: int) -> None:
        super().__init__()


class ForgetsAll(AttentionBackend):
    """Has nothing."""


class Zeros(Faultless):
    """Answers nothing."""

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan, part)
        return torch.zeros_like(out), lse


class Raises(Faultless):
    """Cannot allocate."""

    def make_buffers(self, limits):
        raise MemoryError("no room for a workspace")


class Exits(Faultless):
    """Ends the process, as a library does that aborts."""

    def plan(self, view, buffers):
        os._exit(9)


class Leaves(Faultless):
    """Calls sys.exit, as a script does."""

    def plan(self, view, buffers):
        raise SystemExit(4)


class Hangs(Faultless):
    """Waits for something that does not come."""

    def plan(self, view, buffers):
        time.sleep(600)
