"""Groups and pins through the bindings: one call for all groups of a request, and refusals."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from vllm_tagma._native import BlockRanges, Pool
from vllm_tagma.group_spec import GroupSpec

NOTHING = BlockRanges()
KEYS = [i.to_bytes(4, "big") * 8 for i in range(1, 60)]
FULL_AND_WINDOW = (GroupSpec(), GroupSpec("window", window_blocks=2))


def need(blocks: int, *, hit: BlockRanges = NOTHING, skip: int = 0, publish: int = 0) -> tuple:
    """One group's part of ``admit``."""
    return (hit, blocks, 0, blocks, blocks + 8, skip, publish, KEYS)


def more(blocks: int) -> tuple[Any, ...]:
    """One group's part of ``grow``."""
    return (blocks, 0, blocks, blocks + 8, 0, 0, KEYS)


@pytest.fixture
def pool() -> Pool:
    pool = Pool(41, record_evictions=True, groups=FULL_AND_WINDOW)
    pool.begin_step()
    return pool


def test_groups_take_from_one_pool_after_one_check(pool: Pool) -> None:
    row, (full, window) = pool.admit(0, 0, *need(20), *need(20))
    assert (len(full), len(window), pool.num_free) == (20, 20, 0)
    assert set(full.ids()).isdisjoint(window.ids())
    pool.free(row)
    assert pool.admit(0, 0, *need(20), *need(21)) is None
    assert pool.admit(1, 0, *need(20), *need(20)) is None
    assert pool.num_free == 40
    row, _ = pool.admit(0, 0, *need(10), *need(10))
    assert pool.grow(row, 0, 0, *more(20), *more(21)) is None
    assert [len(b) for b in pool.grow(row, 0, 0, *more(30), *more(10))] == [20, 0]
    pool.check_invariants()


def test_a_group_finds_its_own_blocks_only(pool: Pool) -> None:
    row, (full, window) = pool.admit(0, 0, *need(6, publish=4), *need(6, publish=6))
    assert pool.lookup(KEYS, 6).ids() == full.ids()[:4]
    assert pool.lookup(KEYS, 6, 1).ids() == [0, 0, 0, 0, *window.ids()[4:]]
    assert pool.lookup(KEYS, 5, 1).ids() == [0, 0, 0, *window.ids()[3:5]]
    assert pool.lookup(KEYS, 1, 1).ids() == window.ids()[:1]  # shorter than the window: all of it
    pool.evict([window.ids()[4]])
    assert pool.lookup(KEYS, 6, 1).ids() == [0, 0, *window.ids()[2:4]]
    assert pool.take_evicted() == [(window.ids()[4], 1, KEYS[4])]
    assert pool.num_published(row) == 4
    assert pool.num_published(row, 1) == 6


def test_a_window_row_begins_and_goes_on_with_null_blocks(pool: Pool) -> None:
    first, _ = pool.admit(0, 0, *need(6, publish=6), *need(6, publish=6))
    pool.end_scheduling()
    pool.free(first)
    pool.begin_step()
    hits = [pool.lookup(KEYS, 6, group) for group in (0, 1)]
    row, (_, window) = pool.admit(0, 0, *need(8, hit=hits[0]), *need(8, hit=hits[1], skip=4))
    assert pool.row_blocks(row, 1).ids() == [*hits[1].ids(), *window.ids()]
    live = pool.stats()["live_blocks"]
    pool.skip(row, 6, 1)
    assert pool.row_blocks(row, 1).ids() == [0] * 6 + window.ids()
    assert pool.stats()["live_blocks"] == live - 2
    with pytest.raises(ValueError, match="skip 9 blocks of a row of 8"):
        pool.skip(row, 9, 1)
    fresh, (_, third) = pool.admit(0, 0, *need(3), *need(3, skip=2))
    assert pool.row_blocks(fresh, 1).ids() == [0, 0, *third.ids()]
    assert len(third) == 1
    pool.check_invariants()


