"""The kernels of layers that keep states, interpreted, against their definitions."""

from typing import Any

import pytest
import torch
from torch import Tensor

from paceline.core.errors import KernelArgumentError
from paceline.kernels.commit_states import commit_states, commit_states_reference
from paceline.kernels.conv_rows import next_windows_reference, places_of
from paceline.kernels.decay_rates import ENDLESS, RawRates
from paceline.kernels.extend_states import (
    Chunks,
    StateRows,
    extend_states_reference,
)
from paceline.kernels.gated_norm import Gate, gated_rows_reference
from paceline.kernels.state_chunks import state_chunks
from paceline.kernels.state_inputs import (
    ConvInputs,
    HeadChannels,
    HeadRows,
    head_rows,
    state_inputs,
    state_inputs_reference,
)
from paceline.kernels.state_rows import Kept, Rates, state_rows
from paceline.kernels.state_step import StepInputs, state_step

KEY_HEADS, HEADS, KEY_DIM, VALUE_DIM, WINDOW, SLOTS = 1, 2, 5, 6, 2, 4
CHANNELS = 2 * KEY_HEADS * KEY_DIM + HEADS * VALUE_DIM
TREE = [-1, 0, 0, 1]
# The first request starts from zeros, whatever slot 0 holds; the second writes where it reads.
SLOT_LIST = torch.tensor([[0, 3, 0], [2, 2, 0]], dtype=torch.int32)
BOTH = pytest.mark.parametrize("delta", [True, False], ids=["delta rule", "sums"])


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def parts() -> tuple[Tensor, Tensor]:
    """(states, windows) of all slots; slot 0 holds NaN."""
    state, window = noise(SLOTS, HEADS, KEY_DIM, VALUE_DIM), noise(SLOTS, CHANNELS, WINDOW)
    for part in (state, window):
        part[0] = torch.nan
    return state, window


def before(part: Tensor) -> Tensor:
    """[2, *shape] what the requests read."""
    return torch.stack((torch.zeros_like(part[0]), part[2]))


def conv_inputs(rows: int, window: Tensor) -> ConvInputs:
    """Nothing but rows and window is read behind the convolution."""
    nothing = torch.zeros(rows, WINDOW, dtype=torch.int64)
    weight = torch.zeros(CHANNELS, WINDOW + 1)
    return ConvInputs(noise(rows, 1, CHANNELS), weight, None, window, SLOT_LIST, nothing)


def some_rows(num: int, *, delta: bool) -> tuple[HeadRows, Rates, StateRows]:
    k = torch.nn.functional.normalize(noise(num, KEY_HEADS, KEY_DIM), dim=2)
    heads = HeadRows(noise(num, KEY_HEADS, KEY_DIM, seed=1), k, noise(num, HEADS, VALUE_DIM))
    decay, rate = -noise(num, HEADS).abs(), noise(num, HEADS, seed=2).sigmoid()
    skip = None if delta else noise(HEADS)
    v = heads.v if delta else heads.v * rate.unsqueeze(2)
    told = StateRows(heads.q, heads.k, v, decay, rate if delta else None)
    return heads, Rates(decay, rate, skip, delta), told


def raw_rates(given: Tensor, *, has_beta: bool) -> RawRates:
    return RawRates(given, noise(2), noise(2), ENDLESS, has_beta)


def with_skip(out: Tensor, heads: HeadRows, rates: Rates) -> Tensor:
    return out if rates.skip is None else out + heads.v * rates.skip[:, None]


def masked(parents: list[int]) -> Tensor:
    sees = torch.eye(len(parents), dtype=torch.bool)
    for row, parent in enumerate(parents):
        if parent >= 0:
            sees[row] |= sees[parent]
    return sees


