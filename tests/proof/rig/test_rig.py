"""The rig: a fault of a step is seen wherever it is planted, and named."""

from dataclasses import replace

import pytest
import torch
from rig_cases import BOTH, DECODE, EXTEND, FP8, FROZEN_KV, TREE, Exact, cell, free_page, rig_of

from paceline.attention.backends.torch_backend import TorchBackend
from paceline.core.step import FinishCode
from paceline.layers import attention as attention_layer
from paceline.proof.check.cell import Status
from paceline.proof.rig import world
from paceline.proof.rig.prepared import prepare_case
from paceline.runner.extents import PaddedSize

WRITES = "do not hold what the step was to leave there"


class LoadsDead(TorchBackend):
    """Asks for finite poison."""

    capabilities = replace(TorchBackend.capabilities, loads_dead_slots=True)


def spreading(base, source, page):
    """`base` that also copies a token's K and V to a page's last slot."""

    class Spreading(base):
        def forward(self, q, k, v, layer, plan, part):
            layer.k_cache[page, -1].copy_(k[source].to(layer.k_cache.dtype))
            layer.v_cache[page, -1].copy_(v[source].to(layer.v_cache.dtype))
            return super().forward(q, k, v, layer, plan, part)

    return Spreading


SPREAD = [  # every two of them meet; source -1 is a padded token
    pytest.param(case, base, source, id=f"{case.mode.value}-{base.__name__}-{source}")
    for turn, case in enumerate((DECODE, EXTEND, FP8, TREE))
    for base, source in zip((Exact, LoadsDead), ((0, -1), (-1, 0))[turn % 2], strict=True)
]


@pytest.mark.parametrize(("case", "base", "source"), SPREAD)
def test_a_token_in_a_free_slot_is_seen_in_k_and_in_v(case, base, source):
    # The last batch is padded in a graph: its last token is a padded one.
    reason = cell(spreading(base, source, free_page(case)), case).reason
    for name in ("K", "V"):
        assert f"{name} of layer 0: slots [" in reason
    assert WRITES in reason


@pytest.mark.parametrize("base", [Exact, LoadsDead])
def test_the_poison_of_a_pool_is_no_padded_tokens(base):
    for case in (DECODE, FP8):
        rig = rig_of(case, base)
        rig.launch(0)
        layer = rig._runner.parts.layers[0]
        dead = rig._pools.dead_token(rig._data[0], 0)
        width = layer.v_cache[0, 0].numel()
        held = layer.v_cache[free_page(case), -1].flatten().view(torch.uint8)
        for scale in (1.0, 1.0 if layer.v_scale is None else float(layer.v_scale)):
            stored = (dead[-width:] / scale).to(layer.v_cache.dtype).view(torch.uint8)
            assert not bool((held == stored).all())


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_missing_write_is_seen(monkeypatch, runner):
    monkeypatch.setattr(attention_layer, "rope_write_kv", lambda *args, **kwargs: None)
    result = cell(TorchBackend, DECODE, runner)
    assert result.status is Status.FAILING
    assert "K of layer 0: slots [" in result.reason
    assert "V of layer 0: slots [" in result.reason


def test_a_write_of_the_prefix_alone_is_seen():
    reason = cell(spreading(TorchBackend, 0, free_page(FROZEN_KV)), FROZEN_KV).reason
    assert WRITES in reason


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
@pytest.mark.parametrize("base", [Exact, LoadsDead])
def test_a_read_of_a_free_slot_is_seen(base, runner):
    class ReadsFreePages(base):
        def forward(self, q, k, v, layer, plan, part):
            out, lse = super().forward(q, k, v, layer, plan, part)
            return out + layer.v_cache[free_page(DECODE), -1, 0].to(out.dtype), lse

    result = cell(ReadsFreePages, DECODE, runner)
    size = "0." if base is LoadsDead else "inf"
    assert f"layer 0: error {size}" in result.reason


def test_steps_that_miss_the_graph_are_no_proof(monkeypatch):
    def exact(self, num_reqs, extend_len):
        return PaddedSize.uniform(num_reqs, extend_len)

    monkeypatch.setattr(world.OneSize, "pad", exact)
    reason = cell(TorchBackend).reason
    assert reason.startswith("the batches must share one graph, got ")


def test_steps_that_are_never_captured_are_no_proof(monkeypatch):
    monkeypatch.setattr(world.OneSize, "pad", lambda self, num_reqs, extend_len: None)
    assert "must share one graph, got 0" in cell(TorchBackend).reason


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_what_is_read_before_an_fp8_cache_rounds_it_is_seen(runner):
    class ReadsTheStep(TorchBackend):
        """Attends to the step's own tokens as computed, to the prefix as stored."""

        def plan(self, view, buffers):
            return super().plan(view, buffers), view.groups[0].out_cache_loc

        def forward(self, q, k, v, layer, plan, part):
            k_cache = (layer.k_cache.float() * layer.k_scale).flatten(0, 1)
            v_cache = (layer.v_cache.float() * layer.v_scale).flatten(0, 1)
            k_cache[plan[1]], v_cache[plan[1]] = k, v
            pools = (k_cache.view(layer.k_cache.shape), v_cache.view(layer.v_cache.shape))
            exact = replace(layer, k_cache=pools[0], v_cache=pools[1], k_scale=None, v_scale=None)
            return super().forward(q, k, v, exact, plan[0], part)

    assert cell(TorchBackend, FP8, runner).status is Status.PROVEN
    reason = cell(ReadsTheStep, FP8, runner).reason
    assert reason.startswith("batch 0: layer 0: error 0.0"), reason


# --- frozen rows ----------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", BOTH, ids=lambda r: r.value)
def test_a_frozen_row_is_finished_in_the_table_and_padding_in_the_step(runner):
    rig = rig_of(TREE, runner=runner)
    assert rig.launch(0) == []
    assert rig.launch(1) == []
    row = rig._places[1].rows[TREE.batches[1].frozen[0]]
    view, _ = rig._watched.planned
    parts = rig._runner.parts
    assert parts.table.finish[row] == FinishCode.LENGTH
    assert view.row_ids[0] == 0
    assert view.kv_lens[0] == 1 + TREE.batches[1].extend_lens[0]
    assert int(view.groups[0].page_table[0].abs().max()) == 0


def test_a_step_that_carries_on_a_frozen_row_is_seen(monkeypatch):
    monkeypatch.setattr(world.World, "freeze", lambda self, index: None)
    reason = cell(TorchBackend, TREE).reason
    assert reason.startswith("batch 1: row_ids must be [0, ")


def test_a_write_to_a_frozen_rows_page_is_seen():
    (request,) = TREE.batches[1].frozen
    page = prepare_case(TREE).places[1].pages[0][request][0]
    rig = rig_of(TREE, spreading(Exact, -1, page))
    rig.launch(0)
    slot = (page + 1) * TREE.page_size - 1
    for name in ("K", "V"):
        assert f"{name} of layer 0: slots [{slot}] {WRITES}" in rig.launch(1)


class AnswersFrozenRows(TorchBackend):
    """Writes numbers into every row that is padded or frozen."""

    def plan(self, view, buffers):
        return super().plan(view, buffers), view.row_ids.index_select(0, view.req_ids)

    def forward(self, q, k, v, layer, plan, part):
        out, lse = super().forward(q, k, v, layer, plan[0], part)
        return out.masked_fill((plan[1] == 0).view(-1, 1, 1), 3.0), lse


def test_what_comes_of_a_frozen_row_is_dropped():
    assert cell(AnswersFrozenRows, TREE).status is Status.PROVEN
