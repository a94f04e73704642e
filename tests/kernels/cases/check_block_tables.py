"""``TagmaBlockTables`` against vLLM's own ``BlockTables``: same calls, same layout, same results.

Both run vLLM's calls as Model Runner V2 makes them. vLLM's kernels are the oracle wherever their
result is defined: they read stale table entries for positions outside a row, and give null blocks
slots in block 0, where ours write ``PAD_SLOT_ID``.
"""

from __future__ import annotations

import inspect
import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

if os.environ["TAGMA_KERNEL_DEVICE"] == "cpu":
    # What vLLM's CPU worker imports first: V2's buffers without pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_tagma.errors import InvariantError, RangeCapError, UnsupportedError
from vllm_tagma.integration.block_tables_v2 import TagmaBlockTables
from vllm_tagma.lab.kernel_check import kernel_checks
from vllm_tagma.lab.kernel_check.layouts import draw_batch
from vllm_tagma.worker.slot_audit import SlotAudit

HAS_WINDOW = "sliding_window_reach" in inspect.signature(BlockTables.__init__).parameters


def _arguments(device: str, **changes: Any) -> dict[str, Any]:
    return {
        "block_sizes": [16],
        "max_num_reqs": 8,
        "max_num_batched_tokens": 1300,
        "max_num_blocks_per_group": [64],
        "device": torch.device(device),
        **changes,
    }


def _tagma(device: str, *, audit: SlotAudit | None = None, **changes: Any) -> TagmaBlockTables:
    return TagmaBlockTables(keep_id_rows=False, audit=audit, **_arguments(device, **changes))


def _pair(device: str, **changes: Any) -> tuple[BlockTables, TagmaBlockTables]:
    return BlockTables(**_arguments(device, **changes)), _tagma(device, **changes)


def check_triton_is_what_vllm_uses() -> None:
    assert HAS_TRITON, "vLLM fell back to placeholders: the comparison would be idle"


LAYOUTS = {
    "decode, one range": {"requests": 7, "mix": "decode"},
    "decode, 50 requests": {"requests": 50, "mix": "decode", "num_ranges": (1, 3)},
    "decode, 512 requests": {"requests": 512, "mix": "decode", "num_ranges": (1, 3)},
    "prefill": {
        "requests": 3,
        "mix": "prefill",
        "max_query": 1200,
        "blocks_per_row": 80,
        "num_ranges": (1, 9),
    },
    "mixed, block 32": {"requests": 8, "num_ranges": (1, 6), "block_sizes": (32,)},
    "mixed, block 256": {"requests": 6, "num_ranges": (1, 6), "block_sizes": (256,)},
    "256 ranges": {"requests": 2, "num_ranges": 256, "mix": "decode"},
    "two groups": {"requests": 6, "num_ranges": (1, 6), "block_sizes": (16, 64)},
    "dummy requests": {"requests": 12, "dummies": 0.4},
}