def test_blocks_that_are_passed_over_stay_out_of_the_cache(pool: Pool) -> None:
    row, (_, window) = pool.admit(0, 0, *need(8), *need(8))
    ids = window.ids()
    pool.pass_over(row, 2, 1)
    pool.publish(row, 4, KEYS, 1)
    pool.pass_over(row, 3, 1)  # less than is published: nothing
    assert pool.num_published(row, 1) == 4
    pool.pass_over(row, 7, 1)
    pool.publish(row, 8, KEYS, 1)
    assert pool.num_published(row, 1) == 8
    assert pool.num_published(row) == 0  # the other group's row is its own
    pool.check_invariants()
    assert pool.lookup(KEYS, 8, 1).ids() == [0, 0, *ids[2:4]]
    assert len(pool.lookup(KEYS, 3, 1)) == 0
    for blocks in (-1, 9):
        with pytest.raises(ValueError, match=f"pass over {blocks} blocks of a row of 8"):
            pool.pass_over(row, blocks, 1)
    pool.end_scheduling()
    pool.free(row)
    assert pool.stats()["idle_blocks"] == 3
    pool.check_invariants()


def test_preemption_withdraws_what_was_published_around_a_gap(pool: Pool) -> None:
    row, _ = pool.admit(0, 0, *need(8), *need(8))
    pool.publish(row, 2, KEYS, 1)
    pool.begin_step()
    pool.pass_over(row, 4, 1)
    pool.publish(row, 6, KEYS, 1)
    pool.free(row)
    assert pool.lookup(KEYS, 8, 1).num_ranges == 1
    assert len(pool.lookup(KEYS, 8, 1)) == 2
    assert pool.stats()["idle_blocks"] == 2
    pool.check_invariants()


