"""What scheduler, workers and kernels must agree on: three numbers, and how ids form ranges.

Imports nothing of this package, so that everything may import it. ``csrc/tagma/block_range.hpp``
says the same to the core; tests compare the two, and the numbers with vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

NULL_BLOCK: Final = 0
"""vLLM's block without content; a run of it is a range of its own, and its positions have no slot.
"""

PAD_SLOT_ID: Final = -1
"""vLLM's marker for a token that is written nowhere."""

MAX_RANGES: Final = 256
"""Ranges of a request, and of a row of a worker's range table: 2 KiB of descriptors a row. The
allocator keeps requests far below it."""


class Range(NamedTuple):
    """``num_blocks`` blocks from ``start`` on; a run of null blocks has ``start`` 0."""

    start: int
    num_blocks: int


def joins(last: Range, next_id: int) -> bool:
    """The merge rule: whether a range that starts at ``next_id`` continues ``last``.

    Null runs continue null runs, and nothing else touches the null block.
    """
    if last.start == NULL_BLOCK:
        return next_id == NULL_BLOCK
    return next_id == last.start + last.num_blocks


def encode(block_ids: Iterable[int]) -> list[Range]:
    """The maximal ranges that block ids form, in logical order. O(blocks).

    The plain-Python specification of the native ``BlockRanges.from_ids``, for references and tests.
    """
    ranges: list[Range] = []
    for block_id in block_ids:
        if block_id < 0:
            raise ValueError(f"block id {block_id} is negative")
        if ranges and joins(ranges[-1], block_id):
            ranges[-1] = Range(ranges[-1].start, ranges[-1].num_blocks + 1)
        else:
            ranges.append(Range(block_id, 1))
    return ranges
