"""STATE groups: which slots a request reads and writes, and which states others find."""

from dataclasses import replace

import pytest

from cache_probe import cached_len
from paceline.cache.groups import PageRun
from paceline.cache.manager import CacheManager
from paceline.core.errors import ConfigError, IntegrityError
from paceline.core.model.cache_groups import CHECKPOINT, READ, CacheGroupSpec
from paceline.core.model.config import CacheKind, RowPart, kv_parts

EVERY, PAGE = 8, 4
STATE = 1  # the group's index


def full_spec() -> CacheGroupSpec:
    return CacheGroupSpec(
        name="full", layer_ids=(0,), window=None, page_size=PAGE, parts=kv_parts(1, 8, 8)
    )


def state_spec(every: int | None = EVERY, kind: CacheKind = CacheKind.STATE) -> CacheGroupSpec:
    parts = (RowPart("state", (2, 3), dtype="float32"), RowPart("conv", (5,)))
    return CacheGroupSpec(
        name="state",
        layer_ids=(1, 2),
        window=None,
        page_size=PAGE,
        parts=parts,
        kind=kind,
        state_every=every,
    )


def make_cache(num_slots: int = 8, *, enabled: bool = True) -> CacheManager:
    return CacheManager(
        [full_spec(), state_spec()],
        [65, num_slots],
        max_extend_len=16,
        enable_prefix_cache=enabled,
    )


class Run:
    """One request that is computed step by step, with the device's word on each."""

    def __init__(self, cache: CacheManager, name: str, tokens: list[int], epoch: int = 0) -> None:
        admission = cache.admit(name, tokens, reserve_to=len(tokens) + 32)
        assert admission is not None
        self.cache, self.name, self.tokens = cache, name, tokens
        self.group = len(cache.stats().groups) - 1
        self.kv_len, self.epoch = admission.prefix_len, epoch
        self.table = [0, 0, 0]
        self.apply(admission.page_runs)

    def apply(self, runs) -> None:
        for run in runs:
            if run.group == self.group:
                self.table[run.start : run.start + len(run.page_ids)] = run.page_ids

    def step(self, length: int, *, state_len: int | None = None) -> list[PageRun]:
        """Plan a step and retire it; state_len: what the device says, where it is another one."""
        self.epoch += 1
        end = self.kv_len + length
        runs = self.cache.slots(self.name, least=end, most=end, epoch=self.epoch)
        self.apply(runs)
        self.kv_len = end
        self.cache.retire(self.epoch)
        if state_len is None:
            state_len = end if end % EVERY == 0 and self.table[CHECKPOINT] else 0
        self.cache.written(self.name, self.tokens, end, epoch=self.epoch, state_len=state_len)
        self.cache.check_integrity()
        return runs

    def leave(self) -> None:
        self.cache.release(self.name, self.tokens, self.kv_len, epoch=self.epoch)
        self.cache.check_integrity()


def test_a_prefix_is_found_where_a_state_was_kept_and_nowhere_else():
    cache = make_cache()
    run = Run(cache, "a", list(range(30)))
    for length in (6, 2, 7, 5):  # ends at 6, 8, 15 and 20: 16 is passed over
        run.step(length)
    assert cached_len(cache, list(range(30))) == 8
    assert cached_len(cache, [*range(9), 99]) == 8
    assert cached_len(cache, [*range(7), 99, 98, 97]) == 0  # its first page alone is known


def test_a_hit_leaves_a_token_so_that_a_prompt_of_just_the_boundary_starts_before_it():
    cache = make_cache()
    run = Run(cache, "a", list(range(30)))
    for _ in range(2):
        run.step(8)
    assert cached_len(cache, list(range(17))) == 16
    assert cached_len(cache, list(range(16))) == 8
    assert cached_len(cache, list(range(8))) == 0


def test_a_hit_reads_the_slot_of_the_tree_once_and_writes_its_own():
    cache = make_cache()
    first = Run(cache, "a", list(range(20)))
    own = first.table[1]
    assert first.table[READ] == 0  # of no tokens: zeros
    first.step(8)
    kept = first.table[CHECKPOINT]
    first.step(4)
    assert first.table[:2] == [own, own]

    second = Run(cache, "b", list(range(20)), epoch=first.epoch)
    assert second.kv_len == 8
    assert second.table[READ] == kept
    assert second.table[1] not in (0, own, kept)
    assert cache.stats().groups[STATE].cached == 1
    second.step(4)
    assert second.table[READ] == kept
    second.step(1)
    assert second.table[READ] == second.table[1]


