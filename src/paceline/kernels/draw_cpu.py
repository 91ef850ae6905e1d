"""One row's sample on a CPU, without a sort and with little noise; see kernels/draw.py.

The cut of top-p is found by radix: masses by the highest digit of the key, then among the tokens
of the one digit in which the cut lies, and so on.  Keys are the bits of -scaled, 0 or above.

Noise is dear, its hash is not, and a token wins only with a high score.  The score of the most
likely token is a floor.  No noise is above 28.43, so tokens too far below the floor for that are
out.  The hash of the others tells the few that have high noise; these are scored, and those that
could pass the floor with less.  Scores in float64 tell which of these are next to the best; unless
one is alone there, the definition decides between them.

Worked example: 150,000 tokens, scaled by the temperature down to -35, the floor 1.2.  Those below
-27.23 are out.  Some 120 of the others have noise above 6.93; tokens with less need at least -5.73
to pass the floor, as some 40 have.  Of 160 scores one is the best.
"""

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from paceline.core.seeds import GOLDEN_GAMMA, MIX_1, MIX_2, splitmix64
from paceline.kernels.gumbel import noise_of
from paceline.kernels.keep_mask import WEIGHT_SCALE

Ids = NDArray[np.int64]

_WORD = 2**64
_BLOCK = 1 << 15  # tokens hashed at a time, so that two arrays stay in a core's cache
_FEW = 1024  # tokens that are scored at once
_LUCKY = 128  # tokens whose noise is looked at first, about
_GROUP = 64  # tokens whose maximum stands for them when the k-th best is looked for
_DIGITS = ((20, 1 << 11), (9, 1 << 11), (0, 1 << 9))  # of a key: shift, values
_HIGHEST_NOISE = 41 * math.log(2)
_NEAR = 3.0  # below the most likely token, in units of scores, are likely ones
_MOST = 8.0  # as above, where most of the mass lies
SLACK = 0.01  # of scores: far above what rounding does to noise and quotients
_RELATIVE_SLACK = 1e-6  # of logits: above the rounding of a float32 difference
_HIGHEST = np.finfo(np.float32).max
_LOWEST_LOGIT = float(np.finfo(np.float32).min)
_PROBES = 509  # every so many tokens, to guess how many are left


def _word(value: int) -> NDArray[np.uint64]:
    """A 64-bit number as numpy's loops take it at once: a scalar is looked at in each call."""
    return np.array(value, np.uint64)


_SHIFT_1, _SHIFT_2 = _word(30), _word(27)
_FACTOR_1, _FACTOR_2 = _word(MIX_1), _word(MIX_2)


class RowLaw(NamedTuple):
    """What one row draws from, as host numbers."""

    temperature: float  # above 0, a float32
    top_k: int
    top_p: float  # a float32; 1 = keep all
    min_p: float  # a float32; 0 = keep all
    seed: int
    position: int


def draw_row(logits: NDArray[np.float32], best: int, law: RowLaw) -> int:
    """The token that `draw_reference` gives.

    logits: [vocab], finite but for -inf; best: the id of the first of the largest.
    """
    row = _Row(logits, best, law)
    if law.top_k >= len(logits) and law.top_p >= 1.0 and law.min_p <= 0.0:
        return row.winner(None)
    return row.winner(kept_tokens(row.scaled(), law))


def kept_tokens(scaled: NDArray[np.float32], law: RowLaw) -> Ids:
    """The ids that `keep_mask` keeps, ascending: [kept].  scaled: [vocab], the largest 0; law: one
    that filters."""
    ids = None
    if law.top_k < len(scaled):
        ids = _largest(scaled, law.top_k)
        scaled = scaled[ids]
    if law.top_p >= 1.0 and law.min_p <= 0.0:
        assert ids is not None, "a filter is on"
        return ids
    odds = torch.from_numpy(scaled).exp()
    keep = odds.numpy() >= np.float32(law.min_p)
    if law.top_p < 1.0:
        weights = odds.mul_(WEIGHT_SCALE).to(torch.int64)
        keep &= scaled >= _mass_cut(torch.from_numpy(scaled), weights, law.top_p)
    kept = np.flatnonzero(keep)
    return kept if ids is None else ids[kept]


