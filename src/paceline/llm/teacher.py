"""Teacher: the target of an idle engine run over given tokens, in the form one would like to know.

Text that two engines gave cannot be compared behind the first difference; what they compute from
the same tokens can, layer by layer.  A form says how the tokens behind `start` are computed:

    plain     all in one step, as a prompt is
    decode    one step each
    verify    the rows of one round of speculation: a chain, or a tree whose other branches are
              wrong drafts

Steps run eagerly, on pages that the cache lends and takes back; nothing is sampled or committed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from paceline.cache.groups import PageRun
from paceline.cache.manager import CacheManager
from paceline.core.draft_shape import DraftShape
from paceline.core.errors import CapacityError, PacelineError
from paceline.core.modes import MaskKind
from paceline.core.request.sampling_params import SamplerTier, SamplingParams
from paceline.core.step import Delta, JoinDelta, PageDelta, Step, StepLayout
from paceline.engine.engine import Engine
from paceline.runner.derive import derive
from paceline.runner.extents import PaddedSize
from paceline.runner.program import Parts, target_forward
from paceline.runner.staging import StagingSlot

_NAME = "teacher"  # in the cache's books; requests of users are named otherwise
_ROW = 1  # of the request table; rows of an idle engine are free
_PARAMS = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=0)
_STAGED = 1 << 16  # bytes of a step beside its tokens and page ids


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherForm:
    """How tokens are computed.  Those before `start` are a prompt, in every form."""

    start: int
    shape: DraftShape | None = None  # of the round that verifies the rest; None: one after another

    @classmethod
    def plain(cls, num_tokens: int) -> "TeacherForm":
        return cls(start=num_tokens)

    @classmethod
    def decode(cls, start: int) -> "TeacherForm":
        return cls(start=start)

    @classmethod
    def verify(cls, start: int, shape: DraftShape) -> "TeacherForm":
        """At most shape.max_path tokens may follow `start`."""
        return cls(start=start, shape=shape)


class TeacherOutput(NamedTuple):
    """What the target made of some tokens."""

    logits: Tensor  # [vocab]  float32, on the host: behind the last token
    layers: tuple[Tensor, ...]  # [num_layers] of [num_tokens, hidden]  float32, on the host: the
    # stream behind each layer; empty unless asked for


class _Pass(NamedTuple):
    """One step: rows behind a prefix, of which some are tokens that were asked about."""

    prefix_len: int
    rows: tuple[int, ...]  # [extend_len] token ids
    is_ragged: bool
    parents: tuple[int, ...] | None  # [extend_len] of a tree
    kept: tuple[int, ...]  # rows in the order of the tokens


def idle_teacher(engine: Engine, parts: Parts, *, max_step_tokens: int) -> "Teacher":
    """Of an engine with nothing to do.  Raises PacelineError when it is busy."""
    scheduler = engine.scheduler
    is_busy = scheduler.num_running or scheduler.num_waiting
    while engine.has_work and not is_busy:  # what is in flight has ended already
        engine.step()
    if is_busy:
        raise PacelineError.about(
            "engine",
            expected="idle",
            got="busy with requests",
            remedy="finish or abort them first",
        )
    return Teacher(parts, scheduler.cache, max_step_tokens=max_step_tokens)


class Teacher:
    """Reads with one engine, which must be idle.  Its KV cache keeps what it held."""

    def __init__(self, parts: Parts, cache: CacheManager, *, max_step_tokens: int) -> None:
        taps = tuple(f"layer.{index}" for index in range(len(parts.layers)))
        self._plain = replace(parts, taps=())
        self._tapped = replace(parts, taps=taps)
        self._cache = cache
        self._max_step_tokens = max_step_tokens

    def read(
        self, tokens: Sequence[int], form: TeacherForm, *, layers: bool = False
    ) -> TeacherOutput:
        """Compute `tokens`, at least one.  Raises CapacityError when the pages are too few."""
        passes = list(_passes(tokens, form, self._max_step_tokens))
        longest = max(each.prefix_len + len(each.rows) for each in passes)
        runs = self._borrow(tokens, longest)
        try:
            with torch.inference_mode():
                return self._read(tokens, passes, runs, layers=layers)
        finally:
            self._cache.release(_NAME, tokens, 0, epoch=0)
            self._cache.retire(0)

    def _read(
        self, tokens: Sequence[int], passes: list[_Pass], runs: list[PageRun], *, layers: bool
    ) -> TeacherOutput:
        parts = self._tapped if layers else self._plain
        seen: list[list[Tensor]] = [[] for _ in parts.taps]
        logits = torch.empty(0)
        for each in passes:
            _synchronize(parts)
            step = _step(tokens, each, runs)
            hidden, taps = _run(parts, step)
            rows = torch.tensor(each.kept, device=hidden.device)
            logits = parts.model.logits(hidden.index_select(0, rows[-1:]))[0].float().cpu()
            for found, tap in zip(seen, taps, strict=True):
                found.append(tap.index_select(0, rows).float().cpu())
            _synchronize(parts)
        return TeacherOutput(logits, tuple(torch.cat(found) for found in seen))

    def _borrow(self, tokens: Sequence[int], kv_len: int) -> list[PageRun]:
        """Pages of every cache group, none of them shared."""
        cache = self._cache
        admission = cache.admit(_NAME, tokens, reserve_to=kv_len, max_hit=0)
        more = None if admission is None else cache.reserve(_NAME, kv_len, ahead=0)
        if admission is not None and more is not None:
            return [*admission.page_runs, *more]
        if admission is not None:
            cache.release(_NAME, tokens, 0, epoch=0)
        raise CapacityError.about(
            "pages to compare what engines compute",
            expected=f"enough for {kv_len} tokens in each cache group",
            got="fewer",
            remedy="shorten the prompts, lower --max-tokens, or give the KV cache more memory",
        )


def _passes(tokens: Sequence[int], form: TeacherForm, max_step_tokens: int) -> Iterator[_Pass]:
    for at in range(0, form.start, max_step_tokens):
        rows = tuple(tokens[at : min(at + max_step_tokens, form.start)])
        yield _Pass(at, rows, True, None, tuple(range(len(rows))))
    rest = tuple(tokens[form.start :])
    if form.shape is not None:
        assert len(rest) <= form.shape.max_path, f"{len(rest)} tokens of {form.shape}"
        rows, parents, kept = round_rows(rest, form.shape)
        yield _Pass(form.start, rows, False, parents, kept)
        return
    for offset, token in enumerate(rest):
        yield _Pass(form.start + offset, (token,), False, None, (0,))


def round_rows(
    path: tuple[int, ...], shape: DraftShape
) -> tuple[tuple[int, ...], tuple[int, ...] | None, tuple[int, ...]]:
    """(token ids, parents, rows of the path) of a round that drafted `path` and wrong siblings.

    path: 1 to max_path tokens, the root first.  What is left over hangs on its end; parents: None
    for a chain.
    """
    rows, parents, kept = [path[0]], [-1], [0]
    spare = shape.num_draft_tokens - len(path)
    for token in path[1:]:
        if spare and not shape.is_chain:
            rows.append(path[0])
            parents.append(kept[-1])
            spare -= 1
        rows.append(token)
        parents.append(kept[-1])
        kept.append(len(rows) - 1)
    for _ in range(spare):
        parents.append(len(rows) - 1 if shape.is_chain else kept[-1])
        rows.append(path[-1])
    return tuple(rows), None if shape.is_chain else tuple(parents), tuple(kept)


def _step(tokens: Sequence[int], each: _Pass, runs: Sequence[PageRun]) -> Step:
    """The step of a pass; everything before it joins with it."""
    known = (*tokens[: each.prefix_len], *each.rows)
    join = JoinDelta(
        row=_ROW,
        token_ids=known,
        prompt_len=len(known),
        prefix_len=each.prefix_len,
        max_len=len(known) + 1,
        params=_PARAMS,
    )
    pages = (
        PageDelta(row=_ROW, group=run.group, start=run.start, page_ids=run.page_ids) for run in runs
    )
    deltas: tuple[Delta, ...] = (join, *pages)
    return Step(
        epoch=0,
        layout=StepLayout(
            rows=(_ROW,),
            extend_lens=(len(each.rows),),
            emits=(False,),
            parents=None if each.parents is None else (each.parents,),
        ),
        is_ragged=each.is_ragged,
        mask=MaskKind.CAUSAL if each.parents is None else MaskKind.TREE,
        prefix_lens_bound=(each.prefix_len,),
        sampler=SamplerTier.GREEDY,
        logprobs=False,
        deltas=deltas,
    )


def _run(parts: Parts, step: Step) -> tuple[Tensor, list[Tensor]]:
    """([rows, hidden] behind the final norm, [num_taps] of the same shape)."""
    size, backend = PaddedSize.exact(step.layout), parts.backend
    slot = StagingSlot(_staged_bytes(step), pinned=False)
    copies = parts.table.stage(step.deltas, slot) + parts.buffers.fill(step.layout, size, slot)
    for destination, source in copies:
        destination.copy_(source)
    if backend.capabilities.host_plan:
        backend.host_plan(step, parts.backend_buffers)
    view = parts.buffers.view(size, step.mask)
    derive(parts.buffers, parts.table, view, parts.page_sizes)
    output = target_forward(parts, view, taps=parts.taps)
    return output.hidden, [output.taps[name] for name in parts.taps]


def _staged_bytes(step: Step) -> int:
    pieces = [
        delta.token_ids if isinstance(delta, JoinDelta) else delta.page_ids
        for delta in step.deltas
        if isinstance(delta, JoinDelta | PageDelta)
    ]
    return _STAGED + sum(4 * len(piece) for piece in pieces)


def _synchronize(parts: Parts) -> None:
    """Steps of the engine have a stream of their own."""
    if parts.table.token_ids.is_cuda:
        torch.cuda.synchronize(parts.table.token_ids.device)
