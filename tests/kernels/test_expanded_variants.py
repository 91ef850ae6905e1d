"""Kernels of steps that are no graphs, as a GPU's compiler is asked for them: each once, whatever
stands before the prompts, and however many and long they are.  No GPU is needed to ask."""

from typing import Any

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from paceline.kernels._triton import (
    all_reduce_norm,
    latent_rows,
    merge_partials,
    prefix_rows,
    ragged_attention,
    solve_chunks,
    state_inputs,
)
from paceline.kernels.all_reduce import POLLED

RANK, NOPE, ROPE, HEADS, PAGE, TOKENS, REQS = 32, 16, 16, 2, 4, 40, 70
MODULES = (latent_rows, merge_partials, prefix_rows, ragged_attention)
MODULES += (all_reduce_norm, solve_chunks, state_inputs)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, str]]:
    """(kernel, what it is compiled for) of every launch meanwhile; none starts."""
    found = set()
    backend = make_backend(GPUTarget("cuda", 90, 32))

    def ask(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        jitted: Any = JITFunction(kernel.fn, **kernel.kwargs)
        bind = create_function_from_signature(jitted.signature, jitted.params, backend)
        _, specialised, _ = bind(*args, **options)
        found.add((kernel.fn.__name__, str(specialised)))

    for module in MODULES:
        monkeypatch.setattr(module, "launch", ask)
    return found


def launch_expanded(first: int, reqs: int) -> None:
    """What stands behind `first` rows of decode, of so many requests."""
    tokens = slice(first, TOKENS)
    half = torch.bfloat16
    q = torch.zeros(TOKENS, HEADS, NOPE + ROPE, dtype=half)[tokens]
    row = torch.zeros(TOKENS, RANK + ROPE, dtype=half)[tokens]
    turned = torch.zeros(len(q), HEADS, ROPE, dtype=half)
    rows = torch.zeros(len(q), 1, RANK + ROPE, dtype=half)
    cache = torch.zeros(8, 2, PAGE, 1, RANK + ROPE, dtype=half)[:, 1]
    positions, loc = (torch.zeros(TOKENS, dtype=torch.int64)[tokens] for _ in "pl")
    norm = (torch.zeros(RANK, dtype=half), 1e-6)
    turn = (torch.zeros(64, ROPE), positions, True)
    latent_rows.launch_latent_rows(
        q[..., NOPE:], row, turned, *norm, *turn, cache, loc, None, None, rows
    )
    cu = torch.zeros(reqs + 1, dtype=torch.int32)
    table = torch.zeros(first + reqs, 3, dtype=torch.int32)[first:]
    found = torch.zeros(TOKENS, RANK + ROPE, dtype=half)[: TOKENS - first]
    prefix_rows.launch_prefix_rows(cache, table, cu, first, found)
    keys = torch.zeros(len(found), HEADS, 2 * NOPE, dtype=half)
    parts = [
        (torch.zeros(len(q), HEADS, NOPE), torch.zeros(len(q), HEADS)) for _ in ("step", "piece")
    ]
    for (out, lse), ahead in zip(parts, (1, None), strict=True):
        shared = (turned, found[:, RANK:], cu, cu, None, None, 1.0, None, None)
        ragged_attention.launch_ragged_attention(
            q[..., :NOPE], keys[..., :NOPE], keys[..., NOPE:], *shared, ahead, out, lse
        )
    (out, lse), part = parts
    merge_partials.launch_merge_partials(out, lse, *part, sinks=None, out=out, lse=lse)


def test_no_kernel_depends_on_what_stands_before_or_on_how_many_prompts_there_are(asked) -> None:
    launch_expanded(0, 1)
    ahead = set(asked)
    assert {name for name, _ in ahead} == {
        "_latent_rows_kernel",
        "_prefix_rows_kernel",
        "_ragged_attention_kernel",
        "_merge_partials_kernel",
    }
    for first, reqs in ((1, 1), (2, 3), (17, REQS)):
        launch_expanded(first, reqs)
    assert asked - ahead == set()


def launch_ragged(tokens: int, reqs: int) -> None:
    """What layers of states, and ranks, launch of so many tokens of prompts."""
    x, rows = torch.zeros(tokens, RANK), torch.zeros(2, 2, 1, 1)
    some = torch.zeros(1, dtype=torch.int64)
    all_reduce_norm.launch_all_reduce_norm(
        x, x, x[0], 1e-6, False, False, 0, rows, some, rows, some, x
    )
    heads = torch.zeros(tokens, 1, NOPE)
    slots = torch.zeros(reqs, 3, dtype=torch.int32)
    places = torch.zeros(tokens, 3, dtype=torch.int64)
    weight, window = torch.zeros(3 * NOPE, 4), torch.zeros(1, 3 * NOPE, 3)
    channels, inputs = (0, NOPE, 2 * NOPE, 3 * NOPE, 3 * NOPE), torch.zeros(tokens, 1, 3 * NOPE)
    state_inputs.launch_state_inputs(
        inputs, weight, None, window, slots, places, channels, 1e-6, 1.0, heads, heads, heads, None
    )
    starts = torch.zeros(reqs + 1, dtype=torch.int32)
    chunks = torch.zeros(1, 16, dtype=torch.int64)
    solve_chunks.launch_solve_chunks(
        heads, heads[..., 0], heads[..., 0], starts, chunks[:, 0], chunks, torch.zeros(1, 1, 16, 16)
    )


def test_no_kernel_depends_on_how_long_or_how_many_prompts_are(asked) -> None:
    launch_ragged(2 * POLLED, 4)
    ahead = set(asked)
    assert len({name for name, _ in ahead}) == 3
    for tokens, reqs in ((2 * POLLED + 1, 1), (2 * POLLED + 16, 16)):
        launch_ragged(tokens, reqs)
    assert asked - ahead == set()
