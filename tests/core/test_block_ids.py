"""The id lists that go to the worker: long ranges are written another way than short ones."""

from __future__ import annotations

import pytest

from vllm_tagma._native import BlockRanges


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


def test_no_blocks() -> None:
    assert BlockRanges().ids() == []
