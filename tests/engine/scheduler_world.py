"""A plain-Python world around the scheduler: a fake device, a fake model and their oracle.

The fake device executes Steps by the device rules and holds, per slot, the hash of the token
history whose KV it stands for.  Every key a query can see must carry the history the request
itself would have written: a page given away early, shared unwritten, mixed up or trimmed too far
shows as a wrong hash.  Steps in flight also keep what they touch: nobody else may write there.

A slot of a STATE group holds the hash of all tokens that its state has seen, and their number; one
of an ENCODER group a row of what the request brought, written when it joined and never after.
Where the keys of a request say that media is, its tokens must find their input rows in the overlay.

With drafts, a round of the fake device emits 1 to max_path of the model's tokens, by a hash of its
history, and writes junk to every slot that a round may write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from zlib import crc32

from paceline.cache.page_keys import MediaSpan, PageKeys
from paceline.core.draft_shape import NO_DRAFTS, DraftShape
from paceline.core.model.cache_groups import (
    CHECKPOINT,
    READ,
    WRITE,
    CacheGroupSpec,
)
from paceline.core.model.config import CacheKind, RowPart, kv_parts
from paceline.core.request.sampling_params import SamplingParams
from paceline.core.step import (
    FinishCode,
    GivenDrafts,
    JoinDelta,
    OverlayDelta,
    PageDelta,
    RowDrafts,
    RowLogprobs,
    Step,
    StepOutputs,
)
from paceline.engine.request import Request

VOCAB = 50
MASK = (1 << 61) - 1
OVERLAY = -1  # stands for a cache group where slots of the overlay are touched
JUNK = -1  # what stands in a slot whose token was not accepted


def extend_history(history: int, token: int) -> int:
    """Hash of a token history with one more token."""
    return (history * 1_000_003 + token + 17) * 0x9E3779B97F4A7C15 & MASK


def empty_history(keys: PageKeys) -> int:
    path = f"{keys.salt or ''}{keys.adapter or ''}"
    return 1 + sum(path.encode())


def histories_of(tokens: Sequence[int], keys: PageKeys) -> list[int]:
    """[len(tokens)] hash of tokens[: i + 1], and of the media that the request says are there; in a
    block of tokens up to its end, and of the place in it."""
    history, histories = empty_history(keys), []
    ends = {} if keys.blocks is None else {stop - 1: start for start, stop in keys.blocks.spans}
    for position, token in enumerate(tokens):
        history = extend_history(history, token)
        for span in pictures(keys):
            if span.start <= position < span.stop:
                place = f"{span.media_hash}{position - span.start}"
                history = extend_history(history, crc32(place.encode()))
        histories.append(history)
        if position in ends:
            start = ends[position]
            histories[start:] = [extend_history(history, at) for at in range(start, position + 1)]
            history = histories[-1]
    return histories


def pictures(keys: PageKeys) -> list[MediaSpan]:
    """The media of a request but for its blocks."""
    return [span for span in keys.media if not span.media_hash.startswith("block ")]


def next_token(history: int) -> int:
    """The fake model: a function of the whole history and of nothing else."""
    return (history >> 20) % VOCAB


def run_alone(
    prompt: tuple[int, ...], params: SamplingParams, *, max_len: int, keys: PageKeys
) -> tuple[list[int], FinishCode]:
    """What the fake model says with no engine around it."""
    history = histories_of(prompt, keys)[-1]
    output: list[int] = []
    while True:
        if is_poisoned(params, len(prompt) + len(output)):
            return output, FinishCode.NON_FINITE
        token = next_token(history)
        output.append(token)
        history = extend_history(history, token)
        if token in params.stop_token_ids:
            return output, FinishCode.STOP_TOKEN
        if len(prompt) + len(output) == max_len:
            return output, FinishCode.LENGTH


def is_poisoned(params: SamplingParams, num_known: int) -> bool:
    """Requests whose seed is set have non-finite logits when they know that many tokens."""
    return params.seed == num_known


def output_ids(request: Request) -> tuple[int, ...]:
    """What a request has generated."""
    return tuple(request.token_ids[request.prompt_len :])


def num_accepted(history: int, shape: DraftShape) -> int:
    """Drafts a round accepts behind this history."""
    return (history >> 31) % (shape.num_steps + 1)


def group_specs(windows: tuple[int | None, ...], page_size: int) -> list[CacheGroupSpec]:
    return [
        CacheGroupSpec(
            name="full" if window is None else f"window-{window}",
            layer_ids=(index,),
            window=window,
            page_size=page_size,
            parts=kv_parts(1, 8, 8),
        )
        for index, window in enumerate(windows)
    ]


def state_spec(page_size: int, every: int) -> CacheGroupSpec:
    return CacheGroupSpec(
        name="state",
        layer_ids=(9,),
        window=None,
        page_size=page_size,
        parts=(RowPart("state", (8,), dtype="float32"),),
        kind=CacheKind.STATE,
        state_every=every,
    )


def encoder_spec(page_size: int, encoder_len: int) -> CacheGroupSpec:
    return CacheGroupSpec(
        name="encoder",
        layer_ids=(10,),
        window=None,
        page_size=page_size,
        parts=kv_parts(1, 8, 8),
        kind=CacheKind.ENCODER,
        encoder_len=encoder_len,
    )


def draft_specs(
    windows: tuple[int | None, ...], page_size: int, *, next_token: bool
) -> list[CacheGroupSpec]:
    return [
        replace(spec, name=f"draft-{spec.name}", draft=True, next_token=next_token)
        for spec in group_specs(windows, page_size)
    ]


@dataclass
class Row:
    """One row of the fake request table."""

    serial: int  # a new one at each join
    tokens: list[int]
    histories: list[int]  # [len(tokens)] hash of tokens[: i + 1]
    kv_len: int
    max_len: int
    params: SamplingParams
    frozen: bool = False
    tables: dict[int, dict[int, int]] = field(default_factory=dict)  # group -> index -> page
    media: dict[int, tuple[str, int]] = field(default_factory=dict)  # position -> hash and place
    slots: dict[int, int] = field(default_factory=dict)  # position -> slot of the overlay
    encoded: Sequence[tuple[str, int]] = ()  # rows of its encoder: hash and place

    @property
    def state(self) -> tuple[int, int]:
        """What its state stands for: the hash of the tokens behind it, and their number."""
        return self.histories[self.kv_len - 1], self.kv_len

    def value(self, position: int, spec: CacheGroupSpec) -> int:
        """What the KV of a position stands for; JUNK where a token it depends on is unknown."""
        if position + spec.next_token >= len(self.tokens):
            return JUNK
        history = self.histories[position]
        if not spec.next_token:
            return history
        return extend_history(history, self.tokens[position + 1])


class FakeDevice:
    """Executes steps in order, at once; the harness delivers the outputs late."""

    def __init__(
        self,
        specs: list[CacheGroupSpec],
        num_pages: list[int],
        *,
        shape: DraftShape = NO_DRAFTS,
        exact: bool = True,
    ) -> None:
        """exact: every bound of a prefix is the prefix."""
        kinds = [spec.kind for spec in specs]
        self._specs = {i: spec for i, spec in enumerate(specs) if kinds[i] is CacheKind.TOKENS}
        self._states = {i: spec for i, spec in enumerate(specs) if kinds[i] is CacheKind.STATE}
        encoders = [CacheKind.ENCODER is kind for kind in kinds]
        self._encoders = {i: spec for i, spec in enumerate(specs) if encoders[i]}
        self._encoded: dict[tuple[int, int, int], tuple[str, int]] = {}  # group, page, slot
        self._num_groups = len(specs)
        # Of each STATE group: slot -> what it stands for, its writer and its epoch.
        self._slots: dict[int, dict[int, tuple[tuple[int, int], int, int]]] = {
            group: {} for group in self._states
        }
        self._shape = shape
        self._exact = exact
        self._num_pages = num_pages
        self._rows: dict[int, Row] = {}
        self._kv: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in specs]
        self._page_writer: list[dict[int, tuple[int, int]]] = [{} for _ in specs]
        self._overlay: dict[int, tuple[str, int]] = {}  # slot -> the row there
        self._touched: list[tuple[int, dict[tuple[int, int], set[int]]]] = []
        self._retired = 0
        self._serial = 0

    def retire(self, epoch: int) -> None:
        self._retired = epoch
        self._touched = [entry for entry in self._touched if entry[0] > epoch]

    def execute(self, step: Step, keys: dict[int, PageKeys]) -> StepOutputs:
        """keys: by row, of requests that join in this step."""
        for delta in step.deltas:
            if isinstance(delta, JoinDelta):
                self._join(delta, keys[delta.row])
            elif isinstance(delta, OverlayDelta):
                self._put_rows(delta)
            else:
                self._write_table(delta)
        touched: dict[tuple[int, int], set[int]] = {}
        for delta in step.deltas:
            if isinstance(delta, JoinDelta) and delta.encoder is not None:
                self._encode(self._rows[delta.row])
        self._touched.append((step.epoch, touched))
        live, reads_overlay = [], False
        for row_id, extend, prefix, emits in zip(
            step.layout.rows,
            step.layout.extend_lens,
            step.prefix_lens_bound,
            step.layout.emits,
            strict=True,
        ):
            row = self._rows[row_id]
            if row.frozen:
                live.append(None)
                continue
            self._check_prefix(row, prefix, step)
            if not step.is_round:
                reads_overlay |= self._check_rows(row, extend, touched)
            if step.is_round:
                assert extend == self._shape.num_draft_tokens
                self._store(row, self._shape.reach, step.epoch, touched)
            else:
                assert row.kv_len + extend <= len(row.tokens), "queries beyond the known tokens"
                assert emits == (row.kv_len + extend == len(row.tokens)), "emits is of other tokens"
                self._store(row, extend, step.epoch, touched)
            self._read_states(row, touched)
            self._read_encoded(row, touched)
            live.append(row)
        assert step.has_overlay >= reads_overlay, "a step reads the overlay and does not say so"
        if None not in live:
            assert step.has_overlay == reads_overlay, "a step says it reads the overlay"
        scores = self._score(step, live)
        for row, extend in zip(live, step.layout.extend_lens, strict=True):
            if row is not None:
                self._check_visible(row, 1 if step.is_round else extend, touched)
        before = [0 if row is None else row.kv_len for row in live]
        results = [
            ((), FinishCode.RUNNING) if row is None else self._advance(row, index, step)
            for index, row in enumerate(live)
        ]
        lens = [
            0 if row is None else self._write_states(row, had, step.epoch, touched)
            for row, had in zip(live, before, strict=True)
        ]
        return StepOutputs(
            epoch=step.epoch,
            state_lens=tuple(lens) if self._states else None,
            token_ids=tuple(tokens for tokens, _ in results),
            finish=tuple(code for _, code in results),
            logprobs=None,
            prompt_logprobs=scores,
        )

    def _read_states(self, row: Row, touched: dict[tuple[int, int], set[int]]) -> None:
        for group, slots in self._slots.items():
            read = row.tables[group][READ]
            if not read:
                assert not row.kv_len, "a state of tokens that nobody gave it"
                continue
            stands_for, writer, epoch = slots[read]
            assert stands_for == row.state, f"slot {read} stands for other tokens"
            assert writer == row.serial or epoch <= self._retired, "shared before it retired"
            touched.setdefault((group, read), set()).add(row.serial)

    def _pages_of_rows(self, row: Row) -> list[tuple[tuple[int, int, int], tuple[str, int]]]:
        """Where each row of its encoder is, in every group of such: group, page and slot."""
        return [
            ((group, row.tables[group][place // spec.page_size], place % spec.page_size), content)
            for group, spec in self._encoders.items()
            for place, content in enumerate(row.encoded)
        ]

    def _encode(self, row: Row) -> None:
        for where, content in self._pages_of_rows(row):
            for _, others in self._touched:
                users = others.get(where[:2], set())
                assert users <= {row.serial}, f"page {where[1]} is read by a step in flight"
            self._encoded[where] = content

    def _read_encoded(self, row: Row, touched: dict[tuple[int, int], set[int]]) -> None:
        for where, content in self._pages_of_rows(row):
            assert self._encoded[where] == content, f"page {where[1]} holds another's rows"
            touched.setdefault(where[:2], set()).add(row.serial)

    def _write_states(
        self, row: Row, before: int, epoch: int, touched: dict[tuple[int, int], set[int]]
    ) -> int:
        """The length its checkpoint slots stand for since this step, or 0."""
        landed = 0
        for group, spec in self._states.items():
            table, (_, length) = row.tables[group], row.state
            written = [table[WRITE]]
            if row.kv_len > before and length % spec.state_every == 0 and table.get(CHECKPOINT):
                written.append(table[CHECKPOINT])
                landed = length
            for slot in written:
                for _, others in self._touched:
                    users = others.get((group, slot), set())
                    assert users <= {row.serial}, f"slot {slot} is used by a step in flight"
                touched.setdefault((group, slot), set()).add(row.serial)
                self._slots[group][slot] = (row.state, row.serial, epoch)
        return landed

    def _check_prefix(self, row: Row, bound: int, step: Step) -> None:
        if self._exact:
            assert bound == row.kv_len, f"bound {bound} of a live row, the device has {row.kv_len}"
        assert row.kv_len <= bound <= row.max_len - 2
        if not step.is_round:
            return
        assert self._shape.has_drafts, "a round without drafts"
        assert step.mask is self._shape.mask
        assert row.kv_len + 1 == len(row.tokens), "a round begins with the newest token"

    def _advance(self, row: Row, index: int, step: Step) -> tuple[tuple[int, ...], FinishCode]:
        """Emit what the row at `index` emits; the drafter observes it."""
        extend, given = step.layout.extend_lens[index], {each.index: each for each in step.given}
        before, wanted = row.kv_len, int(step.layout.emits[index])
        tokens, code = [], FinishCode.RUNNING
        if index in given:
            tokens, code = self._verify(row, given[index], step)
            wanted = 0
        elif step.is_round and row.params.speculative:
            wanted = 1 + num_accepted(row.histories[-1], self._shape)
        while len(tokens) < wanted and not row.frozen:
            token, code = self._emit(row)
            tokens += [] if token is None else [token]
        row.kv_len += len(tokens) if step.is_round else extend
        for group, spec in self._specs.items():
            for position in range(before, row.kv_len):
                index, slot = divmod(position, spec.page_size)
                page = row.tables[group][index]
                self._kv[group][page, slot] = (row.value(position, spec), row.serial)
        return tuple(tokens), code

    def _verify(self, row: Row, given: GivenDrafts, step: Step) -> tuple[list[int], FinishCode]:
        """Emit along the drafts that the host gave, each token under the mask of its own place."""
        drafts = RowDrafts(token_ids=given.token_ids, parents=given.parents)
        masks = {mask.row: mask.words for mask in step.masks or ()}
        rows = step.layout.extend_lens[given.index]
        assert len(given.token_ids) < rows, "more drafts than rows"
        at: int | None = -1
        tokens, code = [], FinishCode.RUNNING
        while at is not None and not row.frozen:
            words = masks[given.index * rows + at + 1]
            token, code = self._emit(row)
            if token is None:
                break
            assert words[token // 8] >> token % 8 & 1, f"{token} is said against its mask"
            tokens.append(token)
            at = drafts.child(at, token)
        return tokens, code

    def _score(self, step: Step, live: list[Row | None]) -> dict[int, tuple[RowLogprobs, ...]]:
        """The score of a prompt token is its id."""
        scores = {}
        for span in step.prompt_spans:
            row, before = live[span.index], sum(step.layout.extend_lens[: span.index])
            assert row is not None, "a frozen row has no prompt left"
            assert span.start + span.length <= before + step.layout.extend_lens[span.index]
            first = row.kv_len + span.start - before + 1
            targets = row.tokens[first : first + span.length]
            assert len(targets) == span.length
            scores[span.index] = tuple(
                RowLogprobs(chosen=float(token), top_ids=(), top_values=()) for token in targets
            )
        return scores

    def _join(self, delta: JoinDelta, keys: PageKeys) -> None:
        assert delta.row != 0, "row 0 is reserved"
        assert 0 <= delta.prefix_len < len(delta.token_ids) < delta.max_len
        self._serial += 1
        self._rows[delta.row] = Row(
            serial=self._serial,
            tokens=list(delta.token_ids),
            histories=histories_of(delta.token_ids, keys),
            kv_len=delta.prefix_len,
            max_len=delta.max_len,
            params=delta.params,
            tables={group: {} for group in range(self._num_groups)},
            encoded=() if delta.encoder is None else delta.encoder.data,
            media={
                position: (span.media_hash, position - span.start)
                for span in pictures(keys)
                for position in range(span.start, span.stop)
            },
        )

    def _put_rows(self, delta: OverlayDelta) -> None:
        row, source = self._rows[delta.row], delta.source
        rows = source.rows[delta.start - source.start :]
        for offset, (slot, content) in enumerate(zip(delta.slots, rows, strict=True)):
            assert slot > 0, "slot 0 is nobody's"
            for _, others in self._touched:
                users = others.get((OVERLAY, slot), set())
                assert users <= {row.serial}, f"slot {slot} is read by a step in flight"
            row.slots[delta.start + offset] = slot
            self._overlay[slot] = content

    def _check_rows(self, row: Row, extend: int, touched: dict[tuple[int, int], set[int]]) -> bool:
        """Whether tokens of the step take rows of the overlay; they must be the request's."""
        taken = [p for p in range(row.kv_len, row.kv_len + extend) if p in row.media]
        for position in taken:
            slot = row.slots[position]
            assert self._overlay[slot] == row.media[position], f"token {position} reads another's"
            touched.setdefault((OVERLAY, slot), set()).add(row.serial)
        return bool(taken)

    def _write_table(self, delta: PageDelta) -> None:
        for offset, page in enumerate(delta.page_ids):
            first = 0 if delta.group in self._states else 1
            assert first <= page < self._num_pages[delta.group], f"page {page} does not exist"
            self._rows[delta.row].tables[delta.group][delta.start + offset] = page

    def _store(
        self, row: Row, extend: int, epoch: int, touched: dict[tuple[int, int], set[int]]
    ) -> None:
        """Write `extend` tokens behind the row's length, what is not known of them as junk."""
        for group, spec in self._specs.items():
            for position in range(row.kv_len, row.kv_len + extend):
                index, slot = divmod(position, spec.page_size)
                assert index in row.tables[group], f"no page for position {position}"
                page = row.tables[group][index]
                for _, others in self._touched:
                    users = others.get((group, page), set())
                    assert users <= {row.serial}, f"page {page} is used by a step in flight"
                touched.setdefault((group, page), set()).add(row.serial)
                self._kv[group][page, slot] = (row.value(position, spec), row.serial)
                self._page_writer[group][page] = (row.serial, epoch)

    def _check_visible(
        self, row: Row, extend: int, touched: dict[tuple[int, int], set[int]]
    ) -> None:
        prefix = row.kv_len
        for group, spec in self._specs.items():
            low = 0 if spec.window is None else max(0, prefix - spec.window + 1)
            table, kv = row.tables[group], self._kv[group]
            for position in range(low, prefix + extend):
                page = table.get(position // spec.page_size)
                assert page is not None, f"no page for visible key {position}"
                stored = kv.get((page, position % spec.page_size))
                assert stored is not None, f"key {position} was never written"
                wanted = row.value(position, spec)
                assert stored[0] == wanted, f"key {position} is of other tokens"
                assert wanted != JUNK or position >= prefix, f"key {position} is junk"
            first, last = low // spec.page_size, (prefix + extend - 1) // spec.page_size
            for page in (table[index] for index in range(first, last + 1)):
                writer, epoch = self._page_writer[group][page]
                own = writer == row.serial
                assert own or epoch <= self._retired, "shared before its step retired"
                touched.setdefault((group, page), set()).add(row.serial)

    def _emit(self, row: Row) -> tuple[int | None, FinishCode]:
        if is_poisoned(row.params, len(row.tokens)):
            row.frozen = True
            return None, FinishCode.NON_FINITE
        token = next_token(row.histories[-1])
        row.tokens.append(token)
        row.histories.append(extend_history(row.histories[-1], token))
        code = FinishCode.RUNNING
        if token in row.params.stop_token_ids:
            code = FinishCode.STOP_TOKEN
        elif len(row.tokens) >= row.max_len:
            code = FinishCode.LENGTH
        row.frozen = code is not FinishCode.RUNNING
        return token, code
