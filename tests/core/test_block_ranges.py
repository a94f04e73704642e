"""``BlockRanges`` on the wire: from ids and back, slices, pickling; the numbers that all share."""

from __future__ import annotations

import copy
import itertools
import pickle

import numpy as np
import pytest

from vllm_tagma import _native
from vllm_tagma import ranges as shared
from vllm_tagma._native import BlockRanges
from vllm_tagma.ranges import encode

INT32_MAX = 2**31 - 1


def test_ids_form_ranges_by_the_one_rule() -> None:
    """Every short row of ids against the plain rule: a null run never joins block 1."""
    for length in range(5):
        for ids in itertools.product([0, 1, 2, 3, 9], repeat=length):
            ranges = BlockRanges.from_ids(list(ids))
            assert ranges.ranges() == encode(ids)
            assert ranges == BlockRanges(encode(ids))
            assert ranges.ids() == list(ids)
    assert BlockRanges.from_ids(np.array([4, 5, 0], np.int32)).ranges() == [(4, 2), (0, 1)]
    assert BlockRanges.from_ids([INT32_MAX - 1, INT32_MAX, 0]).num_ranges == 2


@pytest.mark.parametrize(
    ("ids", "error"),
    [
        ([4, -1], ValueError),
        ([INT32_MAX + 1], ValueError),
        ([2**70], OverflowError),
        (["x"], TypeError),
        (None, TypeError),
        (np.array([1]), TypeError),
        (np.array([[1]], np.int32), TypeError),
    ],
)
def test_what_is_no_id_is_refused(ids: object, error: type) -> None:
    with pytest.raises(error):
        BlockRanges.from_ids(ids)


def test_slices_are_the_blocks_between() -> None:
    ranges = BlockRanges([(4, 2), (0, 3), (1, 3)])
    ids = ranges.ids()
    for first in range(len(ids) + 1):
        for last in range(first, len(ids) + 1):
            assert ranges.sliced(first, last).ids() == ids[first:last]
            assert ranges.sliced(first, last) == BlockRanges.from_ids(ids[first:last])
    for first, last in ((-1, 2), (3, 2), (0, 9), (9, 9)):
        with pytest.raises(ValueError, match=rf"blocks \[{first}, {last}\) of a list of 8"):
            ranges.sliced(first, last)


def test_ids_are_written_into_a_buffer() -> None:
    ranges = BlockRanges([(4, 2), (0, 2), (1, 1)])
    out = np.full(8, -7, np.int32)
    ranges.write_ids(out, 2)
    assert out.tolist() == [-7, -7, 4, 5, 0, 0, 1, -7]
    BlockRanges.from_ids([INT32_MAX - 1, INT32_MAX]).write_ids(out, 6)
    assert out[5:].tolist() == [0, INT32_MAX - 1, INT32_MAX]
    out[6:] = [1, -7]
    BlockRanges().write_ids(out, 8)
    assert out.tolist() == [-7, -7, 4, 5, 0, 0, 1, -7]


def test_ids_that_do_not_fit_a_buffer_leave_it() -> None:
    ranges = BlockRanges([(4, 3)])
    out = np.full(4, -7, np.int32)
    fixed = np.full(4, -7, np.int32)
    fixed.setflags(write=False)
    for buffer, at, error in (
        (out, 2, ValueError),
        (out, -1, ValueError),
        (out, 5, ValueError),
        (out, 2**40, ValueError),
        (out.astype(np.int64), 0, TypeError),
        (out[::2], 0, TypeError),
        (fixed, 0, (BufferError, ValueError)),
        ([1, 2, 3, 4], 0, TypeError),
    ):
        with pytest.raises(error):
            ranges.write_ids(buffer, at)
    assert out.tolist() == [-7] * 4
    assert fixed.tolist() == [-7] * 4


@pytest.mark.parametrize("pairs", [[], [(4, 2)], [(0, 3), (1, 2), (9, 1)], [(1, INT32_MAX - 1)]])
@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_block_ranges_survive_pickling_and_copying(
    pairs: list[tuple[int, int]], protocol: int
) -> None:
    ranges = BlockRanges(pairs)
    for other in (pickle.loads(pickle.dumps(ranges, protocol)), copy.deepcopy(ranges)):
        assert type(other) is BlockRanges
        assert other == ranges
        assert other.ranges() == pairs


def test_the_shared_numbers_are_the_same_everywhere() -> None:
    """In the core, in Python, and in vLLM, whose kernels and managers they come from."""
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID
    from vllm.v1.core.block_pool import BlockPool

    assert (_native.NULL_BLOCK, _native.PAD_SLOT_ID, _native.MAX_RANGES) == (
        shared.NULL_BLOCK,
        shared.PAD_SLOT_ID,
        shared.MAX_RANGES,
    )
    assert shared.PAD_SLOT_ID == PAD_SLOT_ID
    assert BlockPool(4, enable_caching=False, hash_block_size=16).null_block.block_id == (
        shared.NULL_BLOCK
    )
    assert shared.MAX_RANGES == 256
