"""One row's sample on a CPU, without a sort and with little noise; see kernels/draw.py.

The cut of top-p lies among likely tokens as a rule.  Then the masses of these are exact, and the
sum of all lies between bounds: what the others weigh at most, where few are likely, and else a
float32 and its error.  Where the cut would be another between them, and where many tokens are
likely, all masses are exact.  Of many tokens a cut is found by radix: masses by the highest digit
of the key, then among the tokens of the one digit in which the cut lies, and so on.  Keys are the
bits of -scaled, 0 or above.

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
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

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
_FAR = 20.0  # as above: all others together are little beside it
_DOUBT = 2e-5  # of a sum of masses in float32: above the rounding of exponentials and of the sum
SLACK = 0.01  # of scores: far above what rounding does to noise and quotients
_RELATIVE_SLACK = 1e-6  # of logits: above the rounding of a float32 difference
_HIGHEST = float(np.finfo(np.float32).max)
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


class Cut(NamedTuple):
    """Where top-p cuts."""

    scaled: float  # of the last token that is kept
    before: int  # the mass of tokens in front of it


def draw_row(logits: NDArray[np.float32], best: int, law: RowLaw) -> int:
    """The token that `draw_reference` gives.

    logits: [vocab], finite but for -inf; best: the id of the first of the largest.
    """
    row = Row(logits, best, law)
    return row.winner(row.kept())


def _weights(scaled: NDArray[np.float32]) -> NDArray[np.int64]:
    """The masses of tokens as `keep_mask` sums them: [tokens]."""
    weights: NDArray[np.float32] = torch.from_numpy(scaled).exp().numpy()
    weights *= np.float32(WEIGHT_SCALE)
    return weights.astype(np.int64)


def _mass_cut(scaled: NDArray[np.float32], weights: NDArray[np.int64], wanted: float) -> Cut:
    """The last token, by falling `scaled`, that has less than `wanted` of the mass in front of it.

    scaled: [tokens], the largest 0; weights: [tokens], together at least `wanted`.
    """
    wanted = max(wanted, 1.0)  # masses are whole: nothing is in front of the first, or at least 1
    keys, masses, above = (np.float32(0.0) - scaled).view(np.int32), weights, 0
    for shift, values in _DIGITS:
        if len(keys) <= _FEW:
            break
        digits = ((keys >> shift) & (values - 1)).astype(np.int64)
        sums = torch.zeros(values, dtype=torch.int64)
        sums.scatter_add_(0, torch.from_numpy(digits), torch.from_numpy(masses))
        of_digit = sums.numpy()
        before = of_digit.cumsum() - of_digit + above
        digit = int(((of_digit > 0) & (before < wanted)).nonzero()[0][-1])
        above = int(before[digit])
        members = (digits == digit).nonzero()[0]
        keys, masses = keys[members], masses[members]
    order = keys.argsort()
    through = masses[order].cumsum() + above
    # In float64, as the definition compares; the first is kept whatever is wanted.
    last = int(np.searchsorted(through.astype(np.float64), wanted))
    last = min(last, len(order) - 1)
    of_last = order[last]
    value = float(np.float32(0.0) - keys[of_last : of_last + 1].view(np.float32)[0])
    return Cut(value, int(through[last] - masses[of_last]))


class Row:
    """One row's scores, of any of its tokens."""

    def __init__(self, logits: NDArray[np.float32], best: int, law: RowLaw) -> None:
        """Arguments as of `draw_row`."""
        self._logits = logits
        self._law = law
        # A quotient of float32 numbers is rounded alike by way of float64.
        self._inverse = np.float32(min(1.0 / law.temperature, _HIGHEST))
        self._temperature = 1.0 / float(self._inverse)
        self._highest = logits[best]
        self._stream = splitmix64(splitmix64(law.seed, 0), law.position)
        bits = splitmix64(self._stream, best) >> 24
        self._floor = _near_noise_of(bits) - SLACK  # the best score is not below

    def scaled(self, ids: Ids | None = None) -> NDArray[np.float32]:
        """(logits - their maximum) * (1 / temperature) of `ids`; None: of all."""
        logits = self._logits if ids is None else self._logits[ids]
        with np.errstate(over="ignore"):
            scaled: NDArray[np.float32] = logits - self._highest
            scaled *= self._inverse
            return scaled

    def kept(self) -> Ids | None:
        """The ids that `keep_mask` keeps, ascending: [kept]; None: no filter is on."""
        top_k, top_p, min_p = self._law.top_k, self._law.top_p, self._law.min_p
        ids = self._largest(top_k) if top_k < len(self._logits) else None
        if top_p >= 1.0 and min_p <= 0.0:
            return ids
        cut = -math.inf
        if top_p < 1.0:
            cut, ids = self._mass_cut(ids, top_p)
        elif ids is None:
            ids = self._at_least(math.log(min_p) - math.log(2.0))  # exp rounds what is denormal
        scaled = self.scaled(ids)
        keep = scaled >= np.float32(cut)
        if min_p > 0.0:
            keep &= torch.from_numpy(scaled).exp().numpy() >= np.float32(min_p)
        return ids[keep]

    def _at_least(self, scaled: float) -> Ids:
        """The ids of all that are at least `scaled`, and of some just below: ascending."""
        if scaled == -math.inf:
            return np.arange(len(self._logits))
        return (self._logits >= self._logit_of(scaled)).nonzero()[0]

    def _largest(self, num: int) -> Ids:
        """The ids of the `num` largest and of all tied with the last, ascending."""
        groups = len(self._logits) // _GROUP
        ids = None
        if num < groups:  # so many groups hold a number of at least the cut
            maxima = self._logits[: groups * _GROUP].reshape(_GROUP, groups).max(0)
            low = np.partition(maxima, groups - num)[groups - num : groups - num + 1]
            with np.errstate(over="ignore"):
                ids = self._at_least(float(((low - self._highest) * self._inverse)[0]))
        scaled = self.scaled(ids)
        cut = np.partition(scaled, len(scaled) - num)[len(scaled) - num]
        kept: Ids = (scaled >= cut).nonzero()[0]
        return kept if ids is None else ids[kept]

    def _mass_cut(self, ids: Ids | None, top_p: float) -> tuple[float, Ids]:
        """The `scaled` of the last token that top-p keeps of `ids`, None: of all; and ids among
        which are all that it keeps, ascending.
        """
        if ids is None:
            probes = self._logits[::_PROBES] >= self._logit_of(-_FAR)
            has_few = np.count_nonzero(probes) * 64 <= len(probes)
            likely = self._at_least(-_FAR if has_few else -_MOST)
            cut = self._cut_of_likely(likely, top_p)
            if cut is not None:
                return cut, likely
            ids = np.arange(len(self._logits))
        scaled = self.scaled(ids)
        weights = _weights(scaled)
        return _mass_cut(scaled, weights, float(weights.sum()) * top_p).scaled, ids

    def _cut_of_likely(self, likely: Ids, top_p: float) -> float | None:
        """The cut of all tokens, by the masses of `likely` ones; None: it is not certain."""
        if len(likely) * 4 > len(self._logits):
            return None
        scaled = self.scaled(likely)
        weights = _weights(scaled)
        mass = float(weights.sum())
        others = (len(self._logits) - len(likely)) * math.exp(float(scaled.min()))
        for least, most in self._totals(mass, others):
            if mass < most * top_p:
                continue
            cut = _mass_cut(scaled, weights, most * top_p)
            if cut.before < least * top_p:
                return cut.scaled
        return None

    def _totals(self, mass: float, others: float) -> Iterator[tuple[float, float]]:
        """Between what the mass of all tokens lies; the second time close together.

        mass: of likely tokens; others: the exponentials of all others together, or more.
        """
        yield mass, mass + others * (1 + _DOUBT) * WEIGHT_SCALE
        every = self.scaled()
        total = float(torch.from_numpy(np.exp(every, out=every)).sum()) * WEIGHT_SCALE
        yield total * (1 - _DOUBT) - len(every), total * (1 + _DOUBT)  # each is rounded down

    def winner(self, ids: Ids | None) -> int:
        """The best of `ids`, ascending, the most likely token among them; None: of all."""
        logits = self._logits if ids is None else self._logits[ids]
        if len(logits) > _FEW:
            cut = self._logit_of(self._floor - _HIGHEST_NOISE)
            probes = logits[::_PROBES]
            if np.count_nonzero(probes >= cut) * 4 <= len(probes):
                possible = (logits >= cut).nonzero()[0]
                ids, logits = possible if ids is None else ids[possible], logits[possible]
        if len(logits) > _FEW:
            rarity = (len(logits) // _LUCKY).bit_length() - 1  # one token in 2**rarity
            other_noise = -math.log(-math.log1p(-(2.0**-rarity)))
            strong = (logits >= self._logit_of(self._floor - other_noise)).nonzero()[0]
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
        if len(ids) > 1:
            near = self._near_scores(ids)
            ids = ids[near >= near.max() - SLACK]
        if len(ids) == 1:
            return int(ids[0])
        ids = np.unique(ids)
        return int(ids[self._scores(ids).argmax()])

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


def _near_noise_of(bits: int) -> float:
    """`near_noise` of one number."""
    uniform = float(np.float32(bits) + np.float32(0.5)) * 2.0**-40
    return -math.log(-math.log1p(-min(uniform, 1.0 - 2.0**-24)))


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
