"""Replay: the steps of a record on an engine like the one that made them, one after the other.

They go to the runner as they were made, past the scheduler: the same rows, lengths, pages and
masks.  What was in the cache before the first is computed again (restore.py); of a request that
joined in the record that is nothing, or its prefix hit.

Another order of summation may be another token: on another device, by another attention backend,
and where KV was computed again.  So a first difference is told, and it goes on to the failure.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from paceline.core.errors import CapacityError, ConfigError
from paceline.core.options.asked import engine_options, named
from paceline.core.options.engine_options import known
from paceline.core.step import Delta, FinishCode, JoinDelta, PageDelta, Step
from paceline.engine.loop import Launched
from paceline.llm.boot import Booted, Knobs, boot
from paceline.llm.box.record import NON_FINITE, Landed, Record, made_by
from paceline.llm.box.restore import Restorer, RestoreSpace, spare_pages
from paceline.llm.box.table_rows import KnownRows
from paceline.llm.prepare import Prepared, prepare
from paceline.plan.cache_free import asked_of_a_cache
from paceline.plan.machine import release_memory

# What steps were made for: another value is another step.
OF_STEPS = frozenset(
    {
        "chunked_prefill_size",
        "max_model_len",
        "max_num_batched_tokens",
        "max_num_seqs",
        "max_prompt_embeds",
        "page_size",
        "prompt_blocks",
        "speculative_algorithm",
        "speculative_eagle_topk",
        "speculative_num_draft_tokens",
        "speculative_num_steps",
        "state_checkpoint_every",
    }
)
# What an engine chooses by its device, where nobody asks.
_OF_DEVICES = frozenset(
    {
        "attention_backend",
        "cuda_graph_max_bs",
        "cuda_graph_max_tokens",
        "gpu_memory_utilization",
        "kv_cache_bytes",
        "latent_expand_backend",
        "latent_expand_from",
        "threads",
    }
)
# What it says of a cache where the model has none, and what may not be asked then.
_OF_NO_CACHE = frozenset(
    {"attention_backend", "enable_prefix_cache", "kv_cache_dtype", "page_size"}
)
# What it chooses by another option, which may rule out what was chosen before.
_FOLLOWING = {
    "attention_backend": {"latent_expand_backend"},
    "cuda_graph_max_tokens": {"latent_expand_backend", "latent_expand_from"},
    "kv_cache_dtype": {"attention_backend", "latent_expand_backend", "latent_expand_from"},
    "latent_expand_from": {"latent_expand_backend"},
}
_ROUNDING = 1 / 32  # of a magnitude: bfloat16 through all layers stays below
_LOG = logging.getLogger("paceline")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOutcome:
    """What became of a record."""

    num_steps: int  # launched
    num_restored: int  # tokens of the cache that were computed before
    num_compared: int  # sampled tokens
    difference: str | None  # the first
    end: str  # in words
    is_reproduced: bool


def options_of(record: Record, asked: Mapping[str, object]) -> dict[str, object]:
    """What the engine of a record is built from, with other values as far as they are asked.

    What was chosen for another device, or by what is asked now, is chosen anew.  Raises ConfigError
    for a value without which the steps are no steps.
    """
    asked, options = named(asked), dict(record.made.options)
    fixed = sorted(OF_STEPS & asked.keys())
    if fixed:
        raise ConfigError.about(
            fixed[0],
            expected=f"as recorded ({options.get(fixed[0])}), since the steps are made for it",
            got=asked[fixed[0]],
            remedy="leave it out",
        )
    left = set[str]()
    if asked.get("device", options["device"]) != options["device"]:
        left |= _OF_DEVICES
    for name in _FOLLOWING.keys() & asked.keys():
        left |= _FOLLOWING[name]
    if not record.made.num_pages:
        left |= _OF_NO_CACHE
    if options["page_size"] == options.get("state_checkpoint_every"):
        left.add("page_size")  # it follows, and may not be asked where states are alone
    left &= set(record.made.chosen)
    return {name: value for name, value in options.items() if name not in left} | asked


def replay(
    record: Record, asked: Mapping[str, object], *, at_step: Callable[[], None] = lambda: None
) -> ReplayOutcome:
    """Build the engine and run the steps.

    asked: options in place of the recorded ones; at_step: called before each step.
    Raises ConfigError, ModelError where the engine cannot be built, or its cache not be restored.
    """
    prepared = prepare(options_of(record, asked))
    if prepared.groups and not record.made.num_pages:
        _require_no_cache(named(asked))
    for name, (then, now) in _others(record, prepared).items():
        _LOG.info("%s: recorded %s, here %s", name, then, now)
    record, room, num_pages = _placed(record, prepared)
    booted = boot(prepared, knobs=Knobs(num_pages=num_pages))
    try:
        return _Player(record, booted, room, at_step).play()
    finally:
        booted.close()
        release_memory()


def _require_no_cache(asked: Mapping[str, object]) -> None:
    """Of a record without one, whose engine would have one now: what was asked of it makes it, and
    no step has its pages.

    Raises ConfigError.
    """
    names = asked_of_a_cache(engine_options(asked))
    for name in names + ["enable_prefix_cache"] * bool(asked.get("enable_prefix_cache")):
        raise ConfigError.about(
            name,
            expected="left out: the engine of the record had no KV cache, nor have its steps pages",
            got=asked[name],
            remedy="leave it out; another device, dtype or --enforce-eager may be asked",
        )


class _Player:
    """Owns the engine's runner while the steps of a record run."""

    def __init__(
        self, record: Record, booted: Booted, room: RestoreSpace, at_step: Callable[[], None]
    ) -> None:
        self._record = record
        self._runner = booted.engine.runner
        self._overlaps = booted.prepared.options.overlap
        self._restorer = Restorer(room, booted.runner.parts.usual_ends)
        self._at_step = at_step
        self._epoch = 0  # of steps in flight alone: rings go by their order
        self._rows = KnownRows()
        self._pending: list[Delta] = []  # for the next step, whichever it is
        self._num_restored = self._num_compared = self._num_launched = self._num_landed = 0
        self._difference: str | None = None
        self._failed: tuple[int, ...] = ()  # rows of the last step, not finite

    def play(self) -> ReplayOutcome:
        """Everything, as far as it goes."""
        self._begin()
        try:
            self._run()
        except Exception as error:  # noqa: BLE001  a step may raise anything
            return self._outcome(*self._judge(error))
        return self._outcome(*self._judge(None))

    def _begin(self) -> None:
        """Every row as it was before the first step."""
        for row in self._record.ended:
            self._launch(self._restorer.freeze(row)).wait()
        for deltas in self._record.start:
            self._rows.change(deltas)
            entered = self._rows[_row_of(deltas)]
            self._restore(self._restorer.prefix_of(entered, has_run=True))
            self._pending += deltas

    def _run(self) -> None:
        in_flight: Launched | None = None
        steps = self._record.steps
        for step in steps:
            self._at_step()
            self._rows.change(step.deltas)
            joins = [delta for delta in step.deltas if isinstance(delta, JoinDelta)]
            for join in joins:
                missing = [*self._restorer.prefix_of(self._rows[join.row], has_run=False)]
                if missing and in_flight is not None:  # whose outputs' place is wanted
                    self._compare(in_flight)
                    in_flight = None
                self._restore(missing)
            self._restorer.given(step.deltas)
            self._num_launched += 1
            _LOG.debug("step %d of %d: %s", self._num_launched, len(steps), step.kind)
            launched = self._launch(step)
            if not self._overlaps:
                launched.synchronize()
            if in_flight is not None:
                self._compare(in_flight)
            in_flight = launched
        if in_flight is not None:
            self._compare(in_flight)

    def _restore(self, steps: Iterable[Step]) -> None:
        for step in steps:
            self._launch(step).wait()
            self._num_restored += step.layout.num_tokens

    def _launch(self, step: Step) -> Launched:
        deltas, self._pending = (*self._pending, *step.deltas), []
        self._epoch += 1
        return self._runner.launch(replace(step, epoch=self._epoch, deltas=deltas))

    def _compare(self, launched: Launched) -> None:
        found, number = Landed.of(launched.wait()), self._num_landed
        self._num_landed += 1
        self._failed = found.failed
        if number >= len(self._record.landed):
            return
        recorded, step = self._record.landed[number], self._record.steps[number]
        rows = zip(
            zip(recorded.token_ids, recorded.finish, strict=True),
            zip(found.token_ids, found.finish, strict=True),
            strict=True,
        )
        for index, (then, now) in enumerate(rows):
            self._num_compared += len(then[0])
            if then != now:
                self._differ(step, index, f"recorded {_shown(*then)}, here {_shown(*now)}")
        # A file of an earlier version has none.
        for index, (was, made) in enumerate(zip(recorded.made, found.made, strict=False)):
            if not _is_close(was, made):
                told = f"recorded numbers of magnitude {was}, here {made}"
                self._differ(step, index, told.replace("None", "nan"))

    def _differ(self, step: Step, index: int, text: str) -> None:
        """Of a row; the first is told."""
        if self._difference is None:
            name = self._record.name_of(step.layout.rows[index], step.epoch)
            self._difference = f"step {self._num_landed}, row {index} ({name}): {text}"

    def _judge(self, error: Exception | None) -> tuple[str, bool]:
        """(how it ended, whether that is what was recorded)."""
        failure, num_steps = self._record.failure, len(self._record.steps)
        if error is not None:
            how = f"{type(error).__name__} in step {self._num_launched} of {num_steps}: {error}"
            is_same = type(error).__name__ == failure.kind and self._num_launched == num_steps
            return how, is_same
        if failure.kind == NON_FINITE and self._failed:
            rows = ", ".join(map(str, self._failed))
            how = f"logits, vector or scores of row {rows} of step {num_steps} are not finite"
            return how, set(failure.rows) <= set(self._failed)
        hosts = "; it was raised by the scheduler, which a replay does without"
        return f"all {num_steps} steps ended{hosts if failure.is_hosts else ''}", False

    def _outcome(self, end: str, is_reproduced: bool) -> ReplayOutcome:
        return ReplayOutcome(
            num_steps=self._num_launched,
            num_restored=self._num_restored,
            num_compared=self._num_compared,
            difference=self._difference,
            end=end,
            is_reproduced=is_reproduced,
        )


