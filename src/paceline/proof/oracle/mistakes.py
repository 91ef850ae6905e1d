"""The classic mistakes that could matter to a batch, as data.

A mistake is another reading of the step (oracle.Meaning) or other numbers (a page swapped), and the
rows it touches.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from paceline.proof.oracle.batch_data import BatchData
from paceline.proof.oracle.methods.softmax import TRUE, Meaning, visible_keys
from paceline.proof.oracle.readings import other_readings
from paceline.proof.suite.case import Batch, Case

_SCALES = ("no scale", "head_dim ** -0.5 for the scale")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Mistake:
    """One way to get a layer of a batch wrong."""

    name: str
    meaning: Meaning
    data: BatchData
    touches: Callable[[int, int], bool]  # (request, row): its keys or numbers differ

    @property
    def must_show(self) -> bool:
        """Whether each case that it touches must tell it from the truth; most tell a scale."""
        return self.name not in _SCALES


def mistakes(case: Case, batch: Batch, data: BatchData, layer: int) -> list[Mistake]:
    """Every mistake that is one in such a case; some may touch no row."""
    found = [
        *_number_mistakes(case, data, layer),
        *_rounding_mistakes(case, batch, data),
        *_column_mistakes(case, data),
        *_page_mistakes(case, batch, data, layer),
        *_end_mistakes(case, batch, data),
    ]
    for name, keys in other_readings(case, batch).items():
        found.append((name, Meaning(keys=keys), data, None))
    made = []
    for name, meaning, other, page in found:
        touches = _touches(case, batch, layer, meaning, page)
        made.append(Mistake(name=name, meaning=meaning, data=other, touches=touches))
    return made


@dataclass(frozen=True, slots=True)
class _Page:
    """Keys of a request that a mistake takes from elsewhere."""

    request: int
    keys: range


_Found = tuple[str, Meaning, BatchData, _Page | None]


def _touches(
    case: Case, batch: Batch, layer: int, meaning: Meaning, page: _Page | None
) -> Callable[[int, int], bool]:
    """Whether a mistake changes what a row sees, or the numbers it computes with."""

    def touches(request: int, row: int) -> bool:
        seen = visible_keys(case, batch, layer, request, row)
        if page is not None:
            return request == page.request and any(index in page.keys for index in seen)
        if meaning.keys is not visible_keys:
            return meaning.keys(case, batch, layer, request, row) != seen
        is_cap = not meaning.is_capped or meaning.key_factor != 1
        least = 2 if is_cap else 1  # one key alone weighs 1, whatever its score
        return len(seen) >= least

    return touches


def _number_mistakes(case: Case, data: BatchData, layer: int) -> list[_Found]:
    """Right keys, wrong numbers."""
    meanings = {"all zero": replace(TRUE, value_factor=0.0)}
    for name, scale in zip(_SCALES, (1.0, case.head_dim**-0.5), strict=True):
        meanings[name] = replace(TRUE, key_factor=scale / data.scale)
    if case.soft_cap is not None:
        meanings["no soft cap"] = replace(TRUE, is_capped=False)
    if data.sinks is not None and case.is_part:
        part = "step" if case.step_only else "prefix"
        meanings[f"sinks applied to the {part} alone"] = replace(TRUE, num_sinks=2)
    elif data.sinks is not None:
        meanings["no sinks"] = replace(TRUE, num_sinks=0)
        meanings["sinks counted twice"] = replace(TRUE, num_sinks=2)
    if data.k_scales is not None and data.v_scales is not None:
        k_scale, v_scale = float(data.k_scales[layer]), float(data.v_scales[layer])
        meanings["K scale ignored"] = replace(TRUE, key_factor=1 / k_scale)
        meanings["V scale ignored"] = replace(TRUE, value_factor=1 / v_scale)
        meanings["K scale used for V"] = replace(TRUE, value_factor=k_scale / v_scale)
    if 1 < case.num_kv_heads < case.num_heads:
        meanings["KV heads striped (h % kv_heads)"] = replace(TRUE, is_striped=True)
    return [(name, meaning, data, None) for name, meaning in meanings.items()]


def _rounding_mistakes(case: Case, batch: Batch, data: BatchData) -> list[_Found]:
    """The step's own keys and values as computed, not as an fp8 cache rounds them."""
    if data.k_scales is None or case.is_part:
        return []

    def unrounded(of: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(
            torch.cat((each[:, :prefix], data.computed(each[:, prefix:])), 1)
            for each, prefix in zip(of, batch.prefix_lens, strict=True)
        )

    changed = replace(data, keys=unrounded(data.keys), values=unrounded(data.values))
    return [("step not rounded as the cache is", TRUE, changed, None)]


def _column_mistakes(case: Case, data: BatchData) -> list[_Found]:
    """V of a latent cache from the columns that only K has."""
    if not case.v_in_k:
        return []
    values = tuple(keys[..., -case.v_head_dim :] for keys in data.keys)
    return [("V of K's last columns", TRUE, replace(data, values=values), None)]


def _page_mistakes(case: Case, batch: Batch, data: BatchData, layer: int) -> list[_Found]:
    """A page of the longest request is another request's, or a dead one."""
    request = max(range(batch.num_reqs), key=lambda r: batch.key_lens[r])
    other = (request + 1) % batch.num_reqs
    seen = visible_keys(case, batch, layer, request, batch.extend_lens[request] - 1)
    if not seen:
        return []
    ends = {"last": seen[-1], "middle": seen[len(seen) // 2], "first": seen[0]}
    pages = {index // case.page_size * case.page_size: name for name, index in ends.items()}
    found: list[_Found] = []
    for start, name in pages.items():
        page = range(start, min(start + case.page_size, batch.key_lens[request]))
        changed = _with_page(data, request, page, other)
        is_other = not torch.equal(changed.values[request][layer], data.values[request][layer])
        if is_other:
            found.append((f"{name} page another's", TRUE, changed, _Page(request, page)))
    return found


def _with_page(data: BatchData, request: int, page: range, other: int) -> BatchData:
    """`data` where one page of `request` holds the keys and values of `other`'s same page; the bait
    where that has none."""

    def swapped(of: tuple[Tensor, ...], bait: Tensor) -> tuple[Tensor, ...]:
        mine = of[request].clone()
        mine[:, page.start : page.stop] = bait.unsqueeze(1)
        if other != request:
            theirs = of[other][:, page.start : page.stop]
            mine[:, page.start : page.start + theirs.shape[1]] = theirs
        return (*of[:request], mine, *of[request + 1 :])

    return replace(
        data,
        keys=swapped(data.keys, data.bait_keys),
        values=swapped(data.values, data.bait_values),
    )


def _end_mistakes(case: Case, batch: Batch, data: BatchData) -> list[_Found]:
    """Reads on behind the end: the step counted twice, or the whole last page."""
    if case.prefix_only:
        return []

    def longer(of: tuple[Tensor, ...], bait: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.cat((each, bait.unsqueeze(1)), 1) for each in of)

    def keys(case: Case, batch: Batch, layer: int, request: int, row: int) -> list[int]:
        seen = visible_keys(case, batch, layer, request, row)
        return [*seen, batch.key_lens[request]]

    behind = replace(
        data,
        keys=longer(data.keys, data.bait_keys),
        values=longer(data.values, data.bait_values),
    )
    return [("key behind the end", Meaning(keys=keys), behind, None)]
