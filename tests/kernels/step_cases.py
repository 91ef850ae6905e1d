"""Random steps for derive and commit: request rows, facts with padded and frozen rows, outputs.

Everything a kernel may write starts as rubbish, so that what it forgets shows.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.model.cache_groups import NUM_SLOT_COLUMNS
from paceline.core.modes import MaskKind
from paceline.core.step import FinishCode
from paceline.kernels import derive as derive_module
from paceline.kernels.commit import CommittedRows, EndRules, SampledTokens
from paceline.kernels.derive import TableRows, derive_rows_reference
from paceline.kernels.step_view import GroupView, StepView

RUBBISH = -77


@dataclass(frozen=True)
class StepShape:
    """The sizes of a step and of the request table behind it."""

    name: str
    extend_lens: tuple[int, ...]  # of the staged requests
    pad_lens: tuple[int, ...] = ()  # of the padded rows behind them
    page_sizes: tuple[int, ...] = (4,)  # 0: a group of states
    max_tokens: int = 90  # of a row
    num_rows: int = 12  # of the table

    @property
    def strides(self) -> tuple[int, ...]:
        """Extend lengths, padded rows too."""
        return self.extend_lens + self.pad_lens

    @property
    def widths(self) -> tuple[int, ...]:
        """Of the page tables."""
        return tuple(
            -(-self.max_tokens // size) + group if size else NUM_SLOT_COLUMNS
            for group, size in enumerate(self.page_sizes)
        )


SMALL = (
    StepShape("one", (1,)),
    StepShape("decode", (1, 1, 1, 1, 1), pad_lens=(1, 1)),
    StepShape("verify", (4, 4, 4), pad_lens=(4,), page_sizes=(4, 16)),
    StepShape("ragged", (5, 1, 23, 17, 2), page_sizes=(16, 1)),
    StepShape("ragged, padded", (5, 1, 9), pad_lens=(20, 0, 0)),
    StepShape("three groups", (3, 9), page_sizes=(1, 5, 16)),
    StepShape("states", (5, 1, 9), pad_lens=(20, 0), page_sizes=(4, 0)),
    StepShape("states alone", (5, 1, 9), pad_lens=(20, 0), page_sizes=(0,)),
    StepShape("nothing cached", (5, 1, 9), pad_lens=(20, 0), page_sizes=()),
    StepShape("states in between", (1, 1, 1), pad_lens=(1,), page_sizes=(4, 0, 0, 16)),
)
LARGE = (
    StepShape(
        "decode", (1,) * 60, pad_lens=(1,) * 4, page_sizes=(16,), max_tokens=4099, num_rows=65
    ),
    StepShape("one long", (1,), page_sizes=(1, 16), max_tokens=131074, num_rows=3),
    StepShape(
        "verify", (8,) * 30, pad_lens=(8,) * 2, page_sizes=(16, 64), max_tokens=9001, num_rows=40
    ),
    StepShape(
        "prefill", (16000, 1, 384, 16, 17, 511, 512, 513), max_tokens=16500, page_sizes=(5, 16, 64)
    ),
    StepShape("prefill, padded", (900, 77, 1), pad_lens=(558, 0, 0, 0, 0), max_tokens=1000),
    StepShape("crowd", (1, 3) * 512, page_sizes=(16, 1), max_tokens=70, num_rows=1025),
)


def _ints(*shape: int, low: int, high: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high, shape, generator=generator, dtype=torch.int32)


def make_facts(shape: StepShape, *, seed: int) -> Tensor:
    """[padded_reqs, 3] int32, in a buffer that is longer: distinct rows, some that emit nothing."""
    generator = torch.Generator().manual_seed(seed)
    num, reqs = len(shape.extend_lens), len(shape.strides)
    facts = torch.full((reqs + 3, 3), RUBBISH, dtype=torch.int32)
    facts[:num, 0] = 1 + torch.randperm(shape.num_rows - 1, generator=generator)[:num].int()
    facts[:num, 2] = torch.rand(num, generator=generator) < 0.8
    facts[num:reqs, 0] = 0
    facts[num:reqs, 2] = 0
    facts[:reqs, 1] = torch.tensor(shape.strides)
    return facts


def make_rows(shape: StepShape, *, seed: int) -> TableRows:
    """A table whose columns are strided, some rows frozen, page ids that need 64-bit slots."""
    facts = make_facts(shape, seed=seed)
    state = torch.empty(shape.num_rows, 2, dtype=torch.int32)
    room = shape.max_tokens - max(shape.strides)
    state[:, 0] = _ints(shape.num_rows, low=0, high=room, seed=seed)
    codes = torch.tensor([FinishCode.RUNNING] * 4 + list(FinishCode))
    state[:, 1] = codes[_ints(shape.num_rows, low=0, high=len(codes), seed=seed + 1).long()]
    state[0] = torch.tensor([1, FinishCode.RUNNING])
    token_ids = _ints(shape.num_rows, shape.max_tokens, low=0, high=2**31 - 1, seed=seed + 2)
    token_ids[0] = 0
    tables = []
    for group, width in enumerate(shape.widths):
        table = _ints(shape.num_rows, width, low=1, high=2**31 - 1, seed=seed + 3 + group)
        table[0] = 0
        tables.append(table)
    return TableRows(facts, state[:, 0], state[:, 1], token_ids, tables)


def make_view(shape: StepShape, device: str | torch.device = "cpu") -> StepView:
    """Outputs full of rubbish, but for the leading zero that is there already."""
    view = rubbish_view(len(shape.strides), sum(shape.strides), shape.widths, device)
    view.cu_seqlens_q[0] = 0
    return replace(view, max_extend_len=max(shape.strides), kv_len_bound=shape.max_tokens)


def rubbish_view(
    reqs: int, tokens: int, widths: Sequence[int], device: str | torch.device
) -> StepView:
    """Tensors full of rubbish; widths: [num_groups] of the page tables."""

    def full(*size: int, dtype: torch.dtype) -> Tensor:
        return torch.full(size, RUBBISH, dtype=dtype, device=device)

    positions = full(tokens, dtype=torch.int64)
    prefix_lens, kv_lens = full(reqs, dtype=torch.int32), full(reqs, dtype=torch.int32)
    return StepView(
        row_ids=full(reqs, dtype=torch.int64),
        prefix_lens=prefix_lens,
        extend_lens=full(reqs, dtype=torch.int32),
        kv_lens=kv_lens,
        cu_seqlens_q=full(reqs + 1, dtype=torch.int32),
        logits_loc=full(reqs, dtype=torch.int64),
        req_ids=full(tokens, dtype=torch.int64),
        positions=positions,
        rope_positions=positions,
        input_ids=full(tokens, dtype=torch.int64),
        groups=tuple(
            GroupView(
                page_table=full(reqs, width, dtype=torch.int32),
                out_cache_loc=full(tokens, dtype=torch.int64),
                prefix_lens=prefix_lens,
                kv_lens=kv_lens,
            )
            for width in widths
        ),
        mask=MaskKind.CAUSAL,
        tree_mask=None,
        max_extend_len=RUBBISH,
        kv_len_bound=RUBBISH,
    )


def derived(shape: StepShape, rows: TableRows) -> StepView:
    """The step by the reference."""
    view = make_view(shape)
    offsets = torch.arange(sum(shape.strides), dtype=torch.int32)
    derive_rows_reference(rows, view, page_sizes=shape.page_sizes, offsets=offsets)
    return view


def fields_of(view: StepView) -> dict[str, Tensor]:
    """Its tensors by name; what rope turns by is the positions, or derived apart."""
    named = {field.name: getattr(view, field.name) for field in fields(view)}
    del named["rope_positions"]
    for index, group in enumerate(view.groups):
        named[f"page_table.{index}"] = group.page_table
        named[f"out_cache_loc.{index}"] = group.out_cache_loc
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def differences(actual: StepView, wanted: StepView) -> list[str]:
    """Names of the tensors that differ, wherever they are."""
    mine, theirs = fields_of(actual), fields_of(wanted)
    assert mine.keys() == theirs.keys()
    return [name for name in theirs if not torch.equal(mine[name].cpu(), theirs[name].cpu())]


def told(
    monkeypatch: pytest.MonkeyPatch, name: str, source: tuple[Any, ...], view: StepView
) -> None:
    """Check that derive_rows hands its operator, off the CPU, each argument under its name.

    name: of the operator in kernels.derive; nothing of `view` is written.
    """
    operator = getattr(derive_module, name)
    given: list[tuple[Any, ...]] = []
    monkeypatch.setattr(derive_module, name, lambda *args: given.append(args))
    sizes = tuple(range(2, 2 + len(view.groups)))
    on_meta = replace(view, positions=view.positions.to("meta"))
    derive_module.derive_rows(source, on_meta, page_sizes=sizes, offsets=view.req_ids)
    (args,) = given
    names = [argument.name for argument in operator._schema.arguments]
    assert len(args) == len(names)
    wanted = {
        **source._asdict(),
        **{field.name: getattr(on_meta, field.name) for field in fields(on_meta)},
        "page_tables": [group.page_table for group in view.groups],
        "out_cache_locs": [group.out_cache_loc for group in view.groups],
        "page_sizes": sizes,
        "tables": source._asdict().get("page_tables"),
    }
    for name, arg in zip(names, args, strict=True):
        many = isinstance(arg, list)
        pairs = zip(arg, wanted[name], strict=True) if many else [(arg, wanted[name])]
        assert all(mine is theirs or mine == theirs for mine, theirs in pairs), name


def moved(fields: Sequence[Tensor | Sequence[Tensor]], device: str | torch.device) -> list[object]:
    """The fields of a named tuple on a device, strides kept."""
    return [
        [_moved(tensor, device) for tensor in field]
        if isinstance(field, list | tuple)
        else _moved(field, device)
        for field in fields
    ]


def _moved(tensor: Tensor, device: str | torch.device) -> Tensor:
    if tensor.is_contiguous():
        return tensor.to(device, copy=True)
    whole = tensor.new_empty(tensor.shape[0], tensor.stride(0), device=device)
    view = whole.as_strided(tensor.shape, tensor.stride())
    return view.copy_(tensor)


MAX_STOP_IDS = 5


def make_commit(
    shape: StepShape, *, seed: int
) -> tuple[CommittedRows, EndRules, SampledTokens, Tensor]:
    """A derived step and its samples: stops, limits, failures and plain tokens among them."""
    state = make_rows(shape, seed=seed)
    step = derived(shape, state)
    reqs = len(shape.strides)
    generator = torch.Generator().manual_seed(seed + 50)
    packed = torch.randint(0, 6, (shape.num_rows, 1 + MAX_STOP_IDS), generator=generator)
    packed[:, 3:] = -1
    packed[:, 0] = shape.max_tokens
    margin = torch.randint(1, 4, (reqs,), generator=generator)  # 1: at its limit, just so
    packed[step.row_ids, 0] = step.kv_lens + margin
    samples = SampledTokens(
        facts=state.facts[:reqs],
        row_ids=step.row_ids,
        kv_lens=step.kv_lens,
        token_ids=torch.randint(0, 9, (reqs, 1), generator=generator),
        finite=torch.rand(reqs, 1, generator=generator) < 0.75,
    )
    rows = CommittedRows(state.kv_committed, state.finish, state.token_ids)
    results = torch.full((reqs, 3), RUBBISH, dtype=torch.int32)
    return rows, EndRules(packed[:, 1:], packed[:, 0]), samples, results