def test_the_slot_of_a_hit_is_not_evicted_before_the_step_that_reads_it_has_retired():
    cache = make_cache(num_slots=5)  # four to give
    first = Run(cache, "a", list(range(20)))
    first.step(8)
    first.step(4)
    first.leave()
    second = Run(cache, "b", list(range(20)), epoch=first.epoch)
    others = [cache.admit(f"c{i}", [50 + i] * 9, reserve_to=9) for i in range(3)]
    assert [admission is not None for admission in others] == [True, True, False]
    second.step(4)
    assert cache.admit("c2", [52] * 9, reserve_to=9) is not None
    assert cached_len(cache, list(range(20))) == 0  # evicted
    cache.check_integrity()


def test_the_state_of_a_hit_is_no_room_for_who_starts_from_it():
    cache = make_cache(num_slots=3)  # two to give
    first = Run(cache, "a", list(range(20)))
    first.step(8)
    first.leave()
    second = Run(cache, "b", list(range(20)), epoch=first.epoch)
    second.step(4)  # its rows of the hit are locked, the state of it no longer
    assert cache.admit("c", list(range(20)), reserve_to=20) is None
    assert cached_len(cache, list(range(20))) == 8


def test_a_hit_that_is_locked_already_takes_no_room_from_the_next():
    cache = make_cache(num_slots=4)
    first = Run(cache, "a", list(range(20)))
    first.step(8)
    first.leave()
    Run(cache, "b", list(range(20)), epoch=first.epoch)
    assert cache.admit("c", list(range(20)), reserve_to=20) is not None


def test_no_state_goes_while_slots_are_free():
    cache = make_cache(num_slots=4)
    first = Run(cache, "a", list(range(20)))
    first.step(8)
    first.leave()
    for index in range(2):
        assert cache.admit(f"c{index}", [50 + index] * 9, reserve_to=9) is not None
        assert cached_len(cache, list(range(20))) == 8


def test_of_two_who_compute_one_prefix_the_second_gives_its_state_back():
    cache = make_cache()
    runs = [Run(cache, name, list(range(20))) for name in "ab"]
    for run in runs:
        run.epoch = max(each.epoch for each in runs)
        run.step(8)
    stats = cache.stats().groups[STATE]
    assert (stats.owned, stats.cached, stats.free) == (2, 1, 4)


def test_a_state_waits_until_all_tokens_before_it_are_known():
    cache = make_cache()
    run = Run(cache, "a", list(range(6)))  # the host lags behind what is computed
    run.step(8)
    assert cached_len(cache, list(range(20))) == 0
    run.tokens = list(range(20))
    run.step(4)
    assert cached_len(cache, list(range(20))) == 8


def test_a_state_behind_a_page_that_was_offered_before_is_free_again():
    cache = make_cache()
    run = Run(cache, "a", list(range(20)))
    run.step(8)
    (group,), (held,) = cache._states, cache._entries["a"].states
    (slot,) = group.pool.reserve(1)
    group.pool.mark_written([slot], run.epoch)
    held.landed[1] = slot
    run.step(8)
    assert cache.stats().groups[STATE].free == 7 - 3  # its own, and two that were kept


def test_who_left_holds_nothing():
    cache = make_cache()
    first = Run(cache, "a", list(range(20)))
    first.step(8)
    second = Run(cache, "b", list(range(20)), epoch=first.epoch)
    (held,) = cache._entries["b"].states
    cache.slots("b", least=16, most=16, epoch=second.epoch + 1)
    held.landed[3] = held.taken.pop(second.epoch + 1)
    cache.slots("b", least=24, most=24, epoch=second.epoch + 2)
    assert (held.num_private, len(held.locked)) == (3, 1)
    second.leave()
    assert (held.num_private, held.locked) == (0, [])


@pytest.mark.parametrize("every", [PAGE, EVERY])
def test_a_state_behind_the_first_page_is_found(every):
    cache = CacheManager([full_spec(), state_spec(every)], [65, 8], max_extend_len=16)
    run = Run(cache, "a", list(range(20)))
    run.step(every, state_len=every)
    assert cached_len(cache, list(range(20))) == every


def test_a_step_that_may_end_on_a_boundary_has_a_slot_and_gives_it_back_unused():
    cache = make_cache()
    run = Run(cache, "a", list(range(40)))
    run.step(6)
    free = cache.stats().groups[STATE].free
    runs = cache.slots("a", least=7, most=10, epoch=9)  # of a round that emits 1 to 4
    assert [run.start for run in runs] == [READ]
    assert len(runs[0].page_ids) == 3
    assert cache.stats().groups[STATE].free == free - 1
    cache.retire(9)
    cache.written("a", list(range(40)), 9, epoch=9, state_len=0)
    assert cache.stats().groups[STATE].free == free
    assert cache.slots("a", least=10, most=14, epoch=10) == []
    cache.check_integrity()


