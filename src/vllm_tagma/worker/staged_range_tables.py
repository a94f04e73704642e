"""The rows of Model Runner V2 on the host, and what the device does not have of them yet.

A native ``RangeTable`` per cache group holds the rows, so that a row is written by one checked call
and ranges merge by the one rule there is. ``kernels/device_range_tables.py`` holds what the kernels
read; a write here is sent there by ``apply_staged_writes``, with all others of the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from vllm_tagma._native import BlockRanges
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables, RowWrite
from vllm_tagma.ranges import Range
from vllm_tagma.worker.range_table import RangeTable, plain_name


class RowEnd(NamedTuple):
    """The row of one group from ``first_block`` on."""

    group: int
    first_block: int
    ranges: BlockRanges


class StagedRangeTables:
    """Rows of ``groups`` x ``rows`` on the host and ``tables``, their copy on ``device``.

    ``name_row`` turns a row index into the words that errors use for it.
    """

    def __init__(
        self,
        *,
        groups: int,
        rows: int,
        device: torch.device | str,
        name_row: Callable[[int], str] = plain_name,
    ) -> None:
        self.tables = DeviceRangeTables.empty(groups=groups, rows=rows, device=device)
        self._host = [RangeTable(max_rows=rows, name_row=name_row) for _ in range(groups)]
        # (group, row) -> first range that the device does not have yet.
        self._staged: dict[tuple[int, int], int] = {}

    def write(self, row: int, ends: Sequence[RowEnd]) -> None:
        """In each group named, the row keeps its first blocks and then consists of these ranges.

        Visible to kernels after ``apply_staged_writes``. O(ranges). Raises ``RangeCapError``, and
        ``ValueError`` for a row or block out of bounds; no group is changed then. ``ends`` names a
        group once.
        """
        if len(ends) > 1:
            for group, first_block, ranges in ends:
                self._host[group].check_write(row, first_block, ranges)
        for group, first_block, ranges in ends:
            written = self._host[group].write(row, first_block, ranges)
            key = group, row
            self._staged[key] = min(self._staged.get(key, written), written)

    def apply_staged_writes(self) -> None:
        """Brings the device tables up to date: one copy, one launch, no synchronisation."""
        if not self._staged:
            return
        self.tables.send(
            [
                RowWrite(
                    group,
                    row,
                    first,
                    self._host[group].num_blocks(row),
                    self._host[group].packed(row, first),
                )
                for (group, row), first in self._staged.items()
            ]
        )
        self._staged.clear()

    def ranges(self, *, group: int, row: int) -> list[Range]:
        """The ranges of a row in logical order, staged ones included. O(ranges)."""
        return self._host[group].ranges(row)

    def num_ranges(self, *, group: int, row: int) -> int:
        """Ranges of a row, staged ones included."""
        return self._host[group].num_ranges(row)

    def all_ranges(self) -> list[list[list[Range]]]:
        """The ranges of every row, by group and row. O(rows + ranges)."""
        rows = range(self.tables.num_blocks.shape[1])
        return [[host.ranges(row) for row in rows] for host in self._host]

    def num_blocks(self, *, group: int, row: int) -> int:
        """Blocks of a row, staged and null ones included."""
        return self._host[group].num_blocks(row)

    def check_invariants(self) -> None:
        """Checks the device tables against the rows. Synchronises; raises ``AssertionError``."""
        assert not self._staged, "writes are staged and not applied"
        starts, cums, num_ranges, num_blocks = (t.numpy() for t in self.tables.on_host())
        for group, host in enumerate(self._host):
            for row in range(num_blocks.shape[1]):
                n = host.num_ranges(row)
                name = f"group {group}, row {row}"
                counts = num_ranges[group, row], num_blocks[group, row]
                assert counts == (n, host.num_blocks(row)), f"{name}: counts on the device differ"
                found = np.concatenate([starts[group, row, :n], cums[group, row, :n]])
                assert np.array_equal(found, host.packed(row, 0)), f"{name}: ranges differ"
