"""The sampling columns of a row: what a request asks, and what fills the rest."""

from collections.abc import Mapping
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from paceline.core.request.sampling_params import SamplingParams
from paceline.layers.sampling import Column, LogitsProcessor, RowFacts, RowState, SamplingTable


class Listed(LogitsProcessor):
    """Columns of every kind, with fills of their own."""

    columns: ClassVar[Mapping[str, Column]] = {
        "ids": Column(torch.int64, 4, fill=7),
        "weights": Column(torch.float32, 3, fill=2),
        "one": Column(torch.int64),
    }

    def pack(self, row: RowFacts) -> Mapping[str, object]:
        ids = row.params.stop_token_ids
        return {"ids": ids, "weights": [0.5] * len(ids), "one": row.prompt_len}

    def apply(self, logits: Tensor, rows: Tensor, positions: Tensor, state: RowState) -> Tensor:
        return logits.clone()


def packed(params: SamplingParams, **settings: object) -> SamplingTable:
    """A table whose row 1 holds a request that knows a prompt of 5 tokens."""
    table = SamplingTable(2, torch.device("cpu"), [Listed()])
    row = table.pack(
        params,
        **({"prompt_len": 5, "max_len": 9, "eos_token_ids": (), "default_seed": 4} | settings),
    )
    table.floats[1] = torch.from_numpy(row.floats)
    table.ints[1] = torch.from_numpy(row.ints)
    return table


@pytest.mark.parametrize(
    ("num", "ids", "weights"),
    [
        (0, [7, 7, 7, 7], [2.0, 2.0, 2.0]),
        (1, [30, 7, 7, 7], [0.5, 2.0, 2.0]),
        (3, [30, 31, 32, 7], [0.5, 0.5, 0.5]),
    ],
)
def test_behind_what_a_request_brings_a_column_holds_its_own_fill(num, ids, weights) -> None:
    table = packed(SamplingParams(stop_token_ids=range(30, 30 + num)))
    columns = table.stages[-1].columns
    assert columns["ids"][1].tolist() == ids
    assert columns["weights"][1].tolist() == weights
    assert columns["one"][1].item() == 5


def test_a_request_that_takes_no_drafts_says_so_on_the_device() -> None:
    assert packed(SamplingParams(speculative=False)).max_drafts.tolist()[1] == 0
    assert packed(SamplingParams()).max_drafts.tolist()[1] > 1000


def test_a_seed_of_its_own_comes_before_the_default() -> None:
    assert packed(SamplingParams(seed=0)).seed.tolist()[1] == 0
    assert packed(SamplingParams()).seed.tolist()[1] == 4
