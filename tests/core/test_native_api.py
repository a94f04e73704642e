"""The native module's manners: what it refuses and how, and that it neither leaks nor shares.

A refused call raises before anything has changed; `unchanged` compares the pool before and after.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from one_group import admit_one, grow_one

from vllm_tagma import _native
from vllm_tagma._native import BlockRanges, CoordMap, Pool

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1
HASHES = [i.to_bytes(4, "big") * 8 for i in range(1, 40)]


def admit(pool: Pool, blocks: int, *, publish: int = 0, hit: BlockRanges | None = None) -> int:
    """Opens a row that must fit and returns its handle."""
    hit = BlockRanges() if hit is None else hit
    given = admit_one(pool, hit, blocks, 0, 0, 0, blocks, blocks, publish, HASHES)
    assert given is not None
    return given[0]


def snapshot(pool: Pool) -> tuple[object, ...]:
    pool.check_invariants()
    blocks = range(1, pool.num_blocks)
    return (
        {k: v for k, v in pool.stats().items() if k != "memory_bytes"},
        pool.holes(),
        [(pool.request_refs(b), pool.is_cached(b)) for b in blocks],
        pool.lookup(HASHES, 40),
    )


@contextmanager
def unchanged(pool: Pool) -> Iterator[None]:
    before = snapshot(pool)
    yield
    assert snapshot(pool) == before


@pytest.fixture
def pool() -> Pool:
    """A live cached row of 4, an idle cached block and holes, in a pool of 19."""
    pool = Pool(20, record_evictions=True)
    admit(pool, 4, publish=4)
    return pool


# --- construction -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "kwargs", "error"),
    [
        ((), {}, TypeError),
        (("10",), {}, TypeError),
        ((10.0,), {}, TypeError),
        ((None,), {}, TypeError),
        ((10,), {"alignement": 1}, TypeError),
        ((10,), {"alignment": 1.5}, TypeError),
        ((10, 1), {}, TypeError),
        ((2**40,), {}, OverflowError),
        ((-(2**40),), {}, OverflowError),
        ((0,), {}, ValueError),
        ((1,), {}, ValueError),
        ((-5,), {}, ValueError),
        ((10,), {"alignment": 0}, ValueError),
        ((10,), {"alignment": -1}, ValueError),
        ((10,), {"alignment": 10}, ValueError),
        ((10,), {"max_ranges": 0}, ValueError),
    ],
)
def test_pool_refuses_bad_constructor_arguments(args, kwargs, error) -> None:
    with pytest.raises(error):
        Pool(*args, **kwargs)


def test_pool_names_the_value_in_its_errors() -> None:
    with pytest.raises(ValueError, match="num_blocks=1 leaves nothing to allocate"):
        Pool(1)
    with pytest.raises(ValueError, match="max_ranges=-3 is below 1"):
        Pool(10, max_ranges=-3)


# --- arguments of calls -----------------------------------------------------------------------

CALLS = [
    ("lookup", {2, 3}),
    ("admit", {10}),
    ("grow", {10}),
    ("publish", {3, 4}),
    ("pass_over", {2, 3}),
    ("skip", {2, 3}),
    ("row_blocks", {1, 2}),
    ("num_published", {1, 2}),
    ("pin", {3, 4}),
    ("relocate", {3, 4}),
]


@pytest.mark.parametrize(("name", "fitting"), CALLS)
def test_wrong_number_of_arguments(pool: Pool, name: str, fitting: set[int]) -> None:
    call: Callable[..., object] = getattr(pool, name)
    for got in set(range(max(fitting) + 2)) - fitting:
        with unchanged(pool), pytest.raises(TypeError, match=rf"takes {max(fitting)} arguments"):
            call(*([0] * got))


@pytest.mark.parametrize("position", range(6))
@pytest.mark.parametrize(
    ("bad", "error"),
    [
        (-1, ValueError),
        (-(2**31), ValueError),
        (2**31, ValueError),
        (2**63, OverflowError),
        (1.0, TypeError),
        ("1", TypeError),
        (None, TypeError),
    ],
)
def test_demands_are_checked(pool: Pool, position: int, bad: object, error: type) -> None:
    row = admit(pool, 2)
    demand: list[object] = [3, 3, 0, 0, 3, 3]
    demand[position] = bad
    with unchanged(pool):
        with pytest.raises(error):
            admit_one(pool, BlockRanges(), *demand, 0, [])
        with pytest.raises(error):
            grow_one(pool, row, *demand, 0, [])


def test_demands_that_no_pool_can_meet_are_none_and_do_not_wrap_around(pool: Pool) -> None:
    row = admit(pool, 2)
    big = INT32_MAX
    with unchanged(pool):
        for demand in ((big, 0, 0, 0), (3, big, 0, 0), (3, 0, big, 0), (3, 0, 0, big), (big,) * 4):
            assert admit_one(pool, BlockRanges(), *demand, 0, 0, 0, []) is None
            assert grow_one(pool, row, *demand, 0, 0, 0, []) is None


@pytest.mark.parametrize("hashes", [tuple(HASHES), iter(HASHES), None, b"abc", "abc", {}])
def test_hashes_must_be_a_list(pool: Pool, hashes: object) -> None:
    with unchanged(pool):
        with pytest.raises(TypeError, match="must be a list of bytes"):
            pool.lookup(hashes, 3)
        with pytest.raises(TypeError, match="must be a list of bytes"):
            admit_one(pool, BlockRanges(), 2, 0, 0, 0, 2, 2, 2, hashes)


@pytest.mark.parametrize(
    ("bad", "error"),
    [
        ("x" * 32, TypeError),
        (7, TypeError),
        (None, TypeError),
        (bytearray(32), TypeError),
        (b"", ValueError),
        (b"x" * 31, ValueError),
        (b"x" * 33, ValueError),
    ],
)
def test_hashes_of_a_wrong_kind_change_nothing(pool: Pool, bad: object, error: type) -> None:
    row = admit(pool, 2)
    hashes = [*HASHES[20:22], bad, *HASHES[23:]]
    with unchanged(pool):
        with pytest.raises(error):
            admit_one(pool, BlockRanges(), 4, 0, 0, 0, 4, 4, 4, hashes)
        # Refused before the row grows: its owner would not learn of the blocks.
        with pytest.raises(error):
            grow_one(pool, row, 5, 0, 0, 0, 5, 5, 5, hashes)
        with pytest.raises(error):
            pool.lookup([bad], 1)
    assert len(pool.row_blocks(row)) == 2
    assert pool.num_published(row) == 0


@pytest.mark.parametrize("length", [1, 2, 4, 8, 9, 16, 20, 32])
def test_the_first_hash_fixes_the_length(length: int) -> None:
    pool = Pool(20)
    keys = [bytes([i]) * length for i in range(4)]
    given = admit_one(pool, BlockRanges(), 4, 0, 0, 0, 4, 4, 4, keys)
    assert given is not None
    assert pool.lookup(keys, 9).ids() == given[1].ids()
    with pytest.raises(ValueError, match=f"this pool's have {length}"):
        pool.lookup([bytes(length % 32 + 1)], 1)


@pytest.mark.parametrize("length", [0, 65, 128])
def test_a_first_hash_of_impossible_length_fixes_nothing(length: int) -> None:
    pool = Pool(20)
    with unchanged(pool), pytest.raises(ValueError, match="block hash of"):
        admit_one(pool, BlockRanges(), 1, 0, 0, 0, 1, 1, 1, [bytes(length)])
    admit(pool, 2, publish=2)
    assert len(pool.lookup(HASHES, 9)) == 2


def test_publishing_beyond_the_row_changes_nothing(pool: Pool) -> None:
    row = admit(pool, 2)
    with unchanged(pool):
        with pytest.raises(ValueError, match="publish 3 blocks of a row of 2"):
            pool.publish(row, 3, HASHES[10:])
        with pytest.raises(ValueError, match="publish 5 blocks of a row of 3"):
            grow_one(pool, row, 3, 0, 0, 0, 3, 3, 5, HASHES[10:])
        with pytest.raises(ValueError, match="publish 5 blocks of a row of 3"):
            admit_one(pool, BlockRanges(), 3, 0, 0, 0, 3, 3, 5, HASHES[10:])


def test_fewer_hashes_than_blocks_publish_what_there_is(pool: Pool) -> None:
    row = admit(pool, 4)
    pool.publish(row, 4, HASHES[10:12])
    assert pool.num_published(row) == 2


def test_hits_must_be_block_ranges(pool: Pool) -> None:
    with unchanged(pool):
        for bad in ([], (), None, [(1, 2)], pool, object()):
            with pytest.raises(TypeError, match="expected BlockRanges"):
                admit_one(pool, bad, 2, 0, 0, 0, 2, 2, 0, [])


@pytest.mark.parametrize(
    "ranges",
    [
        [(10, 2)],  # in a hole
        [(1, 5)],  # half of it
        [(0, 1)],  # the null block
        [(19, 2)],  # over the end
        [(INT32_MAX - 1, 1)],
        [(1, 2), (1, 2)],  # twice
    ],
)
def test_stale_and_forged_hits_change_nothing(pool: Pool, ranges: list[tuple[int, int]]) -> None:
    with unchanged(pool), pytest.raises(ValueError):  # noqa: PT011 (each has its own text)
        admit_one(pool, BlockRanges(ranges), 6, 0, 0, 0, 6, 6, 0, [])


def test_a_hit_evicted_while_its_owner_runs_is_stale(pool: Pool) -> None:
    hit = pool.lookup(HASHES, 4)
    pool.evict(hit.ids()[-1:])
    with unchanged(pool), pytest.raises(ValueError, match="stale prefix hit"):
        admit_one(pool, hit, 6, 0, 0, 0, 6, 6, 0, [])


def test_handles_of_closed_rows_are_refused(pool: Pool) -> None:
    row = admit(pool, 2)
    pool.free(row)
    again = admit(pool, 2)  # most likely in the same slot
    assert again != row
    with unchanged(pool):
        for bad in (row, 0, -1, 12345, INT64_MAX, -INT64_MAX, again + 1, again | 1 << 31):
            for call in (
                lambda h=bad: pool.free(h),
                lambda h=bad: pool.row_blocks(h),
                lambda h=bad: pool.num_published(h),
                lambda h=bad: pool.publish(h, 1, HASHES),
                lambda h=bad: grow_one(pool, h, 3, 0, 0, 0, 3, 3, 0, []),
            ):
                with pytest.raises(ValueError, match="is not open"):
                    call()
        for bad, error in ((2**63, OverflowError), ("1", TypeError), (None, TypeError)):
            with pytest.raises(error):
                pool.free(bad)


def test_foreign_block_ids_are_refused(pool: Pool) -> None:
    with unchanged(pool):
        for bad in (0, -1, 20, INT32_MAX, -(2**31), 2**31, -(2**40)):
            with pytest.raises(ValueError):  # noqa: PT011
                pool.evict([1, bad])
            with pytest.raises(ValueError):  # noqa: PT011
                pool.request_refs(bad)
            with pytest.raises(ValueError):  # noqa: PT011
                pool.is_cached(bad)
        for wrong in (1, None, ["1"], [None], [1.0]):
            with pytest.raises(TypeError):
                pool.evict(wrong)


def test_an_iterator_that_raises_evicts_nothing(pool: Pool) -> None:
    def ids() -> Iterator[int]:
        yield 1
        raise KeyError("no more")

    with unchanged(pool), pytest.raises(KeyError, match="no more"):
        pool.evict(ids())


def test_a_list_emptied_during_the_call_is_no_crash(pool: Pool) -> None:
    hashes = list(HASHES)

    class Emptying:
        def __index__(self) -> int:
            hashes.clear()
            return 4

    with pytest.raises(IndexError):
        pool.lookup(hashes, Emptying())
    pool.check_invariants()


def test_evictions_are_recorded_once_and_in_order() -> None:
    pool = Pool(6, record_evictions=True)
    pool.free(admit(pool, 4, publish=4))
    ids = pool.lookup(HASHES, 4).ids()
    admit(pool, 5)
    expected = [(b, 0, key) for b, key in zip(reversed(ids), reversed(HASHES[:4]), strict=True)]
    assert pool.take_evicted() == expected
    assert pool.take_evicted() == []
    silent = Pool(6)
    silent.free(admit(silent, 4, publish=4))
    admit(silent, 5)
    assert silent.take_evicted() == []


def test_rows_do_not_change_under_their_owner(pool: Pool) -> None:
    row = admit(pool, 2)
    before = pool.row_blocks(row)
    ids = before.ids()
    grow_one(pool, row, 5, 0, 0, 0, 5, 5, 0, [])
    assert before.ids() == ids
    assert len(pool.row_blocks(row)) == 5


# --- memory -----------------------------------------------------------------------------------


def exercise(pool: Pool, hashes: list[bytes]) -> None:
    """Every call once, the refused ones too."""
    pool.begin_step()
    hit = pool.lookup(hashes, 6)
    given = admit_one(pool, hit, len(hit) + 3, 0, 0, 0, 3, 9, len(hit) + 2, hashes)
    assert given is not None
    row, added = given
    grow_one(pool, row, len(hit) + 4, 0, 0, 0, 4, 9, 0, hashes)
    pool.publish(row, len(hit) + 4, hashes)
    pool.end_scheduling()
    added.ids()
    added.ranges()
    repr(added)
    added.truncated(1)
    pool.holes()
    pool.stats()
    pool.evict(pool.row_blocks(row).ids()[-1:])
    assert admit_one(pool, hit, 10**6, 0, 0, 0, 0, 0, 0, hashes) is None
    for bad in ([b"short"], ["text"], None):
        with pytest.raises((ValueError, TypeError)):
            pool.publish(row, 99, bad and bad * 20)
        with pytest.raises((ValueError, TypeError)):
            admit_one(pool, BlockRanges(), 3, 0, 0, 0, 3, 3, 3, bad)
    pool.free(row)
    pool.take_evicted()
    with pytest.raises(ValueError, match="is not open"):
        pool.free(row)


def test_calls_keep_no_references() -> None:
    pool = Pool(40, record_evictions=True)
    hashes = [bytes([i]) * 32 for i in range(1, 30)]
    empty = BlockRanges()
    exercise(pool, hashes)
    watched = [hashes, empty, pool, BlockRanges, Pool, *hashes]
    gc.collect()
    before = [sys.getrefcount(x) for x in watched]
    for _ in range(200):
        exercise(pool, hashes)
    gc.collect()
    after = [sys.getrefcount(x) for x in watched]
    assert after == before
    del pool


def resident_kib() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def test_objects_free_their_memory() -> None:
    """Pools of 3 MiB each, by the hundred: leaking one in ten would be seen."""

    def churn(times: int) -> None:
        for _ in range(times):
            pool = Pool(50_000)
            exercise(pool, HASHES)
            CoordMap(1, 2, 3, 4).coord(5)
            BlockRanges([(i, 1) for i in range(1, 200, 2)]).ids()

    churn(20)
    gc.collect()
    before = resident_kib()
    churn(300)
    assert resident_kib() - before < 60_000


def test_a_long_lived_pool_does_not_grow() -> None:
    pool = Pool(40, record_evictions=True)
    hashes = [bytes([i]) * 32 for i in range(1, 30)]
    for _ in range(300):
        exercise(pool, hashes)
    memory, before, objects = pool.stats()["memory_bytes"], resident_kib(), len(gc.get_objects())
    for _ in range(5000):
        exercise(pool, hashes)
    assert pool.stats()["memory_bytes"] == memory
    assert resident_kib() - before < 10_000
    assert len(gc.get_objects()) - objects < 500


def test_the_module_has_its_types_and_no_benchmark() -> None:
    public = {name for name in dir(_native) if not name.startswith("__")}
    types = {
        "BlockMover",
        "BlockRanges",
        "CoordMap",
        "MovePlanner",
        "Pool",
        "RangeTable",
        "RegionMap",
    }
    assert public == types | {"MAX_RANGES", "MOVER_SCRATCH", "NULL_BLOCK", "PAD_SLOT_ID"}


def test_types_live_in_their_module() -> None:
    for name in ("Pool", "BlockRanges", "CoordMap", "RegionMap"):
        kind = getattr(_native, name)
        assert kind.__module__ == "vllm_tagma._native"
        assert kind.__name__ == name
        assert kind.__doc__
