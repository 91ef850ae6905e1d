"""A plain-Python world around the scheduler: a fake device, a fake model and their oracle.

The fake device executes Steps by the device rules and holds, per slot, the hash of the token
history whose KV it stands for.  Every key a query can see must carry the history the request
itself would have written: a page given away early, shared unwritten, mixed up or trimmed too far
shows as a wrong hash.  Steps in flight also keep what they touch: nobody else may write there.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from paceline.core.model_config import CacheGroupSpec
from paceline.core.sampling_params import SamplingParams
from paceline.core.step import FinishCode, JoinDelta, PageDelta, RowLogprobs, Step, StepOutputs

VOCAB = 50
MASK = (1 << 61) - 1


def extend_history(history: int, token: int) -> int:
    """Hash of a token history with one more token."""
    return (history * 1_000_003 + token + 17) * 0x9E3779B97F4A7C15 & MASK


def empty_history(salt: Hashable) -> int:
    return 1 if salt is None else 1 + sum(str(salt).encode())


def next_token(history: int) -> int:
    """The fake model: a function of the whole history and of nothing else."""
    return (history >> 20) % VOCAB


def run_alone(
    prompt: tuple[int, ...], params: SamplingParams, *, max_len: int, salt: Hashable
) -> tuple[list[int], FinishCode]:
    """What the fake model says with no engine around it."""
    history = empty_history(salt)
    for token in prompt:
        history = extend_history(history, token)
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


def group_specs(windows: tuple[int | None, ...], page_size: int) -> list[CacheGroupSpec]:
    return [
        CacheGroupSpec(
            name="full" if window is None else f"window-{window}",
            layer_ids=(index,),
            window=window,
            page_size=page_size,
            num_kv_heads=1,
            head_dim=8,
            v_head_dim=8,
        )
        for index, window in enumerate(windows)
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


class FakeDevice:
    """Executes steps in order, at once; the harness delivers the outputs late."""

    def __init__(self, specs: list[CacheGroupSpec], num_pages: list[int]) -> None:
        self._specs = specs
        self._num_pages = num_pages
        self._rows: dict[int, Row] = {}
        self._kv: list[dict[tuple[int, int], tuple[int, int]]] = [{} for _ in specs]
        self._page_writer: list[dict[int, tuple[int, int]]] = [{} for _ in specs]
        self._touched: list[tuple[int, dict[tuple[int, int], set[int]]]] = []
        self._retired = 0
        self._serial = 0

    def retire(self, epoch: int) -> None:
        self._retired = epoch
        self._touched = [entry for entry in self._touched if entry[0] > epoch]

    def execute(self, step: Step, salts: dict[int, Hashable]) -> StepOutputs:
        """salts: row -> salt, for rows that join in this step."""
        for delta in step.deltas:
            if isinstance(delta, JoinDelta):
                self._join(delta, salts[delta.row])
            else:
                self._write_table(delta)
        touched: dict[tuple[int, int], set[int]] = {}
        self._touched.append((step.epoch, touched))
        live = []
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
            assert prefix == row.kv_len, (
                f"bound {prefix} of a live row, the device has {row.kv_len}"
            )
            assert extend >= 1
            assert prefix + extend <= len(row.tokens), "queries beyond the known tokens"
            assert emits == (prefix + extend == len(row.tokens)), "emits disagrees with the tokens"
            self._store(row, prefix, extend, step.epoch, touched)
            live.append(row)
        scores = self._score(step, live)
        for row, extend in zip(live, step.layout.extend_lens, strict=True):
            if row is not None:
                self._check_visible(row, row.kv_len, extend, touched)
                row.kv_len += extend
        results = [self._emit(r, e) for r, e in zip(live, step.layout.emits, strict=True)]
        return StepOutputs(
            epoch=step.epoch,
            token_ids=tuple(() if token is None else (token,) for token, _ in results),
            finish=tuple(code for _, code in results),
            logprobs=None,
            prompt_logprobs=scores,
        )

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

    def _join(self, delta: JoinDelta, salt: Hashable) -> None:
        assert delta.row != 0, "row 0 is reserved"
        assert 0 <= delta.prefix_len < len(delta.token_ids) < delta.max_len
        self._serial += 1
        history, histories = empty_history(salt), []
        for token in delta.token_ids:
            history = extend_history(history, token)
            histories.append(history)
        self._rows[delta.row] = Row(
            serial=self._serial,
            tokens=list(delta.token_ids),
            histories=histories,
            kv_len=delta.prefix_len,
            max_len=delta.max_len,
            params=delta.params,
            tables={group: {} for group in range(len(self._specs))},
        )

    def _write_table(self, delta: PageDelta) -> None:
        for offset, page in enumerate(delta.page_ids):
            assert 0 < page < self._num_pages[delta.group], f"page {page} does not exist"
            self._rows[delta.row].tables[delta.group][delta.start + offset] = page

    def _store(
        self,
        row: Row,
        prefix: int,
        extend: int,
        epoch: int,
        touched: dict[tuple[int, int], set[int]],
    ) -> None:
        for group, spec in enumerate(self._specs):
            for position in range(prefix, prefix + extend):
                index, slot = divmod(position, spec.page_size)
                assert index in row.tables[group], f"no page for position {position}"
                page = row.tables[group][index]
                for _, others in self._touched:
                    users = others.get((group, page), set())
                    assert users <= {row.serial}, f"page {page} is used by a step in flight"
                touched.setdefault((group, page), set()).add(row.serial)
                self._kv[group][page, slot] = (row.histories[position], row.serial)
                self._page_writer[group][page] = (row.serial, epoch)

    def _check_visible(
        self, row: Row, prefix: int, extend: int, touched: dict[tuple[int, int], set[int]]
    ) -> None:
        for group, spec in enumerate(self._specs):
            low = 0 if spec.window is None else max(0, prefix - spec.window + 1)
            for position in range(low, prefix + extend):
                index, slot = divmod(position, spec.page_size)
                page = row.tables[group].get(index)
                assert page is not None, f"no page for visible key {position}"
                stored = self._kv[group].get((page, slot))
                assert stored is not None, f"key {position} was never written"
                assert stored[0] == row.histories[position], f"key {position} is of other tokens"
                writer, epoch = self._page_writer[group][page]
                own = writer == row.serial
                assert own or epoch <= self._retired, "shared before its step retired"
                touched.setdefault((group, page), set()).add(row.serial)

    def _emit(self, row: Row | None, emits: bool) -> tuple[int | None, FinishCode]:
        if row is None or not emits:
            return None, FinishCode.RUNNING
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