@pytest.mark.parametrize("name", LAYOUTS)
def check_slots_and_tables_equal_vllms(device: str, name: str) -> None:
    """On one physical layout; slots over the full width, tables row by row, padding included."""
    batch = draw_batch(seed=len(name), device=device, **LAYOUTS[name])
    groups, requests = len(batch.rows), batch.idx_mapping.shape[0]
    width = max(len(ids) for group in batch.rows for ids in group) + 2
    arguments = {
        "block_sizes": batch.block_size_list,
        "max_num_reqs": len(batch.rows[0]),
        "max_num_batched_tokens": batch.num_tokens + 1030,
        "max_num_blocks_per_group": [width] * groups,
    }
    results = []
    for tables in _pair(device, **arguments):
        for row in range(len(batch.rows[0])):
            ids = [list(batch.rows[group][row]) for group in range(groups)]
            half = [len(i) // 2 for i in ids]
            first = tuple(i[:h] for i, h in zip(ids, half, strict=True))
            rest = tuple(i[h:] for i, h in zip(ids, half, strict=True))
            tables.append_block_ids(row, first, overwrite=True)
            tables.append_block_ids(row, rest, overwrite=False)
        tables.apply_staged_writes()
        mapping = batch.idx_mapping
        # vLLM's gather has no row for a dummy; the runner never hands it one.
        gathered = tables.gather_block_tables(mapping.clamp(min=0), num_reqs_padded=requests)
        tables.slot_mappings.fill_(kernel_checks.STALE)
        slots = tables.compute_slot_mappings(
            mapping, batch.query_start_loc, batch.positions, batch.num_tokens + 5
        )
        assert slots.shape == (groups, batch.num_tokens + 5)
        assert slots.data_ptr() == tables.slot_mappings.data_ptr()
        results.append((tables.slot_mappings.cpu(), [t.cpu() for t in gathered]))
    (expected, expected_tables), (found, found_tables) = results
    assert torch.equal(found, expected)
    assert all(torch.equal(f, e) for f, e in zip(found_tables, expected_tables, strict=True))


def check_a_trace_of_requests_equals_vllms(device: str) -> None:
    """New, grown, preempted-and-resumed and streamed requests over reused rows, as V2 sends them.

    A resumed or streamed request comes as a new one: its row is overwritten.
    """
    rng = np.random.default_rng(7)
    stock, tagma = _pair(device)
    rows: dict[int, list[int]] = {}
    for _ in range(18):
        row = int(rng.integers(8))
        overwrite = row not in rows or bool(rng.random() < 0.25)
        old = [] if overwrite else rows[row]
        ids = list(old)
        for _ in range(int(rng.integers(1, 9))):
            ids.append(ids[-1] + 1 if ids and rng.random() < 0.7 else int(rng.integers(1, 999)))
        if len(ids) > 64:
            continue
        rows[row] = ids
        for tables in (stock, tagma):
            tables.append_block_ids(row, (list(ids[len(old) :]),), overwrite=overwrite)
            tables.apply_staged_writes()
        assert np.array_equal(stock.num_blocks.np, tagma.num_blocks.np)
        batch = rng.permutation(list(rows))[: int(rng.integers(1, 9))]
        mapping = torch.tensor(batch, dtype=torch.int32, device=device)
        positions, starts = [], [0]
        for request in batch.tolist():
            limit = len(rows[request]) * 16
            query = int(rng.integers(1, min(limit, 40) + 1))
            first = int(rng.integers(0, limit - query + 1))
            positions += range(first, first + query)
            starts.append(len(positions))
        both = [
            (
                tables.gather_block_tables(mapping, num_reqs_padded=min(len(batch) + 1, 8)),
                tables.compute_slot_mappings(
                    mapping,
                    torch.tensor(starts, dtype=torch.int32, device=device),
                    torch.tensor(positions, device=device),
                    len(positions) + 3,
                ),
            )
            for tables in (stock, tagma)
        ]
        assert torch.equal(both[0][1], both[1][1])
        for request, row in enumerate(batch.tolist()):
            n = len(rows[row])
            expected = both[0][0][0][request, :n]
            assert expected.tolist() == rows[row]
            assert torch.equal(both[1][0][0][request, :n], expected)
    tagma.ranges.check_invariants()


def check_block_ids_are_not_written_unless_kept(device: str) -> None:
    dropped, kept = _tagma(device), _tagma(device, audit=SlotAudit())
    for tables in (dropped, kept):
        tables.append_block_ids(2, ([5, 6, 9],), overwrite=True)
        tables.apply_staged_writes()
    assert int(dropped.block_tables[0].gpu.abs().sum()) == 0
    assert dropped.block_tables[0]._staged_write_contents == []
    assert kept.block_tables[0].gpu[2, :3].tolist() == [5, 6, 9]
    for tables in (dropped, kept):
        assert int(tables.num_blocks.gpu[0, 2]) == 3


def check_padded_and_abandoned_rows_are_zeroed(device: str) -> None:
    tables = _tagma(device)
    for row in range(6):
        tables.append_block_ids(row, ([10 * row + 1, 10 * row + 2],), overwrite=True)
    tables.apply_staged_writes()
    every = torch.arange(6, dtype=torch.int32, device=device)
    tables.gather_block_tables(every, num_reqs_padded=6)
    (found,) = tables.gather_block_tables(every[:2], num_reqs_padded=3)
    assert found[:, :2].tolist() == [[1, 2], [11, 12], [0, 0]]
    assert int(tables.input_block_tables[0][2:].abs().sum()) == 0  # vLLM 0.33 does so too


def _slots_and_table(
    tables: TagmaBlockTables, row: int, device: str
) -> tuple[list[int], list[int]]:
    """The slot of each block's first position, and the blocks that attention reads."""
    mapping = torch.tensor([row], dtype=torch.int32, device=device)
    n = int(tables.num_blocks.np[0, row])
    (table,) = tables.gather_block_tables(mapping, 1)
    positions = torch.arange(n, device=device) * 16
    starts = torch.tensor([0, n], dtype=torch.int32, device=device)
    slots = tables.compute_slot_mappings(mapping, starts, positions, n)
    return slots[0].tolist(), table[0, :n].tolist()


@pytest.mark.parametrize("audited", [False, True])
def check_moved_blocks_replace_the_first_of_a_row(device: str, audited: bool) -> None:
    """And what the same step appends comes behind them; with id rows, the audit agrees."""
    audit = SlotAudit() if audited else None
    tables = _tagma(device, audit=audit)
    tables.append_block_ids(2, ([5, 6, 9, 30],), overwrite=True)
    tables.append_block_ids(4, ([7],), overwrite=True)
    tables.apply_staged_writes()
    addresses = [t.data_ptr() for t in tables.ranges.tables]
    tables.replace_leading_blocks(2, [(40, 2), (12, 1)], request="request a")
    tables.append_block_ids(2, ([31, 32],), overwrite=False)
    assert tables.ranges.num_ranges(group=0, row=2) == 3
    tables.apply_staged_writes()
    expected = [40, 41, 12, 30, 31, 32]
    assert _slots_and_table(tables, 2, device) == ([16 * i for i in expected], expected)
    assert _slots_and_table(tables, 4, device) == ([16 * 7], [7])
    assert [t.data_ptr() for t in tables.ranges.tables] == addresses
    assert audit is None or audit.counters() == {"batches": 2, "slots": 7, "padded": 0}
    ids = tables.block_tables[0].gpu[2, :6].tolist()
    assert ids == (expected if audited else [0] * 6)


def check_a_move_that_does_not_fit_the_row_is_refused(device: str) -> None:
    tables = _tagma(device, max_num_blocks_per_group=[600], audit=SlotAudit())
    tables.append_block_ids(1, (list(range(1, 301)),), overwrite=True)
    tables.apply_staged_writes()
    with pytest.raises(InvariantError, match=r"301 moved blocks for request abc \(row 1\), whose"):
        tables.replace_leading_blocks(1, [(400, 301)], request="request abc")
    ranges = [(2 * i + 500, 1) for i in range(256)]
    with pytest.raises(RangeCapError, match=r"request abc \(row 1\) form 257 ranges"):
        tables.replace_leading_blocks(1, ranges, request="request abc")
    tables.apply_staged_writes()
    assert _slots_and_table(tables, 1, device)[1] == list(range(1, 301))


def check_moves_while_writes_are_redirected_lead_nowhere(device: str) -> None:
    tables = _tagma(device, audit=SlotAudit())
    tables.append_block_ids(0, ([5, 6, 9],), overwrite=True)
    tables.redirect_writes_to_null_block = True
    tables.replace_leading_blocks(0, [(40, 2)], request="request a")
    tables.apply_staged_writes()
    assert _slots_and_table(tables, 0, device) == ([-1, -1, 144], [0, 0, 9])


def check_dummy_tables_are_zero_and_persistent(device: str) -> None:
    tables = _tagma(device)
    tables.append_block_ids(0, ([3, 4],), overwrite=True)
    tables.apply_staged_writes()
    (real,) = tables.gather_block_tables(
        torch.zeros(1, dtype=torch.int32, device=device), num_reqs_padded=1
    )
    address = real.data_ptr()
    (dummy,) = tables.get_dummy_block_tables(4)
    assert dummy.data_ptr() == address
    assert int(dummy.abs().sum()) == 0
    slots = tables.get_dummy_slot_mappings(9)
    assert slots.data_ptr() == tables.slot_mappings.data_ptr()
    assert set(tables.slot_mappings.flatten().tolist()) == {-1}


def check_tables_go_where_the_caller_wants(device: str) -> None:
    """Speculators and context parallelism give buffers of their own."""
    tables = _tagma(device)
    tables.append_block_ids(1, ([3, 4, 8],), overwrite=True)
    tables.apply_staged_writes()
    out = torch.full((3, 64), kernel_checks.STALE, dtype=torch.int32, device=device)
    slots = torch.full((1, 20), kernel_checks.STALE, dtype=torch.int64, device=device)
    mapping = torch.ones(1, dtype=torch.int32, device=device)
    pointers = torch.tensor([out.data_ptr()], dtype=torch.uint64, device=device)
    (found,) = tables.gather_block_tables(mapping, 2, out=(out,), out_ptrs=pointers)
    assert found[0, :4].tolist() == [3, 4, 8, kernel_checks.STALE]
    assert found[1].tolist() == [0] * 64
    assert out[2].tolist() == [kernel_checks.STALE] * 64
    starts = torch.tensor([0, 2], dtype=torch.int32, device=device)
    positions = torch.tensor([31, 32], device=device)
    tables.compute_slot_mappings(mapping, starts, positions, 4, out=slots)
    assert slots[0].tolist() == [4 * 16 + 15, 8 * 16] + [-1] * 18
    assert int(tables.slot_mappings.abs().sum()) == 0


def check_redirected_writes_have_no_slots(device: str) -> None:
    """Elastic warm-up sends KV to the null block; here it is written nowhere."""
    tables = _tagma(device)
    tables.redirect_writes_to_null_block = True
    tables.append_block_ids(0, ([7, 8],), overwrite=True)
    tables.redirect_writes_to_null_block = False
    tables.append_block_ids(0, ([9],), overwrite=False)
    tables.apply_staged_writes()
    mapping = torch.zeros(1, dtype=torch.int32, device=device)
    (table,) = tables.gather_block_tables(mapping, 1)
    assert table[0, :3].tolist() == [0, 0, 9]
    starts = torch.tensor([0, 3], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 31, 32], device=device)
    assert tables.compute_slot_mappings(mapping, starts, positions, 3)[0].tolist() == [-1, -1, 144]


