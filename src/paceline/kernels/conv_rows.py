"""conv_rows: a causal convolution, each channel for itself, over the rows of a step and the inputs
before it.

The taps of a row are its nearest ancestors in the step and, behind the first of them, the window
that its request carries: the inputs of its last tokens, oldest first.  Where each is found is one
list of places, the same for prompts, decode, chains and trees: p < T is row p of the step, and
T + r * (width - 1) + c column c of request r's window.

Worked example, width 3: request 0 brings three rows, a chain; request 1 two, which both hang on its
prefix; T is 5:

    row       0    1    2    3    4
    places   5 6  6 0  0 1  7 8  7 8     and the row itself
    tails    1 2 of request 0: its window behind the step
"""

import torch
from torch import Tensor
from torch.nn.functional import silu


def places_of(rows: Tensor, offsets: Tensor, reqs: Tensor, *, num_rows: int, window: int) -> Tensor:
    """Where the token at an offset from a request's first of the step is found, int64.

    rows: its row, of offsets from 0 on; reqs: its request; int64, shapes that go together.
    """
    before = num_rows + reqs * window + (window + offsets)
    return torch.where(offsets >= 0, rows, before)


def conv_rows_reference(
    rows: Tensor, windows: Tensor, places: Tensor, weight: Tensor, bias: Tensor | None
) -> Tensor:
    """[tokens, channels] in the dtype of `rows`: SiLU of the convolution, summed in float32.

    rows: [tokens, channels]; windows: [reqs, channels, width - 1]; places: [tokens, width - 1]
    int64; weight: [channels, width], the row's own tap last; bias: [channels].
    """
    found, taps = _places(rows, windows), weight.float()
    total = rows.float() * taps[:, -1]
    for tap in range(places.shape[1]):
        total += found.index_select(0, places[:, tap]).float() * taps[:, tap]
    if bias is not None:
        total += bias.float()
    return silu(total).to(rows.dtype)


def next_windows_reference(rows: Tensor, windows: Tensor, places: Tensor) -> Tensor:
    """[reqs, channels, width - 1] the windows of the tokens at `places` [reqs, width - 1]."""
    taken = _places(rows, windows).index_select(0, places.flatten())
    return taken.view(*places.shape, -1).mT


def _places(rows: Tensor, windows: Tensor) -> Tensor:
    """[places, channels]"""
    return torch.cat((rows, windows.mT.flatten(0, 1).to(rows.dtype)))