def test_no_state_is_published_under_another_length():
    run = Run(make_cache(), "a", list(range(30)))
    with pytest.raises(
        IntegrityError,
        match=r"the length that checkpoint slot 2 of cache group 'state' stands for must be 8, a "
        r"multiple of 8, where the step had such a slot, got 12; publish a state under the length",
    ):
        run.step(8, state_len=12)


def test_without_room_a_request_goes_on_without_a_checkpoint():
    cache = make_cache(num_slots=3)
    run, other = Run(cache, "a", list(range(30))), Run(cache, "b", [77] * 9)
    run.step(8)
    assert run.table[CHECKPOINT] == 0
    assert cached_len(cache, list(range(30))) == 0
    other.leave()
    run.step(8)
    assert cached_len(cache, list(range(30))) == 16


def test_who_was_preempted_starts_again_from_its_longest_state():
    cache = make_cache()
    run = Run(cache, "a", list(range(40)))
    for length in (8, 8, 3):
        run.step(length)
    run.leave()
    assert cache.stats().groups[STATE].owned == 0
    again = Run(cache, "a", list(range(40)), epoch=run.epoch)
    assert again.kv_len == 16


def test_without_a_prefix_cache_nothing_is_kept():
    cache = make_cache(enabled=False)
    run = Run(cache, "a", list(range(30)))
    assert cache.chunk_len(0, 30) == 30
    run.step(8)
    assert run.table[CHECKPOINT] == 0
    assert cache.can_ever_fit(40).needed[STATE] == 1


@pytest.mark.parametrize("page", [PAGE, EVERY])
def test_where_no_layer_keeps_rows_the_tree_has_what_leads_to_a_state_and_no_more(page):
    cache = CacheManager([replace(state_spec(), page_size=page)], [6], max_extend_len=16)
    run = Run(cache, "a", list(range(40)))
    for length in (8, 5, 3, 8, 3):  # 27: the last 3 lead to no state
        run.step(length)
        assert len(list(cache._tree.nodes())) == 1 + run.kv_len // EVERY * EVERY // page
    assert cached_len(cache, list(range(40))) == 24
    assert cached_len(cache, [*range(20), 99, *range(20)]) == 16
    assert cache.holds("a", 10**6)
    run.leave()
    second = Run(cache, "b", list(range(27)), epoch=run.epoch)
    assert second.kv_len == 24
    second.step(2)
    cache.discard("b", second.tokens, epoch=second.epoch)
    others = [cache.admit(f"c{i}", [50 + i] * 9, reserve_to=9) for i in range(5)]
    assert None not in others  # they evict all states
    assert cached_len(cache, list(range(40))) == 0
    assert list(cache._tree.nodes()) == []
    cache.check_integrity()


def test_a_cache_of_states_alone_is_too_small_without_one_to_start_from():
    cache = CacheManager([state_spec()], [2], max_extend_len=16)
    assert cache.can_ever_fit(40) == (False, (2,), (1,))


def test_prompts_are_cut_where_a_state_can_be_kept():
    cache = make_cache()
    assert [cache.chunk_len(start, 30) for start in (0, 5, 8, 15)] == [8, 3, 8, 1]
    assert cache.chunk_len(9, 2) == 2
    assert not cache.shares(8)
    assert cache.shares(9)


@pytest.mark.parametrize("every", [None, 0, 6, -4])
def test_an_interval_that_is_no_multiple_of_the_page_size_is_refused(every):
    with pytest.raises(
        ConfigError,
        match=rf"state_every of cache group 'state' must be a positive multiple of the page size, "
        rf"4, got {every}; the prefix tree finds states at the ends of its pages",
    ):
        state_spec(every)


def test_a_group_of_tokens_has_no_interval():
    with pytest.raises(ConfigError, match="must be None: it holds every row, got 8;"):
        state_spec(8, kind=CacheKind.TOKENS)


def test_states_are_kept_at_one_interval():
    with pytest.raises(
        ConfigError, match=r"state_every of the cache groups must be one interval for all, got \[4,"
    ):
        CacheManager([state_spec(4), state_spec(8)], [4, 4], max_extend_len=4)


def test_a_slot_takes_the_bytes_of_its_parts_and_of_its_length():
    numbers = 2 * 3 * 4 + 5 * 2  # the state is float32, the rest as wide as the cache
    assert state_spec().page_bytes(2) == 2 * numbers + 4
