"""The range table of a worker: the ranges that hold the blocks of each row of a batch.

A thin typed face of the native table (``csrc/tagma/range_table.hpp``), which does the work. On
Model Runner V1 its rows move and swap with the batch, as the rows of vLLM's block table do; on V2
one stands behind the device tables of each group (``staged_range_tables.py``).
``worker/reference.py`` says in plain numpy which slots come of it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_tagma import _native
from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import RangeCapError
from vllm_tagma.ranges import MAX_RANGES, Range


def plain_name(row: int) -> str:
    """What errors call a row if nobody knows better."""
    return f"row {row}"


class RangeTable:
    """Ranges of ``max_rows`` rows, at most ``max_ranges`` each; memory is taken up front.

    ``name_row`` turns a row index into the words that errors use for it, such as a request id.
    """

    def __init__(
        self,
        *,
        max_rows: int,
        max_ranges: int = MAX_RANGES,
        name_row: Callable[[int], str] = plain_name,
    ) -> None:
        self._native = _native.RangeTable(max_rows, max_ranges)
        self._name_row = name_row

    def write(self, row: int, first_block: int, ranges: BlockRanges) -> int:
        """The row keeps its first ``first_block`` blocks and then consists of ``ranges``.

        O(ranges). Returns the first range that was written; the ones in front of it have their
        start and first logical block as before. Raises as :meth:`check_write`; the row is unchanged
        then.
        """
        try:
            return self._native.write(row, first_block, ranges)
        except RuntimeError as error:
            raise self._named(error, row) from None

    def check_write(self, row: int, first_block: int, ranges: BlockRanges) -> None:
        """Raises what :meth:`write` would raise: ``RangeCapError`` if the row would need more
        ranges than it holds, ``ValueError`` for a row out of bounds or a ``first_block`` behind the
        row's blocks."""
        try:
            self._native.check_write(row, first_block, ranges)
        except RuntimeError as error:
            raise self._named(error, row) from None

    def append(self, row: int, block_ids: list[int] | npt.NDArray[np.int32]) -> int:
        """Appends block ids behind the row's last block: for whoever has no ranges. O(ids).

        Returns as :meth:`write`, raises as it does and ``ValueError`` for a negative id; the row is
        unchanged then.
        """
        try:
            return self._native.append(row, block_ids)
        except RuntimeError as error:
            raise self._named(error, row) from None

    def _named(self, error: RuntimeError, row: int) -> Exception:
        """The error for a refusal by the cap, which the native table reports with numbers."""
        if len(error.args) != 4:
            return error
        _, _, needed, cap = error.args
        return RangeCapError(
            f"The KV blocks of {self._name_row(row)} form {needed} ranges; the worker's range "
            f"table holds {cap} per request. Raise --block-size so that a request has fewer "
            "blocks, or let the pool become less scattered: reset the prefix cache or lower "
            "--max-num-seqs."
        )

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

    def packed(self, row: int, first_range: int) -> npt.NDArray[np.int32]:
        """The row's ranges from ``first_range`` on, as device tables hold them: their starts, then
        their first logical blocks. int32 [2 * ranges], read-only. O(ranges)."""
        return np.frombuffer(self._native.packed(row, first_range), dtype=np.int32)

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
