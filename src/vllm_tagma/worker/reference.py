"""Slots in plain numpy: the specification of the native range table.

Slow and obvious on purpose. The tests compare ``csrc/tagma/range_table.hpp`` with it; nothing in a
serving process imports it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from vllm_tagma.ranges import NULL_BLOCK, PAD_SLOT_ID, Range, encode


def slot_of(ranges: Sequence[Range], position: int, *, block_size: int) -> int:
    """The slot of a position, or ``PAD_SLOT_ID`` outside every range and in null runs."""
    if position < 0:
        return PAD_SLOT_ID
    block = position // block_size
    cum = 0
    for start, count in ranges:
        if block < cum + count:
            if start == NULL_BLOCK:
                return PAD_SLOT_ID
            return (start + block - cum) * block_size + position % block_size
        cum += count
    return PAD_SLOT_ID


def compute_slots(
    rows: Sequence[Sequence[int]],
    query_start_loc: Sequence[int],
    positions: npt.NDArray[np.int64],
    *,
    block_size: int,
    pad_to: int,
) -> npt.NDArray[np.int64]:
    """The slots of a batch.

    ``rows``: block ids of each request. ``query_start_loc``: [requests + 1], the first token of
    each request. ``positions``: int64 [tokens]. Returns int64 [``pad_to``], padded with
    ``PAD_SLOT_ID`` behind the last request's tokens.
    """
    slots = np.full(pad_to, PAD_SLOT_ID, dtype=np.int64)
    for row, block_ids in enumerate(rows):
        ranges = encode(block_ids)
        for token in range(query_start_loc[row], query_start_loc[row + 1]):
            slots[token] = slot_of(ranges, int(positions[token]), block_size=block_size)
    return slots
