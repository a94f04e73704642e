"""The range table of a worker: per batch row, the ranges that hold a request's blocks.

A thin typed face of the native table (``csrc/tagma/range_table.hpp``), which does the work. The
rows follow vLLM's block table: ids are appended as they arrive, rows move and swap with the batch.
``worker/reference.py`` is the same thing in plain numpy.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_tagma import _native
from vllm_tagma.errors import RangeCapError
from vllm_tagma.worker.reference import NULL_BLOCK, Range

DEFAULT_MAX_RANGES = 256
"""Ranges per row. A row of 256 descriptors is 2 KiB; the allocator keeps requests far below it."""


def _row_name(row: int) -> str:
    return f"row {row}"


class RangeTable:
    """Ranges of ``max_rows`` batch rows, at most ``max_ranges`` each; memory is taken up front.

    ``name_row`` turns a row index into the words that errors use for it, such as a request id.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_ranges: int = DEFAULT_MAX_RANGES,
        name_row: Callable[[int], str] = _row_name,
    ) -> None:
        self._native = _native.RangeTable(max_rows, max_ranges)
        self._name_row = name_row

    def append(self, row: int, block_ids: list[int] | npt.NDArray[np.int32]) -> None:
        """Appends block ids behind the row's last block. O(ids).

        Ids that continue the last range extend it; null blocks (id 0) form ranges without slots.
        Raises ``RangeCapError`` if the row would need more ranges than it holds and ``ValueError``
        for a row out of bounds or a negative id; the row is unchanged then.
        """
        try:
            self._native.append(row, block_ids)
        except RuntimeError as error:
            if len(error.args) != 4:
                raise
            _, _, needed, cap = error.args
            raise RangeCapError(
                f"The KV blocks of {self._name_row(row)} form {needed} ranges; the worker's range "
                f"table holds {cap} per request. Raise --block-size so that a request has fewer "
                "blocks, or let the pool become less scattered: reset the prefix cache or lower "
                "--max-num-seqs."
            ) from None

    def replace(self, row: int, block_ids: list[int] | npt.NDArray[np.int32]) -> None:
        """Gives a row other blocks. O(ids). Raises as :meth:`append`; the row is unchanged then."""
        before = self.ranges(row)
        self._native.clear(row)
        try:
            self.append(row, block_ids)
        except BaseException:
            for start, count in before:
                null = start == NULL_BLOCK
                ids = [NULL_BLOCK] * count if null else list(range(start, start + count))
                self._native.append(row, ids)
            raise

    def clear(self, row: int) -> None:
        """Empties a row."""
        self._native.clear(row)

    def move(self, *, src: int, dst: int) -> None:
        """Moves row ``src`` over row ``dst``; ``src`` is empty afterwards."""
        self._native.move(src, dst)

    def swap(self, a: int, b: int) -> None:
        """Exchanges two rows."""
        self._native.swap(a, b)

    def num_ranges(self, row: int) -> int:
        """Ranges in use in a row."""
        return int(self._native.num_ranges(row))

    def num_blocks(self, row: int) -> int:
        """Blocks of a row, null blocks included."""
        return int(self._native.num_blocks(row))

    def ranges(self, row: int) -> list[Range]:
        """The ranges of a row in logical order. O(ranges)."""
        return [Range(start, count) for start, count in self._native.ranges(row)]

    def compute_slots(
        self,
        query_start_loc: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        out: npt.NDArray[np.int64],
        *,
        num_reqs: int,
        pad_to: int,
        block_size: int,
    ) -> int:
        """Writes the slot of each token to ``out[:pad_to]``; returns the descriptor look-ups made.

        Request r is row r and owns the tokens ``query_start_loc[r]`` to ``query_start_loc[r + 1]``.
        ``query_start_loc``: int32 [>= num_reqs + 1], from 0, never falling. ``positions``: int64
        [tokens]. ``out``: int64, contiguous; ``PAD_SLOT_ID`` is written for positions outside every
        range or in a null run, and for the tokens behind the last request's up to ``pad_to``; the
        rest is left alone. ``block_size``: tokens per block. One look-up serves all consecutive
        tokens of a range, so there are at most as many as blocks of positions entered. Raises
        ``ValueError`` or ``TypeError`` before it writes anything.
        """
        return int(
            self._native.compute_slots(
                num_reqs, query_start_loc, positions, out, pad_to, block_size
            )
        )

    def compute_slots_at(
        self,
        query_start_loc: int,
        positions: int,
        out: int,
        *,
        num_reqs: int,
        num_tokens: int,
        pad_to: int,
        block_size: int,
    ) -> int:
        """:meth:`compute_slots` over the addresses of contiguous arrays on the CPU.

        For tensors, of which numpy views take longer to make than a decode batch to map. The caller
        vouches for the types and for ``num_reqs + 1``, ``num_tokens`` and ``pad_to`` elements.
        """
        return int(
            self._native.compute_slots_at(
                num_reqs, query_start_loc, positions, num_tokens, out, pad_to, block_size
            )
        )
