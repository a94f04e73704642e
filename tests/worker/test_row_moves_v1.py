"""Row moves on Model Runner V1: the request's list of ids, its table row and its ranges."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.worker.block_table import MultiGroupBlockTable

from vllm_tagma.errors import InvariantError, RangeCapError
from vllm_tagma.integration.worker_v1 import (
    TagmaBlockTable,
    TagmaCPUModelRunner,
    adopt_block_table,
)
from vllm_tagma.worker import reference
from vllm_tagma.worker.slot_audit import SlotAudit

ROWS, BLOCK_SIZE, BLOCKS = 4, 32, 600


@pytest.fixture
def tables() -> MultiGroupBlockTable:
    found = MultiGroupBlockTable(ROWS, 512, False, torch.device("cpu"), [BLOCK_SIZE], [BLOCKS])
    adopt_block_table(found[0], name_row=lambda row: f"request r{row}", audit=SlotAudit())
    return found


def _runner(tables: MultiGroupBlockTable, **rows: tuple[int | None, list[int]]) -> Any:
    """A runner that knows requests by (row in the batch or None, block ids) and nothing else."""
    runner = object.__new__(TagmaCPUModelRunner)
    runner.requests = {}
    index = {}
    for name, (row, ids) in rows.items():
        runner.requests[name] = SimpleNamespace(block_ids=(list(ids),))
        if row is not None:
            tables.add_row((list(ids),), row)
            index[name] = row
    runner.input_batch = SimpleNamespace(block_table=tables, req_id_to_index=index)
    return runner


def _row(tables: MultiGroupBlockTable, row: int) -> list[int]:
    table = tables[0]
    ids = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
    assert table.ranges.ranges(row) == reference.encode_ranges(ids), "ids and ranges differ"
    return list(ids)


def test_scheduled_and_unscheduled_requests_are_rewritten(tables: MultiGroupBlockTable) -> None:
    runner = _runner(tables, a=(0, [5, 6, 9, 30]), b=(None, [1, 2, 3]), c=(2, [40, 41]))
    moves = {"a": [(20, 2), (8, 1)], "b": [(50, 3)], "gone": [(70, 1)]}
    runner._apply_row_moves(moves)
    assert runner.requests["a"].block_ids == ([20, 21, 8, 30],)
    assert runner.requests["b"].block_ids == ([50, 51, 52],)
    assert runner.requests["c"].block_ids == ([40, 41],)
    assert [_row(tables, row) for row in range(3)] == [[20, 21, 8, 30], [], [40, 41]]
    # What the step appends comes behind, by vLLM's own path.
    tables.append_row(([31],), 0)
    assert _row(tables, 0) == [20, 21, 8, 30, 31]
    # A request that vLLM adds again brings its list.
    tables.add_row(runner.requests["b"].block_ids, 1)
    assert _row(tables, 1) == [50, 51, 52]


def test_slots_follow_the_move_and_the_audit_agrees(tables: MultiGroupBlockTable) -> None:
    runner = _runner(tables, a=(0, [5, 6, 9]))
    runner._apply_row_moves({"a": [(11, 2)]})
    tables.commit_block_table(1)
    positions = torch.tensor([0, 33, 64])
    tables.compute_slot_mapping(1, torch.tensor([0, 3], dtype=torch.int32), positions)
    assert tables[0].slot_mapping.gpu[:3].tolist() == [11 * 32, 12 * 32 + 1, 9 * 32]
    assert tables[0].audit.counters() == {"batches": 1, "slots": 3, "padded": 0}


def test_random_moves_equal_a_list(tables: MultiGroupBlockTable) -> None:
    rng = random.Random(2)
    ids = [rng.randrange(1, 900) for _ in range(40)]
    runner = _runner(tables, a=(3, ids))
    for _ in range(60):
        new: list[int] = []
        ranges = []
        while rng.random() < 0.8 and len(new) < 30:
            start, count = rng.randrange(1, 900), rng.randint(1, 6)
            ranges.append((start, count))
            new += range(start, start + count)
        ids[: len(new)] = new
        runner._apply_row_moves({"a": ranges})
        assert _row(tables, 3) == ids
        assert runner.requests["a"].block_ids == (ids,)


@pytest.mark.parametrize("row", [1, None])
def test_a_move_beyond_the_row_is_refused(tables: MultiGroupBlockTable, row: int | None) -> None:
    runner = _runner(tables, long_name=(row, [5, 6]))
    message = r"3 moved blocks for request long_name, whose row on the worker has 2\. .*report it"
    with pytest.raises(InvariantError, match=message):
        runner._apply_row_moves({"long_name": [(8, 3)]})
    assert runner.requests["long_name"].block_ids == ([5, 6],)
    if row is not None:
        assert _row(tables, row) == [5, 6]


def test_a_batch_row_shorter_than_the_requests_list_is_refused(
    tables: MultiGroupBlockTable,
) -> None:
    runner = _runner(tables, a=(1, [5, 6]))
    runner.requests["a"].block_ids[0].append(7)
    with pytest.raises(InvariantError, match="3 moved blocks for request r1, whose row"):
        runner._apply_row_moves({"a": [(8, 3)]})
    assert runner.requests["a"].block_ids == ([5, 6, 7],)
    assert _row(tables, 1) == [5, 6]


def test_too_many_ranges_leave_the_row(tables: MultiGroupBlockTable) -> None:
    ids = list(range(1, 301))
    runner = _runner(tables, a=(0, ids))
    before = tables[0].block_table.np.copy()
    with pytest.raises(RangeCapError, match="request r0 form 257 ranges"):
        runner._apply_row_moves({"a": [(2 * i + 400, 1) for i in range(256)]})
    np.testing.assert_array_equal(tables[0].block_table.np, before)
    assert _row(tables, 0) == ids
    assert runner.requests["a"].block_ids == (ids,)
    assert isinstance(tables[0], TagmaBlockTable)
