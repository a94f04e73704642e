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

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import InvariantError, RangeCapError, UnsupportedError
from vllm_tagma.integration import block_tables_v2
from vllm_tagma.integration.block_tables_v2 import TagmaBlockTables
from vllm_tagma.integration.row_updates import by_group
from vllm_tagma.lab.kernel_check import kernel_checks
from vllm_tagma.lab.kernel_check.layouts import draw_batch
from vllm_tagma.ranges import encode
from vllm_tagma.row_update import RowUpdate
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
    return TagmaBlockTables(
        keep_id_rows=False,
        audit=audit,
        request_of=lambda row: f"r{row}",
        **_arguments(device, **changes),
    )


def _updates(tables: TagmaBlockTables, *updates: RowUpdate) -> None:
    """A step with these row updates begins."""
    tables.updates = by_group(updates, tables.num_kv_cache_groups)


def _update(row: int, first: int, ids: list[int], group: int = 0) -> RowUpdate:
    return RowUpdate(f"r{row}", group, first, BlockRanges.from_ids(ids))


def _row_of(request: str) -> int | None:
    """What V2 knows of a request's row: rows 0 to 7 are in use."""
    return int(request[1:]) if request[1:] in set("01234567") else None


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
def check_row_updates_are_written_as_they_are(
    device: str, audited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Admission, a move with growth, a move alone, growth; with id rows, the audit agrees."""
    monkeypatch.setattr(block_tables_v2, "BlockRanges", None)  # nothing is derived from ids
    audit = SlotAudit() if audited else None
    tables = _tagma(device, audit=audit)
    _updates(tables, _update(2, 0, [5, 6, 9, 30]), _update(4, 0, [7, 50]))
    tables.append_block_ids(2, ([5, 6, 9, 30],), overwrite=True)
    tables.append_block_ids(4, ([7, 50],), overwrite=True)
    tables.apply_updates(_row_of)
    tables.apply_staged_writes()
    addresses = [t.data_ptr() for t in tables.ranges.tables]
    _updates(
        tables,
        _update(2, 0, [40, 41, 12, 30, 31, 32]),
        _update(4, 0, [8, 50]),
        RowUpdate("gone", 0, 3, _update(0, 0, [1]).ranges),
    )
    tables.append_block_ids(2, ([31, 32],), overwrite=False)
    tables.apply_updates(_row_of)
    assert tables.updates == [{}]
    assert tables.ranges.num_ranges(group=0, row=2) == 3
    tables.apply_staged_writes()
    expected = [40, 41, 12, 30, 31, 32]
    assert _slots_and_table(tables, 2, device) == ([16 * i for i in expected], expected)
    assert _slots_and_table(tables, 4, device) == ([16 * 8, 16 * 50], [8, 50])
    _updates(tables, _update(2, 6, [33]))
    tables.append_block_ids(2, ([33],), overwrite=False)
    tables.apply_staged_writes()
    assert _slots_and_table(tables, 2, device)[1] == [*expected, 33]
    assert [t.data_ptr() for t in tables.ranges.tables] == addresses
    assert audit is None or audit.counters() == {"batches": 3, "slots": 15, "padded": 0}
    ids = tables.block_tables[0].gpu[2, :7].tolist()
    assert ids == ([*expected, 33] if audited else [0] * 7)


def check_updates_and_ids_take_turns(device: str) -> None:
    """Two groups, null runs; some rows and groups of a step have updates, the others ids."""
    rng = np.random.default_rng(19)
    wide = {"block_sizes": [16, 64], "max_num_blocks_per_group": [64, 64]}
    tables = _tagma(device, audit=SlotAudit(), **wide)
    model: list[list[list[int]]] = [[[] for _ in range(8)] for _ in range(2)]
    for _ in range(60):
        row, overwrite = int(rng.integers(8)), bool(rng.random() < 0.3)
        updates, appended = [], []
        for group in range(2):
            ids = [] if overwrite else list(model[group][row])
            first = len(ids)
            start = int(rng.choice([0, 1, int(rng.integers(1, 900))]))
            more = [start + i if start else 0 for i in range(int(rng.integers(0, 5)))]
            more = more if len(ids) + len(more) <= 64 else []
            told = bool(rng.random() < 0.6)
            if told and first and rng.random() < 0.5:  # moved as well
                first = int(rng.integers(first))
                ids[first:] = [int(rng.integers(900, 999)) for _ in ids[first:]]
            model[group][row] = ids + more
            appended.append(more)
            if told:
                updates.append(_update(row, first, model[group][row][first:], group))
        _updates(tables, *updates)
        if overwrite or any(appended):
            tables.append_block_ids(row, tuple(appended), overwrite=overwrite)
        tables.apply_updates(_row_of)
        if rng.random() < 0.5:
            tables.apply_staged_writes()
            tables.ranges.check_invariants()
            for group in range(2):
                for at in range(8):
                    ids = model[group][at]
                    assert tables.ranges.ranges(group=group, row=at) == encode(ids)
                    assert tables.block_tables[group].gpu[at, : len(ids)].tolist() == ids
                    assert int(tables.num_blocks.np[group, at]) == len(ids)


def check_an_update_that_does_not_fit_is_refused(device: str) -> None:
    """By count, in appends and moves; nor are ranges beyond the cap taken. No group changes."""
    two = {"block_sizes": [16, 16], "max_num_blocks_per_group": [600, 600]}
    tables = _tagma(device, audit=SlotAudit(), **two)
    row = list(range(1, 301))
    tables.append_block_ids(1, (row, [7]), overwrite=True)
    tables.apply_staged_writes()
    scattered = [2 * i + 500 for i in range(256)] + row[256:]
    grown = _update(1, 1, [8], group=1)
    for update, new, error, message in (
        (
            _update(1, 0, [*row, 400]),
            None,
            InvariantError,
            "r1 names blocks 0 to 301 .* 300",
        ),
        (_update(1, 301, [400]), None, InvariantError, "blocks 301 to 302 of group 0; .* has 300"),
        (_update(1, 300, [301]), [301, 302], InvariantError, "300 blocks and the step brings 2"),
        (
            _update(1, 300, [301, 303]),
            [301, 302],
            InvariantError,
            "law W1 .*301 .*303 .* 302",
        ),
        (_update(1, 0, scattered), None, RangeCapError, r"request r1 \(row 1\) form 257 ranges"),
        (_update(1, 0, [*scattered, 9]), [9], RangeCapError, "form 258 ranges"),
    ):
        if new is None:
            _updates(tables, update)
            with pytest.raises(error, match=message):
                tables.apply_updates(_row_of)
        else:
            _updates(tables, update, grown)
            with pytest.raises(error, match=message):
                tables.append_block_ids(1, (new, [8]), overwrite=False)
            # The other way round the group that could be written comes first, and is not.
            swapped = _tagma(device, audit=SlotAudit(), **two)
            swapped.append_block_ids(1, ([7], row), overwrite=True)
            _updates(swapped, grown._replace(group=0), update._replace(group=1))
            with pytest.raises(error, match=message.replace("group 0", "group 1")):
                swapped.append_block_ids(1, ([8], new), overwrite=False)
            assert swapped.ranges.ranges(group=0, row=1) == [(7, 1)]
            assert swapped.num_blocks.np[:, 1].tolist() == [1, 300]
    tables.apply_staged_writes()
    tables.ranges.check_invariants()
    assert [tables.ranges.ranges(group=g, row=1) for g in range(2)] == [[(1, 300)], [(7, 1)]]
    assert tables.block_tables[0].gpu[1, :302].tolist() == [*row, 0, 0]
    assert tables.num_blocks.np[:, 1].tolist() == [300, 1]
    assert tables.block_tables[1].gpu[1, :2].tolist() == [7, 0]


def check_updates_while_writes_are_redirected_lead_nowhere(device: str) -> None:
    tables = _tagma(device, audit=SlotAudit())
    tables.append_block_ids(0, ([5, 6, 9],), overwrite=True)
    tables.redirect_writes_to_null_block = True
    _updates(tables, _update(0, 1, [40, 9]))
    tables.apply_updates(_row_of)
    tables.apply_staged_writes()
    assert _slots_and_table(tables, 0, device) == ([80, -1, -1], [5, 0, 0])


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
    assert "request r3 (row 3) form 257 ranges" in message
    assert "holds 256 per request. Raise --block-size" in message
    assert int(tables.num_blocks.np[0, 3]) == 256
    tables.append_block_ids(3, ([512],), overwrite=False)  # joins the last range
    tables.apply_staged_writes()
    assert tables.ranges.num_ranges(group=0, row=3) == 256
    before[3, 256] = 512
    assert torch.equal(tables.block_tables[0].gpu, before)


def check_a_row_too_long_is_refused_where_vllm_refuses_it(device: str) -> None:
    stock, tagma = _pair(device)
    for tables, message in (
        (stock, r"\(69 > 64\)"),
        (tagma, r"law W2 .*request r0 \(row 0\), group 0, would have 69 blocks.*holds 64 a row"),
    ):
        tables.append_block_ids(0, ([1, 2],), overwrite=True)
        with pytest.raises(RuntimeError, match=message):
            tables.append_block_ids(0, (list(range(3, 70)),), overwrite=False)
        tables.append_block_ids(0, (list(range(3, 65)),), overwrite=False)  # 2 were held still
    assert tagma.ranges.ranges(group=0, row=0) == [(1, 64)]


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
    with pytest.raises(InvariantError, match=r"\(row 0\).*position 32: slot 464 by range arith"):
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
