"""The self-test of Model Runner V1 on a CPU: the native range table, and the mover."""

from __future__ import annotations

from typing import Final

import numpy as np

from vllm_tagma._native import BlockRanges
from vllm_tagma.ranges import encode
from vllm_tagma.worker.range_table import RangeTable
from vllm_tagma.worker.self_test import Check, Difference, Subject, require_same
from vllm_tagma.worker.self_test_moves import BLOCK_MOVES

_STALE: Final = -77


def _table(subject: Subject, group: int) -> RangeTable:
    """The rows in two writes, as requests grow: the second begins inside a range."""
    table = RangeTable(max_rows=subject.num_rows)
    for row, ids in enumerate(subject.ids[group]):
        half = len(ids) // 2
        table.write(row, 0, BlockRanges.from_ids(ids[:half].tolist()))
        table.write(row, half, BlockRanges.from_ids(ids[half:].tolist()))
    return table


def row_writes(subject: Subject) -> None:
    """Ranges of a row against those that its ids form."""
    for group in subject.groups:
        table = _table(subject, group)
        for row, ids in enumerate(subject.ids[group]):
            found, expected = table.ranges(row), encode(ids.tolist())
            if found != expected:
                at = next(
                    i for i in range(len(expected) + 1) if found[i : i + 1] != expected[i : i + 1]
                )
                raise Difference(
                    f"group {group}, row {row}, range {at}: {found[at : at + 1]} by the table, "
                    f"{expected[at : at + 1]} by the reference"
                )


def slot_mapping(subject: Subject) -> None:
    """Slots of a batch; its rows are the batch's, in its order."""
    batch = subject.batch
    for group in subject.groups:
        table = RangeTable(max_rows=len(batch.rows))
        for request, row in enumerate(batch.rows):
            table.write(request, 0, BlockRanges.from_ids(subject.ids[group][row].tolist()))
        out = np.full(len(batch.positions), _STALE, dtype=np.int64)
        table.compute_slots(
            batch.starts,
            batch.positions,
            out,
            num_reqs=len(batch.rows),
            pad_to=len(out),
            block_size=subject.block_sizes[group],
        )
        require_same(f"group {group}, slot of token", out, subject.slots(group))


def expansion(subject: Subject) -> None:
    """Ids that are written into a row of the block table, behind a first block."""
    for group in subject.groups:
        for row, ids in enumerate(subject.ids[group]):
            out = np.full(len(ids) + 2, _STALE, dtype=np.int32)
            BlockRanges.from_ids(ids.tolist()).write_ids(out, 1)
            expected = np.concatenate([[_STALE], ids, [_STALE]])
            require_same(f"group {group}, row {row}, block", out, expected)


HOST_CHECKS: Final = (
    Check("row writes (C++)", row_writes),
    Check("slot mapping (C++)", slot_mapping),
    Check("expansion (C++)", expansion),
    BLOCK_MOVES,
)
