"""CacheManager: the cache as the scheduler sees it, requests against cache groups and prefix tree.

Calls either do the whole of what they say, in every group, or change nothing and say so.  An
`epoch` argument names the last step that could touch what is returned; it comes back for use once
`retire` has been told that epoch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from paceline.cache.books import CacheStats, Held, check_books
from paceline.cache.crowds import Crowds
from paceline.cache.encoders import EncoderGroup, EncoderHolding
from paceline.cache.groups import Holding, PagedGroup, PageRun
from paceline.cache.page_keys import NO_KEYS, PageKeys
from paceline.cache.prefix_tree import Node, PrefixTree
from paceline.cache.states import StateGroup, StateHolding
from paceline.core.errors import IntegrityError
from paceline.core.model.cache_groups import CacheGroupSpec, page_size_of, state_every_of
from paceline.core.model.config import CacheKind

_ANY_LENGTH = 1 << 62


class Admitted(NamedTuple):
    """What a request starts with."""

    prefix_len: int  # tokens whose KV is in the cache, a multiple of the page size
    page_runs: tuple[PageRun, ...]  # one per group that holds pages


class Capacity(NamedTuple):
    """Whether a request can ever fit, with the numbers."""

    fits: bool
    needed: tuple[int, ...]  # [num_groups] pages
    total: tuple[int, ...]  # [num_groups] pages


@dataclass(slots=True)
class _Entry:
    """One admitted request."""

    keys: PageKeys
    holdings: tuple[Holding, ...]  # [num_paged_groups]
    states: tuple[StateHolding, ...]  # [num_state_groups]
    encoders: tuple[EncoderHolding, ...]  # [num_encoder_groups]
    hit_pages: int
    tip: Node | None  # the tree node of page num_offered - 1
    num_offered: int  # written pages already offered to the tree
    committed: int  # tokens whose KV exists, by retired steps
    crowd: Node | None  # whom Crowds counts it with
    reserved: int = field(default=0)  # tokens every group has room for

    @classmethod
    def of_nothing(cls, keys: PageKeys) -> "_Entry":
        """In a cache without groups."""
        return cls(keys, (), (), (), 0, None, 0, 0, None, reserved=_ANY_LENGTH)


class _Owed(NamedTuple):
    """Pages that a retired step has filled, and that are not in the prefix tree yet."""

    entry: _Entry
    tokens: Sequence[int]  # the request's
    kv_len: int
    left: int | None = None  # the last epoch that touched them, of a request that has left


class CacheManager:
    """Owns the cache groups and the prefix tree."""

    def __init__(
        self,
        specs: Sequence[CacheGroupSpec],
        num_pages: Sequence[int],
        *,
        max_extend_len: int,
        enable_prefix_cache: bool = True,
    ) -> None:
        """num_pages: [num_groups], page 0 included.  max_extend_len: tokens a step adds at most."""
        self._page_size = page_size_of(specs)
        self._state_every = state_every_of(specs)
        self._enabled = enable_prefix_cache
        self._tree = PrefixTree(
            self._page_size,
            [spec.window is None and spec.kind is CacheKind.TOKENS for spec in specs],
            next_token=any(spec.next_token for spec in specs),
        )
        indexed = [(i, *pair) for i, pair in enumerate(zip(specs, num_pages, strict=True))]
        self._paged = tuple(
            PagedGroup(spec, i, self._tree, num_pages=pages, max_extend_len=max_extend_len)
            for i, spec, pages in indexed
            if spec.kind is CacheKind.TOKENS
        )
        self._states = tuple(
            StateGroup(spec, i, self._tree, num_pages=pages, keeps=enable_prefix_cache)
            for i, spec, pages in indexed
            if spec.kind is CacheKind.STATE
        )
        self._encoders = tuple(
            EncoderGroup(spec, i, self._tree, num_pages=pages)
            for i, spec, pages in indexed
            if spec.kind is CacheKind.ENCODER
        )
        self._by_length: tuple[PagedGroup | StateGroup, ...] = (*self._paged, *self._states)
        groups: list[PagedGroup | StateGroup | EncoderGroup] = [*self._by_length, *self._encoders]
        self._groups = sorted(groups, key=lambda group: group.index)
        self.max_encoder_len = max((spec.encoder_len or 0 for spec in specs), default=0)
        self._windowed = any(spec.window is not None for spec in specs)
        # What lies behind a window, or a state, may be given away before the next step is planned.
        self._offers_at_once = self._windowed or bool(self._states)
        self._owed: list[_Owed] = []  # in the order of `written`
        self._entries: dict[str, _Entry] = {}
        self._crowds = Crowds(self._page_size)
        self._retired = 0
        self._queried_tokens = 0
        self._hit_tokens = 0

    def can_ever_fit(self, kv_len_bound: int) -> Capacity:
        """Whether a request alone could reach `kv_len_bound` tokens in the cache."""
        needed = tuple([group.pages_to_fit(kv_len_bound) for group in self._groups])
        total = tuple([group.pool.total for group in self._groups])
        fits = False not in [n <= t for n, t in zip(needed, total, strict=True)]
        return Capacity(fits, needed, total)

    def shares(self, num_tokens: int) -> bool:
        """Whether a request of `num_tokens` could find anything in the cache."""
        return self._enabled and num_tokens > (self._state_every or self._page_size)

    @property
    def has_states(self) -> bool:
        """Whether `slots` is to be asked for each row of a step."""
        return bool(self._states)

    @property
    def has_windows(self) -> bool:
        """Whether `advance_window` gives anything back."""
        return self._windowed

    def chunk_len(self, start: int, length: int) -> int:
        """Tokens of a prompt to compute at once, of `length` from `start` on: no further than to
        where a state can be kept."""
        if self._state_every is None or not self._enabled:
            return length
        return min(length, self._state_every - start % self._state_every)

    def admit(
        self,
        request_id: str,
        tokens: Sequence[int],
        *,
        reserve_to: int,
        ahead: int = 0,
        keys: PageKeys = NO_KEYS,
        max_hit: int | None = None,
        encoder_len: int = 0,
    ) -> Admitted | None:
        """Lock the longest hit, of at most `max_hit` tokens, and reserve for `reserve_to` tokens;
        None where pages are short.

        keys: what the KV of `tokens` depends on beside them, until the request leaves.
        encoder_len: rows of its encoder, at most max_encoder_len.

        Full groups hold `ahead` more tokens while they are roomy, so that the first output lies
        right behind the prompt.  Windowed groups reserve for the first step only and grow with
        `reserve`.
        """
        assert request_id not in self._entries, f"{request_id} is already admitted"
        if not self._groups:
            self._entries[request_id] = _Entry.of_nothing(keys)
            self._queried_tokens += len(tokens)
            return Admitted(0, ())
        path = self._hit(tokens, keys, max_hit)
        if not all(group.can_admit(path, reserve_to) for group in self._by_length):
            return None
        if not all(group.can_admit(encoder_len) for group in self._encoders):
            return None
        admitted = [group.admit(path, reserve_to, ahead) for group in self._paged]
        states = [group.admit(path, reserve_to) for group in self._states]
        encoders = [group.admit(encoder_len) for group in self._encoders]
        entry = _Entry(
            keys=keys,
            holdings=tuple(holding for holding, _ in admitted),
            states=tuple(holding for holding, _ in states),
            encoders=tuple(holding for holding, _ in encoders),
            hit_pages=len(path),
            tip=path[-1] if path else None,
            num_offered=len(path),
            committed=len(path) * self._page_size,
            crowd=self._crowds.join(path),
        )
        self._note_reserved(entry)
        self._entries[request_id] = entry
        self._queried_tokens += len(tokens)
        self._hit_tokens += entry.committed
        runs = tuple(run for _, run in (*admitted, *states, *encoders) if run.page_ids)
        return Admitted(entry.committed, runs)

    def holds(self, request_id: str, kv_bound: int) -> bool:
        """Whether a request has pages for `kv_bound` tokens already, as in most decode steps."""
        return kv_bound <= self._entries[request_id].reserved

    def reserve(self, request_id: str, kv_bound: int, *, ahead: int) -> list[PageRun] | None:
        """Hold pages for `kv_bound` tokens, and `ahead` more while pools are roomy.

        Returns the new pages, or None where pages are short.
        """
        entry = self._entries[request_id]
        if kv_bound <= entry.reserved:
            return []
        self.offer_written()
        pairs = self._pairs(entry)
        if any(group.shortage(holding, kv_bound) for group, holding in pairs):
            return None
        runs = [group.reserve(holding, kv_bound, ahead) for group, holding in pairs]
        self._note_reserved(entry)
        return [run for run in runs if run is not None]

    def slots(self, request_id: str, *, least: int, most: int, epoch: int) -> list[PageRun]:
        """What of a request's state slots changes with the step `epoch`, behind which `least` to
        `most` of its tokens are computed.  Asked once for each of its steps, in order.
        """
        pairs = self._state_pairs(self._entries[request_id])
        runs = [group.slots(held, least=least, most=most, epoch=epoch) for group, held in pairs]
        return [run for run in runs if run is not None]

    def relief_pending(self, request_id: str, kv_bound: int, *, next_query: int) -> bool:
        """Whether every group too short for `kv_bound` has pages on their way back.

        next_query: the lowest position this request queries once its launched steps have retired.
        """
        self.offer_written()
        pairs = self._pairs(self._entries[request_id])
        return all(
            group.relief_pending(holding, next_query)
            for group, holding in pairs
            if group.shortage(holding, kv_bound)
        )

    def written(
        self,
        request_id: str,
        tokens: Sequence[int],
        kv_len: int,
        *,
        epoch: int,
        state_len: int = 0,
    ) -> None:
        """The retired step `epoch` completed the KV of the first `kv_len` of `tokens`; full pages
        become shareable, by `offer_written` at the latest.  tokens: read then, and may only grow
        until then.  state_len: what its checkpoint slots stand for by the device; 0: unused.
        """
        entry = self._entries[request_id]
        if epoch > self._retired:
            raise IntegrityError.about(
                "the epoch of written KV",
                expected=f"at most {self._retired} (retired)",
                got=epoch,
                remedy="call retire before written",
            )
        num_full = kv_len // self._page_size
        if num_full != entry.committed // self._page_size or kv_len > entry.reserved:
            self._commit(entry, kv_len, epoch)
        else:  # groups count whole pages: they hear of the others with the next that is full
            assert kv_len >= entry.committed, "KV that is written stays"
            entry.committed = kv_len
        if self._states:
            for group, held in self._state_pairs(entry):
                group.landed(held, kv_len=kv_len, state_len=state_len, epoch=epoch)
        if num_full > entry.num_offered and self._enabled:
            self._owed.append(_Owed(entry, tokens, kv_len))
            if self._offers_at_once:
                self.offer_written()

    def offer_written(self) -> None:
        """Put into the prefix tree what `written` and `release` told of, and take back what
        requests that have left hold.

        For before the next step is planned: the pages of a long prompt take longer than all else
        that its first token waits for on the host.  What depends on the tree, or on pages that are
        free, calls this itself.
        """
        owed, self._owed = self._owed, []
        for entry, tokens, kv_len, left in owed:
            if left is None:
                self._offer(entry, tokens, self._num_shareable(tokens, kv_len), adopt=None)
            else:
                self._take_back(entry, tokens, kv_len, epoch=left)

    def stop_following(self, request_id: str, kv_len: int) -> None:
        """The drafter's groups lack the KV of this request behind `kv_len` tokens: what they hold
        there is not offered to the prefix tree."""
        self.offer_written()
        for group, holding in self._pairs(self._entries[request_id]):
            if group.is_draft:
                group.keep_private(holding, kv_len)

    def advance_window(self, request_id: str, lowest_query: int, *, epoch: int) -> None:
        """No launched or future step queries below `lowest_query`; `epoch` is the last that did."""
        if self._windowed:
            for group, holding in self._pairs(self._entries[request_id]):
                group.advance(holding, lowest_query, epoch)

    def release(self, request_id: str, tokens: Sequence[int], kv_len: int, *, epoch: int) -> None:
        """The request leaves.  Retired steps have written the KV of `kv_len` tokens: full pages of
        `tokens` in it, which a host end may have cut, stay in the cache; the rest is free once
        `epoch` has retired.  Both by `offer_written` at the latest; tokens: as of `written`."""
        entry = self._leave(request_id)
        if self._groups:
            self._owed.append(_Owed(entry, tokens, kv_len, left=epoch))
            if self._offers_at_once:
                self.offer_written()

    def _take_back(self, entry: _Entry, tokens: Sequence[int], kv_len: int, *, epoch: int) -> None:
        """Of a request that has left: see `release`."""
        self._commit(entry, max(kv_len, entry.committed), self._retired)
        num_pages = self._num_shareable(tokens, kv_len)
        if self._enabled and num_pages > entry.hit_pages:
            offered = entry.num_offered
            if any(g.has_private(h, offered) for g, h in self._pairs(entry)):
                entry.tip, entry.num_offered = None, 0  # others were first: lock theirs
            self._offer(entry, tokens, num_pages, adopt=epoch)
        self._return(entry, epoch)

    def discard(self, request_id: str, tokens: Sequence[int], *, epoch: int) -> None:
        """The request leaves, and nothing it computed may be found again (non-finite KV)."""
        self.offer_written()
        entry = self._leave(request_id)
        depth = entry.hit_pages + 1
        path = self._tree.walk(tokens, entry.keys, max_pages=depth)
        if len(path) == depth:
            self._tree.detach(path[-1])
        self._return(entry, epoch)

    @property
    def is_crowded(self) -> bool:
        """Whether many admitted requests found the same long prefix."""
        return self._crowds.num_crowds > 0

    def retire(self, epoch: int) -> None:
        """Steps up to `epoch` have run to their end."""
        self._retired = max(self._retired, epoch)
        for group in self._groups:
            group.retire(epoch)

    def stats(self) -> CacheStats:
        """Totals and books."""
        self.offer_written()
        return CacheStats(
            names=tuple(group.name for group in self._groups),
            groups=tuple(group.pool.counts() for group in self._groups),
            queried_tokens=self._queried_tokens,
            hit_tokens=self._hit_tokens,
            evicted_pages=self._tree.num_evicted,
        )

    def check_integrity(self) -> None:
        """Raise IntegrityError unless pools, tree and requests tell the same story."""
        self.offer_written()
        held = [self._in_order(entry) for entry in self._entries.values()]
        check_books(self._tree, self._groups, held)

    def _leave(self, request_id: str) -> _Entry:
        entry = self._entries.pop(request_id)
        self._crowds.leave(entry.crowd)
        return entry

    def _hit(self, tokens: Sequence[int], keys: PageKeys, max_hit: int | None = None) -> list[Node]:
        self.offer_written()
        if not self._enabled:
            return []
        limit = max(len(tokens) - 1, 0) // self._page_size
        if max_hit is not None:
            limit = min(limit, max_hit // self._page_size)
        path = self._tree.walk(tokens, keys, max_pages=limit)
        length, before = len(path), -1
        while length != before:
            before = length
            for group in self._by_length:
                length = group.usable_prefix(path, length)
            if keys.blocks is not None:
                length = keys.blocks.whole(length * self._page_size) // self._page_size
        return path[:length]

    def _commit(self, entry: _Entry, kv_len: int, epoch: int) -> None:
        assert kv_len >= entry.committed, "KV that is written stays"
        for group, holding in self._pairs(entry):
            group.commit(holding, kv_len, epoch)
        entry.committed = kv_len

    def _offer(
        self, entry: _Entry, tokens: Sequence[int], num_pages: int, *, adopt: int | None
    ) -> None:
        """Offer written pages [num_offered, num_pages) to the tree, below the tip."""
        if not self._enabled or num_pages <= entry.num_offered:
            return
        if entry.tip is None or not entry.tip.alive:
            entry.tip, entry.num_offered = self._tree.root(entry.keys), 0
        start, path = entry.num_offered, [entry.tip]
        for index in range(start, num_pages):
            key = self._tree.key(tokens, index, entry.keys)
            path.append(self._tree.child(path[-1], key))
        for group, holding in self._pairs(entry):
            group.share(holding, start, path, adopt=adopt)
        for states, slots in self._state_pairs(entry):
            states.share(slots, start, path)
        entry.tip, entry.num_offered = path[-1], num_pages
        self._tree.prune(entry.tip)

    def _num_shareable(self, tokens: Sequence[int], kv_len: int) -> int:
        """Full pages of the first `kv_len` tokens; that all they depend on is known, too."""
        return min(kv_len // self._page_size, self._tree.num_whole(len(tokens)))

    def _pairs(self, entry: _Entry) -> list[tuple[PagedGroup, Holding]]:
        return list(zip(self._paged, entry.holdings, strict=True))

    def _state_pairs(self, entry: _Entry) -> Iterator[tuple[StateGroup, StateHolding]]:
        return zip(self._states, entry.states, strict=True)

    def _encoder_pairs(self, entry: _Entry) -> Iterator[tuple[EncoderGroup, EncoderHolding]]:
        return zip(self._encoders, entry.encoders, strict=True)

    def _in_order(self, entry: _Entry) -> list[Held]:
        """[num_groups]"""
        held: dict[int, Held] = {g.index: h for g, h in self._pairs(entry)}
        held.update({group.index: slots for group, slots in self._state_pairs(entry)})
        held.update({group.index: rows for group, rows in self._encoder_pairs(entry)})
        return [held[index] for index in range(len(self._groups))]

    def _return(self, entry: _Entry, epoch: int) -> None:
        for group, holding in self._pairs(entry):
            group.release(holding, epoch)
        for states, slots in self._state_pairs(entry):
            states.release(slots, epoch)
        for encoders, rows in self._encoder_pairs(entry):
            encoders.release(rows, epoch)

    def _note_reserved(self, entry: _Entry) -> None:
        entry.reserved = min(
            (group.reserved(holding) for group, holding in self._pairs(entry)), default=_ANY_LENGTH
        )