def near(found: Tensor, wanted: Tensor) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("channels", "eps"),
    [(HeadChannels(0, 2, 4, 10, 10), 1e-6), (HeadChannels(16, 12, 0, 2, 6), None)],
    ids=["key head by key head", "all of a kind"],
)
def test_inputs_are_convolved_and_laid_out_as_heads(
    channels: HeadChannels, eps: float | None
) -> None:
    rows, key, value = 3, (2, 2), (4, 3)
    window = noise(SLOTS, 20, WINDOW).bfloat16()
    window[0] = torch.nan
    parts = 2 if eps else 1
    given = ConvInputs(
        noise(rows, parts, 24).bfloat16()[:, :, : 20 // parts],
        noise(20, WINDOW + 1).bfloat16(),
        None if eps else noise(20).bfloat16(),
        window,
        SLOT_LIST,
        torch.tensor([[3, 4], [4, 0], [5, 6]]),
    )
    found, wanted = (head_rows(given.rows, rows, key, value, torch.float32) for _ in range(2))
    kept = torch.full((rows, 20), torch.nan, dtype=torch.bfloat16)
    state_inputs(given, channels, eps=eps, scale=0.5, out=found, kept=kept)
    state_inputs_reference(given, channels, eps=eps, scale=0.5, out=wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-2, atol=1e-3)  # SiLU before it is rounded
    assert torch.equal(kept, given.rows.flatten(1))


def test_inputs_of_prompts_are_convolved_along_runs() -> None:
    """More rows than are taken one by one: a long prompt, and one in whose middle runs begin."""
    lens = torch.tensor([130, 71])
    rows, window = int(lens.sum()), noise(SLOTS, 12, WINDOW)
    reqs = torch.arange(2).repeat_interleave(lens)
    number = torch.arange(rows)
    back = torch.arange(WINDOW, 0, -1)
    offsets = (number - torch.tensor([0, 130])[reqs]).unsqueeze(1) - back
    found_at = number.unsqueeze(1) - back
    places = places_of(found_at, offsets, reqs.unsqueeze(1), num_rows=rows, window=WINDOW)
    weight = noise(12, WINDOW + 1)
    given = ConvInputs(noise(rows, 1, 12), weight, None, window, SLOT_LIST, places)
    found, wanted = (head_rows(given.rows, rows, (1, 3), (2, 3), torch.float32) for _ in range(2))
    kept = torch.full((rows, 12), torch.nan)
    channels = HeadChannels(0, 3, 6, 12, 12)
    state_inputs(given, channels, eps=1e-6, scale=0.5, out=found, kept=kept)
    state_inputs_reference(given, channels, eps=1e-6, scale=0.5, out=wanted)
    for mine, theirs in zip(found, wanted, strict=True):
        near(mine, theirs)
    assert torch.equal(kept, given.rows.flatten(1))


@pytest.mark.parametrize("is_raw", [False, True], ids=["made", "raw"])
@BOTH
def test_a_step_of_one_row_each_convolves_and_writes_state_and_window(
    delta: bool, is_raw: bool
) -> None:
    """As state_inputs and then the definition of rows, of three tiles of columns."""
    key_heads, heads, key_dim, value_dim = 2, 4, 5, 20
    channels = 2 * key_heads * key_dim + heads * value_dim
    state, window = noise(SLOTS, heads, key_dim, value_dim), noise(SLOTS, channels, WINDOW)
    for part in (state, window):
        part[0] = torch.nan
    per_head = channels // key_heads
    laid = HeadChannels(0, key_dim, 2 * key_dim, per_head, per_head)
    eps = 1e-6
    if not delta:
        values = heads * value_dim
        laid, eps = HeadChannels(values + 10, values, 0, key_dim, 2 * value_dim), None
    given = ConvInputs(
        noise(2, 2, channels)[:, :, : channels // 2] if delta else noise(2, 1, channels),
        noise(channels, WINDOW + 1),
        None if delta else noise(channels),
        window,
        SLOT_LIST,
        torch.tensor([[2, 3], [4, 5]]),
    )
    numbers = (2 if delta else 1) * heads // key_heads
    raw = RawRates(
        noise(3, key_heads, numbers + 1)[::2, :, :numbers],
        noise(heads, seed=3),
        noise(heads, seed=4) / 3,
        ENDLESS if delta else (0.5, 1.0),
        has_beta=delta,
    )
    decay, rate = raw.made()
    rates = Rates(decay, rate, None if delta else noise(heads), delta)
    rows = head_rows(given.rows, 2, (key_heads, key_dim), (heads, value_dim), torch.float32)
    state_inputs_reference(given, laid, eps=eps, scale=0.5, out=rows)
    v = rows.v if delta else rows.v * rate.unsqueeze(2)
    told = StateRows(rows.q, rows.k, v, decay, rate if delta else None)
    held = torch.stack((torch.zeros_like(state[0]), state[2]))
    wanted = extend_states_reference(told, held, torch.ones(1, 1, 1, dtype=torch.bool), None)
    behind = torch.stack((torch.zeros_like(window[0]), window[2]))[:, :, 1:]
    untouched = state[1].clone()
    arrived, out = torch.zeros(3, key_heads, dtype=torch.int32), torch.full(rows.v.shape, torch.nan)
    step = StepInputs(*given[:5])
    state_step(
        step,
        laid,
        raw if is_raw else (decay, rate),
        state,
        skip=rates.skip,
        is_delta=delta,
        eps=eps,
        scale=0.5,
        arrived=arrived,
        out=out,
    )
    near(out, with_skip(wanted.out, rows, rates))
    near(state[[3, 2]], wanted.states)
    new = given.rows.flatten(1).unsqueeze(2)
    assert torch.equal(window[[3, 2]], torch.cat((behind, new), 2))
    assert torch.equal(state[1], untouched)
    assert not arrived.any()


def test_a_step_with_a_gate_is_rows_behind_it_and_sums_of_their_squares() -> None:
    """Of two heads of two tiles of columns, the second of which is not whole."""
    key_dim, value_dim = 5, 40
    size, channels = HEADS * value_dim, HEADS * value_dim + 2 * key_dim
    args = {"skip": noise(HEADS), "is_delta": False, "eps": None, "scale": 0.5}
    weight, bias, rows = noise(channels, WINDOW + 1), noise(channels), noise(2, 1, channels)
    rates = (-noise(2, HEADS).abs(), noise(2, HEADS).sigmoid())
    gate = Gate(noise(2, size + 3)[:, :size], 1.0 + noise(size) / 4)
    laid = HeadChannels(size + key_dim, size, 0, key_dim, size)

    def stepped(gate: Gate | None) -> tuple[Tensor, Tensor | None, Tensor]:
        state, window = noise(SLOTS, HEADS, key_dim, value_dim), noise(SLOTS, channels, WINDOW)
        arrived, out = torch.zeros(2, 1, dtype=torch.int32), torch.full((2, size), torch.nan)
        squares = state_step(
            StepInputs(rows, weight, bias, window, SLOT_LIST),
            laid,
            rates,
            state,
            **args,
            arrived=arrived,
            out=out.view(2, HEADS, value_dim),
            gate=gate,
        )
        return out, squares, state

    plain, nothing, state = stepped(None)
    assert nothing is None
    wanted = gated_rows_reference(plain, gate)
    found, squares, behind = stepped(gate)
    assert squares is not None
    assert squares.shape == (2, HEADS * 2)
    near(found, wanted.rows)
    near(squares.sum(1, keepdim=True), wanted.squares)
    assert torch.equal(behind, state)


@BOTH
def test_a_row_of_each_request_reads_and_writes_its_state(delta: bool) -> None:
    state, window = parts()
    heads, rates, told = some_rows(2, delta=delta)
    given, sees = conv_inputs(2, window), torch.ones(1, 1, 1, dtype=torch.bool)
    wanted = extend_states_reference(told, before(state), sees, None)
    windows = next_windows_reference(
        given.rows.flatten(1), before(window), torch.tensor([[3, 0], [5, 1]])
    )
    untouched = state[1].clone()
    out = torch.full((2, HEADS, VALUE_DIM), torch.nan)
    state_rows(heads, rates, sees, state, given, kept=None, out=out)
    near(out, with_skip(wanted.out, heads, rates))
    near(state[[3, 2]], wanted.states)
    assert torch.equal(window[[3, 2]], windows)
    assert torch.equal(state[1], untouched)


@BOTH
def test_a_tree_is_kept_and_its_path_committed(delta: bool) -> None:
    state, window = parts()
    size = len(TREE)
    heads, rates, told = some_rows(2 * size, delta=delta)
    given = conv_inputs(2 * size, window)
    sees = torch.stack((masked(TREE), masked([-1, 0, 1, 2])))
    held = before(state)
    wanted = extend_states_reference(told, held, sees, None)
    assert wanted.u is not None
    assert wanted.decay is not None
    out, u = (torch.full((2 * size, HEADS, VALUE_DIM), torch.nan) for _ in range(2))
    kept = Kept(u, torch.full((2 * size, HEADS), torch.nan))
    untouched = state.clone()
    state_rows(heads, rates, sees, state, given, kept=kept, out=out)
    near(out, with_skip(wanted.out, heads, rates))
    near(kept.u, wanted.u)
    near(kept.summed, wanted.decay)
    torch.testing.assert_close(state, untouched, rtol=0, atol=0, equal_nan=True)
    path = torch.tensor([[0, 1, 3], [0, 3, 3]])
    num_kept = torch.tensor([3, 1], dtype=torch.int32)
    both = {"k": heads.k, "u": kept.u, "decay": kept.summed}
    behind = commit_states_reference(
        held,
        **{name: each.unflatten(0, (2, size)) for name, each in both.items()},
        path=path,
        num_kept=num_kept,
    )
    places = torch.tensor([[1, 3], [2 * size + 3, size]])
    windows = next_windows_reference(given.rows.flatten(1), before(window), places)
    commit_states(
        state,
        window,
        SLOT_LIST,
        k=heads.k,
        u=kept.u,
        summed=kept.summed,
        inputs=given.rows.flatten(1),
        path=path,
        num_kept=num_kept,
    )
    near(state[[3, 2]], behind)
    assert torch.equal(window[[3, 2]], windows)


def test_a_commit_takes_as_many_rows_as_last() -> None:
    """Two key heads, two tiles of columns, windows of three of 13 channels; paths of none, one, two
    and four rows, not the first ones."""
    reqs, size, channels, width, value_dim = 4, 5, 13, 3, 66
    slots = torch.tensor([[1, 1, 0], [0, 2, 0], [6, 3, 0], [4, 4, 0]], dtype=torch.int32)
    state, window = noise(7, 4, 3, value_dim), noise(7, channels, width)
    inputs, held, states = noise(reqs * size, channels), window.clone(), state.clone()
    for part, was in ((state, states), (window, held)):
        part[0], was[0] = torch.nan, 0.0
    k, u = noise(reqs * size, 2, 3), noise(reqs * size, 4, value_dim)
    summed = -noise(reqs * size, 4).abs()
    path = torch.tensor([[0, 1, 2, 3], [2, 0, 0, 0], [1, 3, 9, 9], [0, 2, 3, 4]])
    num_kept = torch.tensor([0, 1, 2, 4], dtype=torch.int32)
    commit_states(
        state,
        window,
        slots,
        k=k,
        u=u,
        summed=summed,
        inputs=inputs,
        path=path,
        num_kept=num_kept,
    )
    for req, (read, written, _) in enumerate(slots.tolist()):
        rows = inputs[req * size + path[req, : num_kept[req]]]
        wanted = torch.cat((held[read], rows.mT), dim=1)[:, -width:]
        assert torch.equal(window[written], wanted)
    assert torch.equal(window[5:], held[5:])
    rows = (each.unflatten(0, (reqs, size)) for each in (k, u, summed))
    wanted = commit_states_reference(
        states[slots[:, 0].long()], *rows, path=path.clamp(max=size - 1), num_kept=num_kept
    )
    near(state[slots[:, 1].long()], wanted)
    assert torch.equal(state[5:], states[5:])


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [16, 64])
def test_chunks_of_a_ragged_step_follow_on_one_another(
    size: int, delta: bool, dtype: torch.dtype
) -> None:
    lens = [size + 1, 2]
    state, window = parts()
    heads, rates, _ = some_rows(sum(lens), delta=delta)
    rates = rates._replace(decay=rates.decay / 50)  # so that rows far apart meet
    heads = HeadRows(*(each.to(dtype) for each in heads))
    given = conv_inputs(sum(lens), window)
    rows = torch.tensor([0, size, size + 1, 0]).unsqueeze(1) + torch.arange(size)
    chunks = Chunks(
        reqs=torch.tensor([0, 0, 1, 2]),
        rows=rows.clamp(max=sum(lens) - 1),
        live=torch.zeros(4, size, dtype=torch.bool),
        places=torch.tensor([*range(size + 1), 2 * size, 2 * size + 1]),
    )
    starts = torch.tensor([0, size + 1, size + 3], dtype=torch.int32)
    held = before(state)
    out = torch.full(heads.v.shape, torch.nan, dtype=dtype)
    state_chunks(heads, rates, chunks, starts, state, given, out=out)
    bound = 1e-5 if dtype is torch.float32 else 6e-2
    wide = HeadRows(*(each.float() for each in heads))
    for req, num in enumerate(lens):
        mine = slice(int(starts[req]), int(starts[req + 1]))
        v = wide.v[mine] if delta else wide.v[mine] * rates.rate[mine].unsqueeze(2)
        beta = rates.rate[mine] if delta else None
        told = StateRows(wide.q[mine], wide.k[mine], v, rates.decay[mine], beta)
        causal = torch.ones(1, num, num, dtype=torch.bool).tril()
        wanted = extend_states_reference(told, held[req : req + 1], causal, None)
        whole = with_skip(wanted.out, HeadRows(wide.q, wide.k, wide.v[mine]), rates)
        torch.testing.assert_close(out[mine].float(), whole, rtol=bound, atol=bound)
        torch.testing.assert_close(
            state[int(SLOT_LIST[req, 1])], wanted.states[0], rtol=bound, atol=bound
        )
    assert torch.equal(window[3], given.rows[size - 1 : size + 1, 0].mT)
    assert torch.equal(window[2], given.rows[size + 1 : size + 3, 0].mT)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"sees": torch.ones(3, 1, 1, dtype=torch.bool)}, "sees must be"),
        ({"sees": torch.ones(1, 2, 2, dtype=torch.bool)}, "q must be"),
        ({"state": torch.zeros(SLOTS, HEADS, VALUE_DIM, KEY_DIM)}, "state must be contiguous"),
    ],
)
def test_rows_of_another_form_are_refused(change: dict[str, Any], text: str) -> None:
    state, window = parts()
    heads, rates, _ = some_rows(2, delta=True)
    args = {"sees": torch.ones(1, 1, 1, dtype=torch.bool), "state": state} | change
    with pytest.raises(KernelArgumentError, match=text):
        state_rows(heads, rates, given=conv_inputs(2, window), kept=None, out=heads.v, **args)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"rows": noise(1, 1, 30)}, r"rows must be \[2, parts"),
        ({"rows": noise(2, 1, 60)[:, :, ::2]}, r"rows must be \[2, parts"),
        ({"weight": noise(WINDOW + 1, 30).mT}, "weight must be contiguous"),
        ({"window": noise(SLOTS, 30, WINDOW + 1)}, "window must be contiguous"),
        ({"state": noise(SLOTS, 2, 10, 5).mT}, "state must be contiguous"),
        ({"state": noise(SLOTS, 3, 5, 10)}, "state must be contiguous"),
        ({"arrived": torch.zeros(1, 1, dtype=torch.int32)}, "arrived must be contiguous int32"),
        ({"arrived": torch.zeros(2, 1)}, "arrived must be contiguous int32"),
        ({"rates": (noise(2, 4)[:, ::2], noise(2, 2))}, "decay must be float32 with contiguous"),
        ({"rates": raw_rates(noise(2, 1, 4), has_beta=False)}, "rates must be numbers with beta"),
        ({"rates": raw_rates(noise(2, 1, 2), has_beta=True)}, r"given must be .* of 2 heads"),
        ({"gate": Gate(noise(2, 19), noise(20))}, r"z must be \[2, 20\]"),
        ({"gate": Gate(noise(2, 40)[:, ::2], noise(20))}, r"z must be \[2, 20\]"),
        ({"gate": Gate(noise(2, 20), noise(10))}, r"norm_weight must be contiguous \[20\]"),
    ],
)
def test_a_step_of_another_form_is_refused(change: dict[str, Any], text: str) -> None:
    whole = {
        "rows": noise(2, 1, 30),
        "weight": noise(30, WINDOW + 1),
        "bias": None,
        "window": noise(SLOTS, 30, WINDOW),
        "slots": SLOT_LIST,
        "state": noise(SLOTS, 2, 5, 10),
        "arrived": torch.zeros(2, 1, dtype=torch.int32),
        "rates": (noise(2, 2), noise(2, 2)),
        "gate": None,
    } | change
    state, arrived, rates, gate = (
        whole.pop(name) for name in ("state", "arrived", "rates", "gate")
    )
    out = noise(2, 2, 10)
    with pytest.raises(KernelArgumentError, match=text):
        state_step(
            StepInputs(**whole),
            HeadChannels(0, 5, 10, 30, 30),
            rates,
            state,
            skip=None,
            is_delta=True,
            eps=1e-6,
            scale=0.5,
            arrived=arrived,
            out=out,
            gate=gate,
        )


@pytest.mark.parametrize("name", ["decay", "rate"])
def test_rates_with_strides_are_refused_by_name(name: str) -> None:
    state, window = parts()
    heads, rates, _ = some_rows(2, delta=True)
    rates = rates._replace(**{name: noise(2, 2 * HEADS)[:, ::2]})
    given, sees = conv_inputs(2, window), torch.ones(1, 1, 1, dtype=torch.bool)
    with pytest.raises(KernelArgumentError, match=f"^{name} must be float32 with contiguous rows"):
        state_rows(heads, rates, sees, state, given, kept=None, out=torch.empty_like(heads.v))
    places = torch.zeros(1, 2, dtype=torch.int64)
    chunks = Chunks(reqs=places[:, 0], rows=places, live=places.bool(), places=places[0])
    starts = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(KernelArgumentError, match=f"^{name} must be float32 with contiguous rows"):
        state_chunks(heads, rates, chunks, starts, state, given, out=torch.empty_like(heads.v))