def _largest(scaled: NDArray[np.float32], num: int) -> Ids:
    """The ids of the `num` largest and of all tied with the last, ascending."""
    groups = len(scaled) // _GROUP
    among = scaled
    if num < groups:  # so many groups hold a number of at least the cut
        maxima = scaled[: groups * _GROUP].reshape(groups, _GROUP).max(1)
        among = scaled[scaled >= np.partition(maxima, groups - num)[groups - num]]
    cut = np.partition(among, len(among) - num)[len(among) - num]
    return np.flatnonzero(scaled >= cut)


def _mass_cut(scaled: Tensor, weights: Tensor, top_p: float) -> float:
    """The smallest number of `scaled` that has less than top_p of the mass above it.

    scaled: [tokens] float32, the largest 0; weights: [tokens] int64, not all 0.
    """
    wanted = float(weights.sum()) * top_p
    near = torch.from_numpy(np.flatnonzero(scaled.numpy() >= -_MOST))
    masses_near = weights[near]
    if float(masses_near.sum()) >= wanted:  # then the cut is not below
        scaled, weights = scaled[near], masses_near
    keys, above = (0.0 - scaled).view(torch.int32), 0
    for shift, values in _DIGITS:
        if len(keys) <= _FEW:
            break
        digits = ((keys >> shift) & (values - 1)).long()
        masses = torch.zeros(values, dtype=torch.int64).scatter_add_(0, digits, weights)
        before = masses.cumsum(0) - masses + above
        reached = (masses > 0) & (before.double() < wanted)
        digit = int(reached.nonzero()[-1])
        above = int(before[digit])
        members = torch.from_numpy(np.flatnonzero(digits.numpy() == digit))
        keys, weights = keys[members], weights[members]
    keys, order = keys.sort()
    weights = weights[order]
    before = weights.cumsum(0) - weights + above
    last = int((before.double() < wanted).sum().clamp(min=1)) - 1
    return float(0.0 - keys[last].view(torch.float32))


