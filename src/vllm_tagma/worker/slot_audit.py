"""The debug switch of the write path: every computed slot against the block table.

Range arithmetic and the block table are two encodings of the same block ids, kept side by side.
Attention reads the table, so a slot that differs from it is KV written where nobody will look.
The comparison here shares no code with the range table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from vllm_tagma.errors import InvariantError
from vllm_tagma.ranges import NULL_BLOCK, PAD_SLOT_ID

FIRST_REPORT = 1024
"""Batches after which the counters are logged, and again whenever their number has doubled: vLLM
may kill a worker before it can log a summary."""

# Under vLLM's logger: its handlers and level apply, a logger of our own would stay silent.
_logger = logging.getLogger("vllm.tagma.worker")


class SlotAudit:
    """Checks batches of slots and counts them: ``batches``, ``slots``, and among these ``padded``.

    ``padded`` counts scheduled positions without a slot. A serving engine has none; dummy batches
    and null blocks may.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.slots = 0
        self.padded = 0
        self._summary_logged = False

    def counters(self) -> dict[str, int]:
        """The counters by name."""
        return {"batches": self.batches, "slots": self.slots, "padded": self.padded}

    def check(
        self,
        slots: npt.NDArray[np.int64],
        query_start_loc: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int64],
        *,
        block_table: npt.NDArray[np.int32],
        num_blocks: npt.NDArray[np.int32],
        block_size: int,
        name_row: Callable[[int], str],
    ) -> None:
        """Compares the slots of one batch with the block table. O(tokens).

        ``slots``: int64 [>= tokens]. ``query_start_loc``: int32 [requests + 1]. ``positions``:
        int64 [tokens]. ``block_table``: int32 [>= requests, blocks], of which row r uses
        ``num_blocks[r]``. Raises ``InvariantError`` at the first slot that differs.
        """
        tokens = int(query_start_loc[-1])
        rows = np.repeat(np.arange(len(query_start_loc) - 1), np.diff(query_start_loc))
        position = positions[:tokens]
        block = position // block_size
        inside = (position >= 0) & (block < num_blocks[rows])
        ids = np.where(inside, block_table[rows, np.where(inside, block, 0)], NULL_BLOCK)
        slot = ids.astype(np.int64) * block_size + position % block_size
        expected = np.where(ids == NULL_BLOCK, PAD_SLOT_ID, slot)
        wrong = np.flatnonzero(slots[:tokens] != expected)
        if wrong.size:
            token = int(wrong[0])
            raise InvariantError(
                f"{name_row(int(rows[token]))}, position {int(position[token])}: slot "
                f"{int(slots[token])} by range arithmetic, {int(expected[token])} by the block "
                f"table ({wrong.size} of {tokens} slots differ). This is a bug of vllm-tagma: "
                "please report it with the requests that led here, and serve with "
                "--kv-cache-backend paged meanwhile."
            )
        self.batches += 1
        self.slots += tokens
        self.padded += int(np.count_nonzero(expected == PAD_SLOT_ID))
        if self.batches >= FIRST_REPORT and self.batches & (self.batches - 1) == 0:
            self._log()

    def log_summary(self) -> None:
        """Logs the counters once, at INFO."""
        if not self._summary_logged:
            self._summary_logged = True
            self._log()

    def _log(self) -> None:
        _logger.info(
            "debug_slots: %d slots in %d batches equal the block table's, %d without a slot",
            self.slots,
            self.batches,
            self.padded,
        )
