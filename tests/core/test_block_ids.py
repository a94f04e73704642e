"""The id lists that go to the worker: long ranges are written another way than short ones."""

from __future__ import annotations

import pickle

import pytest

from vllm_tagma._native import BlockRanges, Pool, RegionMap


@pytest.mark.parametrize("count", [1, 31, 32, 33, 5_000])
@pytest.mark.parametrize("others", [[], [(9_000_000, 3)], [(9_000_000, 700)]])
def test_ids_of_short_and_long_ranges(count: int, others: list[tuple[int, int]]) -> None:
    pairs = [(7, count), *others]
    blocks = BlockRanges(pairs)
    ids = blocks.ids()
    assert type(ids) is list
    assert ids == [block for start, length in pairs for block in range(start, start + length)]
    ids.append(-1)  # vLLM's worker extends the lists it receives
    assert blocks.ids() == ids[:-1]


def test_ids_at_the_end_of_the_id_space() -> None:
    last = 2**31 - 1
    assert BlockRanges([(last - 40, 40)]).ids() == list(range(last - 40, last))
    ids = list(range(last - 40, last + 1))
    ranges = BlockRanges.from_ids(ids)
    assert ranges == BlockRanges([(last - 40, 41)])
    assert ranges.ids() == ids
    assert pickle.loads(pickle.dumps(ranges)) == ranges
    with pytest.raises(ValueError, match="is not a block range"):
        BlockRanges([(last, 2)])


def test_the_last_id_is_refused_under_its_own_name() -> None:
    last = 2**31 - 1
    pool = Pool(10)
    with pytest.raises(ValueError, match=r"range \[2147483647, 2147483648\) is outside the pool"):
        pool.pin_blocks(BlockRanges([(last, 1)]))
    with pytest.raises(ValueError, match="block 2147483647 is named twice"):
        pool.pin_blocks(BlockRanges.from_ids([last, last]))
    with pytest.raises(ValueError, match="block 2147483647 is outside"):
        RegionMap([(0, 10, 16)]).spans(BlockRanges([(last, 1)]))


def test_no_blocks() -> None:
    assert BlockRanges().ids() == []