def test_row_updates_name_the_group(pool: Pool) -> None:
    row, (full, window) = pool.admit(0, 0, *need(4), *need(4))
    assert pool.take_row_updates() == [(row, 0, 0, full), (row, 1, 0, window)]
    full, window = pool.grow(row, 0, 0, *more(4), *more(5))
    assert pool.take_row_updates() == [(row, 1, 4, window)]
    pool.skip(row, 2, 1)  # nobody reads there any more: nothing to tell
    assert pool.take_row_updates() == []


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([], "a pool without groups"),
        ([("other", 1, 1)], "group kind 'other' is none of prefix, window, state"),
        ([("window", 0, 1)], "window_blocks=0 is below 1"),
        ([("prefix", 2, 1)], "window_blocks=2 in a group without a window"),
        ([("state", 1, 0)], "align_blocks=0 is below 1"),
        ([("prefix", 1, 1)] * 257, "groups=257 is outside 1 to 256"),
    ],
)
def test_groups_that_make_no_sense_are_refused(groups: list[Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pool(40, groups=groups)


def test_calls_that_name_no_group_of_the_pool_are_refused(pool: Pool) -> None:
    row, _ = pool.admit(0, 0, *need(4), *need(4))
    before = pool.stats()
    for call in (
        lambda: pool.lookup(KEYS, 4, 2),
        lambda: pool.row_blocks(row, -1),
        lambda: pool.num_published(row, 2),
        lambda: pool.publish(row, 2, KEYS, 2),
        lambda: pool.skip(row, 1, 2),
        lambda: pool.pin(row, 0, 1, 2),
        lambda: pool.relocate(row, 0, 1, 2),
    ):
        with pytest.raises(ValueError, match=r"group -?\d is outside \[0, 2\)"):
            call()
    with pytest.raises(TypeError, match="takes 18 arguments"):
        pool.admit(0, 0, *need(4))
    with pytest.raises(ValueError, match="1 null blocks where none can be"):
        pool.admit(0, 0, *need(4, hit=BlockRanges([(0, 1)])), *need(4))
    assert pool.stats() == before


# --- pins -----------------------------------------------------------------------------------------


def test_pinned_blocks_stay_whoever_frees_them() -> None:
    pool = Pool(21, compaction="live", copy_budget=100)
    pool.begin_step()
    row, (blocks,) = pool.admit(0, 0, *need(8, publish=8))
    pin = pool.pin(row, 2, 5)
    again = pool.pin(row, 4, 6)
    pool.end_scheduling()
    pool.begin_step()
    assert not pool.relocate(row, 2, 5)
    assert pool.relocate(row, 0, 2)
    pool.end_scheduling()
    pool.free(row)
    assert pool.num_free == 20 - 4
    assert pool.stats()["pinned_blocks"] == 4
    pool.begin_step()
    assert pool.admit(0, 0, *need(17)) is None
    other, (taken,) = pool.admit(0, 0, *need(16))  # everything else, caches included
    assert set(taken.ids()).isdisjoint(blocks.ids()[2:6])
    pool.unpin(pin)
    assert pool.num_free == 2
    pool.unpin(again)
    assert pool.num_free == 4
    with pytest.raises(ValueError, match=f"pin {pin} is not held"):
        pool.unpin(pin)
    pool.check_invariants()
    pool.free(other)


def test_cached_blocks_can_be_pinned_and_free_ones_cannot() -> None:
    pool = Pool(11)
    pool.begin_step()
    row, (blocks,) = pool.admit(0, 0, *need(4, publish=4))
    pool.end_scheduling()
    pool.free(row)
    pin = pool.pin_blocks(pool.lookup(KEYS, 4))
    assert not pool.reset()
    pool.begin_step()
    assert pool.admit(0, 0, *need(7)) is None
    pool.unpin(pin)
    assert pool.reset()
    with pytest.raises(ValueError, match="is free"):
        pool.pin_blocks(blocks)
    with pytest.raises(TypeError, match="expected BlockRanges"):
        pool.pin_blocks([1, 2])
    assert pool.stats()["pins"] == 0


def test_group_specs_survive_a_pickle() -> None:
    """They are part of a configuration that crosses processes."""
    assert pickle.loads(pickle.dumps(FULL_AND_WINDOW)) == FULL_AND_WINDOW


def test_an_argument_that_calls_the_pool_spoils_no_other_call(pool: Pool) -> None:
    row, _ = pool.admit(0, 0, *need(1), *need(1))
    inner: list[Any] = []

    class Calling:
        def __init__(self, call: Any) -> None:
            self.call = call

        def __index__(self) -> int:
            inner.append(self.call())
            return 2

    def admits() -> Any:
        return pool.admit(0, 0, *need(1), *need(1))

    def grows() -> Any:
        return pool.grow(row, 0, 0, *more(2), *more(2))

    full = (NOTHING, 4, 0, 4, 12, 0, 4, KEYS)
    for call in (admits, grows):
        for at in range(1, 7):
            window = [*full]
            window[at] = Calling(call)
            with pytest.raises(ValueError, match="called by one of its arguments"):
                pool.admit(0, 0, *full, *window)
        for at in range(6):
            window = [8, 0, 8, 16, 0, 4, KEYS]
            window[at] = Calling(call)
            with pytest.raises(ValueError, match="called by one of its arguments"):
                pool.grow(row, 0, 0, 8, 0, 8, 16, 0, 4, KEYS, *window)
    assert len(inner) == 24
    assert None not in inner
    assert len(pool.row_blocks(row)) == 2
    assert pool.lookup(KEYS, 9) == NOTHING
    pool.check_invariants()


def test_a_list_of_hashes_is_read_after_all_numbers(pool: Pool) -> None:
    hashes = list(KEYS)

    class Replacing:
        def __index__(self) -> int:
            hashes[:4] = KEYS[10:14]
            return 4

    row, (full, _) = pool.admit(
        0, 0, NOTHING, 4, 0, 4, 12, 0, 4, hashes, *need(4)[:5], Replacing(), 0, KEYS
    )
    assert pool.lookup(KEYS, 4) == NOTHING
    assert pool.lookup(KEYS[10:], 4) == full
    pool.free(row)
    pool.check_invariants()


def test_null_blocks_behind_a_hit_count_against_the_cap() -> None:
    pool = Pool(40, max_ranges=2, groups=(GroupSpec("window", window_blocks=2),))
    pool.begin_step()
    pool.admit(0, 0, *need(6, publish=6))
    hit = BlockRanges([(1, 1), (3, 1)])
    free = pool.num_free
    with pytest.raises(ValueError, match="a hit of 3 ranges with its nulls, above the cap of 2"):
        pool.admit(0, 0, *need(4, hit=hit, skip=4))
    assert pool.num_free == free
    row, _ = pool.admit(0, 0, *need(2, hit=hit, skip=2))
    assert pool.row_blocks(row) == hit
    pool.check_invariants()


def test_a_pool_that_cannot_publish_does_not_grow_a_row_first() -> None:
    pool = Pool(64, alignment=2)
    row, _ = pool.admit(0, 0, *need(2))
    with pytest.raises(ValueError, match="publish in a pool with alignment 2"):
        pool.grow(row, 0, 0, 4, 0, 4, 12, 0, 2, KEYS)
    assert len(pool.row_blocks(row)) == 2
    with pytest.raises(ValueError, match="publish in a pool with alignment 2"):
        pool.admit(0, 0, *need(4, publish=4))
    assert pool.stats()["rows"] == 1