def check_too_many_ranges_are_refused_at_the_append(device: str) -> None:
    tables = _tagma(device, max_num_blocks_per_group=[600], audit=SlotAudit())
    tables.append_block_ids(3, ([2 * i + 1 for i in range(256)],), overwrite=True)
    tables.apply_staged_writes()
    before = tables.block_tables[0].gpu.clone()
    with pytest.raises(RangeCapError) as error:
        tables.append_block_ids(3, ([700],), overwrite=False)
    message = str(error.value)
    assert "row 3 form 257 ranges" in message
    assert "holds 256 per request. Raise --block-size" in message
    assert int(tables.num_blocks.np[0, 3]) == 256
    tables.append_block_ids(3, ([512],), overwrite=False)  # joins the last range
    tables.apply_staged_writes()
    assert tables.ranges.num_ranges(group=0, row=3) == 256
    before[3, 256] = 512
    assert torch.equal(tables.block_tables[0].gpu, before)


def check_a_row_too_long_is_refused_as_by_vllm(device: str) -> None:
    messages = []
    for tables in _pair(device):
        tables.append_block_ids(0, ([1, 2],), overwrite=True)
        with pytest.raises(RuntimeError) as error:
            tables.append_block_ids(0, (list(range(3, 70)),), overwrite=False)
        messages.append(str(error.value))
        assert int(tables.num_blocks.np[0, 0]) == 2
    assert messages[0] == messages[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cp_size": 2}, "--decode-context-parallel-size is 2"),
        (
            {"block_sizes": [1 << 20], "max_num_blocks_per_group": [2048], "max_num_reqs": 1},
            "Lower --max-model-len",
        ),
    ],
)
def check_unsupported_tables_are_refused(
    device: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        _tagma(device, **changes)


def check_the_audit_sees_a_wrong_slot(device: str) -> None:
    audit = SlotAudit()
    tables = _tagma(device, audit=audit)
    tables.append_block_ids(0, ([7, 8, 30],), overwrite=True)
    tables.append_block_ids(1, ([4],), overwrite=True)
    tables.apply_staged_writes()
    mapping = torch.tensor([1, -1, 0], dtype=torch.int32, device=device)
    starts = torch.tensor([0, 2, 3, 5], dtype=torch.int32, device=device)
    positions = torch.tensor([0, 15, 0, 31, 32], device=device)
    tables.compute_slot_mappings(mapping, starts, positions, 8)
    assert audit.counters() == {"batches": 1, "slots": 5, "padded": 1}
    tables.ranges.tables.range_start[0, 0, 1] = 29
    with pytest.raises(InvariantError, match=r"row 0 .*position 32: slot 464 by range arith"):
        tables.compute_slot_mappings(mapping, starts, positions, 8)


@pytest.mark.skipif(not HAS_WINDOW, reason="this vLLM does not mask below sliding windows")
def check_sliding_windows_are_masked_as_by_vllm(device: str) -> None:
    stock, tagma = _pair(
        device,
        block_sizes=[16, 16],
        max_num_blocks_per_group=[64, 64],
        sliding_window_reach=[0, 40],
    )
    computed = torch.tensor([0, 100, 500, 55, 0, 0, 0, 0], dtype=torch.int32, device=device)
    mapping = torch.tensor([2, 0, 3, 1], dtype=torch.int32, device=device)
    tables = []
    for each in (stock, tagma):
        for row in range(4):
            ids = [*range(50 * row + 1, 50 * row + 9), *range(50 * row + 20, 50 * row + 45)]
            each.append_block_ids(row, (ids, [i + 1000 for i in ids]), overwrite=True)
        each.apply_staged_writes()
        tables.append(each.gather_block_tables(mapping, 5, num_computed_tokens=computed))
    for expected, found in zip(*tables, strict=True):
        assert torch.equal(found, expected)
    assert int((tables[1][1][:4, :33] == 0).sum()) > 20