class _Row:
    """One row's scores, of any of its tokens."""

    def __init__(self, logits: NDArray[np.float32], best: int, law: RowLaw) -> None:
        self._logits = logits
        self._temperature = law.temperature
        with np.errstate(over="ignore"):
            inverse = np.float32(1.0) / np.float32(law.temperature)
        self._inverse = min(inverse, _HIGHEST)
        self._highest = logits[best]
        self._stream = splitmix64(splitmix64(law.seed, 0), law.position)
        bits = np.array([splitmix64(self._stream, best) >> 24])
        self._floor = float(near_noise(bits)[0]) - SLACK  # the best score is not below

    def scaled(self, ids: Ids | None = None) -> NDArray[np.float32]:
        """(logits - their maximum) * (1 / temperature) of `ids`; None: of all."""
        logits = self._logits if ids is None else self._logits[ids]
        with np.errstate(over="ignore"):
            scaled: NDArray[np.float32] = logits - self._highest
            scaled *= self._inverse
            return scaled

    def winner(self, ids: Ids | None) -> int:
        """The best of `ids`, ascending, the most likely token among them; None: of all."""
        logits = self._logits if ids is None else self._logits[ids]
        if len(logits) > _FEW:
            cut = self._logit_of(self._floor - _HIGHEST_NOISE)
            probes = logits[::_PROBES]
            if np.count_nonzero(probes >= cut) * 4 <= len(probes):
                possible = np.flatnonzero(logits >= cut)
                ids, logits = possible if ids is None else ids[possible], logits[possible]
        if len(logits) > _FEW:
            rarity = (len(logits) // _LUCKY).bit_length() - 1  # one token in 2**rarity
            other_noise = -math.log(-math.log1p(-(2.0**-rarity)))
            strong = np.flatnonzero(logits >= self._logit_of(self._floor - other_noise))
            if len(strong) > _FEW:
                floor = self._best_of_some(strong if ids is None else ids[strong])
                strong = strong[logits[strong] >= self._logit_of(floor - other_noise)]
            strong = strong if ids is None else ids[strong]
            ids = np.concatenate((self._lucky(ids, rarity), strong))
        elif ids is None:
            ids = np.arange(len(logits))
        return self._best(ids)

    def _best(self, ids: Ids) -> int:
        """The lowest of `ids` with the best score."""
        near = self._near_scores(ids)
        ids = np.unique(ids[near >= near.max() - SLACK])
        return int(ids[0] if len(ids) == 1 else ids[self._scores(ids).argmax()])

    def _best_of_some(self, ids: Ids) -> float:
        """A score that the best is not below: the best of some likely tokens of `ids`."""
        likely = ids[self._logits[ids] >= self._logit_of(-_NEAR)][:_LUCKY]
        return max(float(self._near_scores(likely).max()) - SLACK, self._floor)

    def _noise_bits(self, ids: Ids) -> NDArray[np.int64]:
        bits = _before_last_step(_steps(ids), self._stream, *np.empty((2, len(ids)), np.uint64))
        return ((bits ^ (bits >> np.uint64(31))) >> np.uint64(24)).view(np.int64)

    def _near_scores(self, ids: Ids) -> NDArray[np.float64]:
        """Scores, of which those that could be the best are less than half of SLACK off."""
        return self.scaled(ids) + near_noise(self._noise_bits(ids))

    def _scores(self, ids: Ids) -> NDArray[np.float32]:
        noise: NDArray[np.float32] = noise_of(torch.from_numpy(self._noise_bits(ids))).numpy()
        return self.scaled(ids) + noise

    def _logit_of(self, scaled: float) -> np.float32:
        """A logit below all whose `scaled` is at least this."""
        highest = float(self._highest)
        logit = highest + (scaled - SLACK) * self._temperature
        logit -= _RELATIVE_SLACK * max(abs(highest), abs(logit))
        return np.float32(max(logit, _LOWEST_LOGIT))

    def _lucky(self, ids: Ids | None, rarity: int) -> Ids:
        """The ids whose noise is among the highest 1 / 2**rarity; all others have less."""
        num = len(self._logits) if ids is None else len(ids)
        room, is_lucky = np.empty((2, min(num, _BLOCK)), np.uint64), np.empty(_BLOCK, np.bool_)
        highest = _word(2 ** (64 - rarity) - 1)
        found = []
        for start in range(0, num, _BLOCK):
            if ids is None:
                steps, begin = _first_steps()[: num - start], start
            else:
                steps, begin = _steps(ids[start : start + _BLOCK]), 0
            state = (self._stream + begin * GOLDEN_GAMMA) % _WORD
            high = _before_last_step(steps, state, *room[:, : len(steps)])
            lucky = np.less_equal(high, highest, out=is_lucky[: len(high)]).nonzero()[0]
            found.append(lucky + start)
        lucky = np.concatenate(found)
        return lucky if ids is None else ids[lucky]


def near_noise(bits: NDArray[np.int64]) -> NDArray[np.float64]:
    """`noise_of` but for the rounding of its logarithms."""
    uniform = (bits.astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-40)
    uniform = np.minimum(uniform, np.float32(1.0 - 2.0**-24)).astype(np.float64)
    noise: NDArray[np.float64] = -np.log(-np.log1p(-uniform))
    return noise


@cache
def _first_steps() -> NDArray[np.uint64]:
    """`_steps` of the ids of a block that begins with 0."""
    return _steps(np.arange(_BLOCK))


def _steps(ids: Ids) -> NDArray[np.uint64]:
    """How far into a stream of `splitmix64` each id is: [ids]."""
    return (ids.view(np.uint64) + np.uint64(1)) * np.uint64(GOLDEN_GAMMA)


def _before_last_step(
    steps: NDArray[np.uint64],
    state: int,
    bits: NDArray[np.uint64],
    scratch: NDArray[np.uint64],
) -> NDArray[np.uint64]:
    """What `splitmix64` makes of `steps` before its last step, which leaves the highest 31 bits:
    high noise has them low.  Overwrites and returns `bits`; overwrites `scratch`.
    """
    np.add(steps, np.uint64(state), out=bits)
    np.right_shift(bits, _SHIFT_1, out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    np.multiply(bits, _FACTOR_1, out=bits)
    np.right_shift(bits, _SHIFT_2, out=scratch)
    np.bitwise_xor(bits, scratch, out=bits)
    return np.multiply(bits, _FACTOR_2, out=bits)