def _row_of(deltas: tuple[Delta, ...]) -> int:
    join = deltas[0]
    assert isinstance(join, JoinDelta), "a row begins with its request"
    return join.row


def _is_close(was: float | None, made: float | None) -> bool:
    """As numbers are that were rounded otherwise."""
    if was is None or made is None:
        return was is made
    return math.isclose(was, made, rel_tol=_ROUNDING)


def _shown(token_ids: tuple[int, ...], code: FinishCode) -> str:
    said = " ".join(map(str, token_ids)) or "no token"
    return said if code is FinishCode.RUNNING else f"{said} ({code.name.lower()})"


def _others(record: Record, prepared: Prepared) -> dict[str, tuple[object, object]]:
    """What is not as it was: name -> (then, now)."""
    then, now = record.made, made_by(prepared, record.made.num_pages)
    pairs: dict[str, tuple[object, object]] = {"device": (then.device, now.device)}
    pairs["the model's configuration, its hash"] = (then.config_sha256, now.config_sha256)
    names = then.versions.keys() | now.versions.keys()
    pairs |= {name: (then.versions.get(name), now.versions.get(name)) for name in sorted(names)}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _placed(record: Record, prepared: Prepared) -> tuple[Record, RestoreSpace, tuple[int, ...]]:
    """The record in pages that this machine has; where a Restorer computes; pages of each pool.

    Pages keep their numbers where there are as many as there were.
    """
    options, groups = prepared.options, prepared.groups
    if len(groups) != len(record.made.num_pages):
        raise ConfigError.about(
            "cache groups of the model and its drafter",
            expected=f"{len(record.made.num_pages)}, as recorded",
            got=len(groups),
            remedy="give the model and drafter of the record",
        )
    chunk = min(known(options.chunked_prefill_size), known(options.max_num_batched_tokens))
    num_pages, names = list(record.made.num_pages), list[dict[int, int]]()
    for index, budget in enumerate(prepared.fit.groups):
        used = sorted({page for page in _pages(record, index) if page})
        used_now: Sequence[int] = used
        if budget.num_pages < num_pages[index]:
            num_pages[index] = len(used) + 1
            used_now = range(1, len(used) + 1)
        if num_pages[index] > budget.num_pages:
            raise CapacityError.about(
                f"pages of cache group '{groups[index].name}'",
                expected=f"at least {num_pages[index]}, which the record names",
                got=budget.num_pages,
                remedy="give the KV cache more memory",
            )
        names.append({0: 0, **dict(zip(used, used_now, strict=True))})
    spare = spare_pages(groups, chunk)
    room = RestoreSpace(
        groups=groups,
        chunk=chunk,
        spare=tuple(range(own, own + more) for own, more in zip(num_pages, spare, strict=True)),
    )
    sizes = tuple(own + more for own, more in zip(num_pages, spare, strict=True))
    return _renamed(record, names), room, sizes


def _pages(record: Record, group: int) -> Iterator[int]:
    deltas = [delta for deltas in record.start for delta in deltas]
    deltas += [delta for step in record.steps for delta in step.deltas]
    for delta in deltas:
        if isinstance(delta, PageDelta) and delta.group == group:
            yield from delta.page_ids


def _renamed(record: Record, names: list[dict[int, int]]) -> Record:
    def pages(deltas: tuple[Delta, ...]) -> tuple[Delta, ...]:
        return tuple(
            replace(delta, page_ids=tuple(names[delta.group][page] for page in delta.page_ids))
            if isinstance(delta, PageDelta)
            else delta
            for delta in deltas
        )

    return replace(
        record,
        start=tuple(map(pages, record.start)),
        steps=tuple(replace(step, deltas=pages(step.deltas)) for step in record.steps),
    )
