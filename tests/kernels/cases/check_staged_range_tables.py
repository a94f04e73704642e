"""V2's rows: written as ranges on the host, sent when applied, the cap, and addresses that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import RangeCapError
from vllm_tagma.kernels import device_range_tables
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.lab.kernel_check import kernel_reference
from vllm_tagma.ranges import MAX_RANGES, encode
from vllm_tagma.worker.staged_range_tables import RowEnd, StagedRangeTables


def _staged(device: str, *, groups: int = 1, rows: int = 2) -> StagedRangeTables:
    return StagedRangeTables(groups=groups, rows=rows, device=device)


def _write(tables: StagedRangeTables, row: int, first: int, *ids: list[int]) -> None:
    """The rows of groups 0, 1, ... from a block on."""
    tables.write(row, [RowEnd(g, first, BlockRanges.from_ids(i)) for g, i in enumerate(ids)])


def _ids(tables: StagedRangeTables, row: int, group: int = 0) -> list[int]:
    """The ids of a row as the device has them."""
    return [int(i) for i in kernel_reference.decode(tables.tables.on_host(), group=group, row=row)]


def _state(tables: StagedRangeTables) -> list[list[int]]:
    return [t.flatten().tolist() for t in tables.tables]


def check_random_writes_equal_a_list(device: str) -> None:
    """Rows of two groups are admitted, grown, moved, moved and grown, and cut; some writes are
    applied together. Ids are drawn so that ranges join, break and are null."""
    rng = np.random.default_rng(11)
    tables = _staged(device, groups=2, rows=5)
    model: list[list[list[int]]] = [[[] for _ in range(5)] for _ in range(2)]
    for _ in range(220):
        row = int(rng.integers(5))
        ends = []
        for group in rng.permutation(2)[: int(rng.integers(1, 3))].tolist():
            ids = model[group][row]
            first = len(ids) if rng.random() < 0.5 else int(rng.integers(0, len(ids) + 1))
            behind = ids[first + int(rng.integers(0, 4)) :] if rng.random() < 0.5 else []
            kept = ids[:first]
            for _ in range(int(rng.integers(0, 7))):
                joins = kept and kept[-1] and rng.random() < 0.7
                kept = [*kept, kept[-1] + 1 if joins else int(rng.integers(0, 4))]
            model[group][row] = kept + behind
            ends.append(RowEnd(group, first, BlockRanges.from_ids(model[group][row][first:])))
        tables.write(row, ends)
        for group in range(2):
            ids = model[group][row]
            assert tables.num_blocks(group=group, row=row) == len(ids)
            assert tables.ranges(group=group, row=row) == encode(ids)
            assert tables.num_ranges(group=group, row=row) == len(encode(ids))
        if rng.random() < 0.4:
            tables.apply_staged_writes()
            tables.check_invariants()
            for at in range(5):
                assert [_ids(tables, at, group) for group in range(2)] == [m[at] for m in model]


def check_writes_show_only_when_applied(device: str) -> None:
    tables = _staged(device)
    _write(tables, 1, 0, [4, 5, 9])
    assert tables.tables.num_blocks.tolist() == [[0, 0]]
    assert tables.num_blocks(group=0, row=1) == 3
    with pytest.raises(AssertionError, match="staged and not applied"):
        tables.check_invariants()
    tables.apply_staged_writes()
    assert _ids(tables, 1) == [4, 5, 9]


def check_invariants_see_what_differs(device: str) -> None:
    tables = _staged(device)
    _write(tables, 1, 0, [4, 5, 9])
    tables.apply_staged_writes()
    tables.check_invariants()
    for table, message in (
        (tables.tables.range_start, "group 0, row 1: ranges differ"),
        (tables.tables.range_cum, "group 0, row 1: ranges differ"),
        (tables.tables.num_ranges, "row 1: counts on the device differ"),
        (tables.tables.num_blocks, "row 1: counts on the device differ"),
    ):
        table[0, 1] += 1
        with pytest.raises(AssertionError, match=message):
            tables.check_invariants()
        table[0, 1] -= 1


def check_only_the_changed_ranges_are_sent(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that extends the last range sends one header and no range."""
    sent: list[int] = []
    write_rows = device_range_tables.write_rows

    def spy(tables: object, packed: torch.Tensor, num_writes: int) -> None:
        sent.append(packed.numel())
        write_rows(tables, packed, num_writes)  # type: ignore[arg-type]

    monkeypatch.setattr(device_range_tables, "write_rows", spy)
    tables = _staged(device)
    _write(tables, 0, 0, [3, 4, 8])
    tables.apply_staged_writes()
    _write(tables, 0, 3, [9])
    tables.apply_staged_writes()
    _write(tables, 0, 4, [20])
    tables.apply_staged_writes()
    tables.apply_staged_writes()
    _write(tables, 0, 3, [30, 21])  # a move of the end: the two ranges before stay
    tables.apply_staged_writes()
    header = device_range_tables.HEADER
    assert sent == [header + 4, header, header + 2, header + 4]
    assert _ids(tables, 0) == [3, 4, 8, 30, 21]


def check_addresses_stay(device: str) -> None:
    tables = _staged(device, rows=3)
    before = [t.data_ptr() for t in tables.tables]
    for step in range(4):
        _write(tables, step % 3, 0, [7 * step + 1])
        tables.apply_staged_writes()
    assert [t.data_ptr() for t in tables.tables] == before


def check_a_row_written_again_before_it_was_applied(device: str) -> None:
    tables = _staged(device)
    _write(tables, 0, 0, [1, 3, 5, 7])
    tables.apply_staged_writes()
    _write(tables, 0, 4, [9, 11])
    _write(tables, 0, 0, [40])
    _write(tables, 0, 1, [41])
    _write(tables, 1, 0, [2])
    _write(tables, 1, 0, [])
    tables.apply_staged_writes()
    tables.check_invariants()
    assert (_ids(tables, 0), _ids(tables, 1)) == ([40, 41], [])


@pytest.mark.parametrize("held", [0, 1, 255, 256])
@pytest.mark.parametrize("overwrite", [False, True])
def check_more_than_256_ranges_are_refused(device: str, held: int, overwrite: bool) -> None:
    """With count and cap; neither the group over the cap nor the one before it has changed."""
    tables = _staged(device, groups=2)
    row = [2 * i + 1 for i in range(held)]
    _write(tables, 1, 0, row, row)
    tables.apply_staged_writes()
    before = _state(tables)
    first = 0 if overwrite else held
    more = [1000 + 2 * i for i in range(MAX_RANGES + 1 - first)]
    with pytest.raises(RangeCapError, match=r"row 1 form 257 ranges; .* holds 256 per request"):
        _write(tables, 1, first, [5000] if first < 256 else [], more)
    tables.apply_staged_writes()
    assert _state(tables) == before
    assert [tables.ranges(group=group, row=1) for group in range(2)] == [encode(row)] * 2
    _write(tables, 1, first, more[:-1], more[:-1])
    tables.apply_staged_writes()
    assert _ids(tables, 1) == row[:first] + more[:-1]


@pytest.mark.parametrize(
    ("row", "first", "message"),
    [
        (2, 0, r"row 2 is outside \[0, 2\)"),
        (-1, 0, r"row -1 is outside"),
        (0, 4, "write from block 4 on to row 0, which has 3 blocks"),
        (0, -1, "write from block -1 on"),
    ],
)
def check_a_write_out_of_bounds_changes_no_group(
    device: str, row: int, first: int, message: str
) -> None:
    tables = _staged(device, groups=2)
    _write(tables, 0, 0, [5, 6, 9], [7, 8, 9])
    with pytest.raises(ValueError, match=message):
        tables.write(
            row, [RowEnd(0, 0, BlockRanges([(4, 1)])), RowEnd(1, first, BlockRanges([(4, 1)]))]
        )
    tables.apply_staged_writes()
    tables.check_invariants()
    assert (_ids(tables, 0), _ids(tables, 0, 1)) == ([5, 6, 9], [7, 8, 9])


def check_tables_that_do_not_belong_together_are_refused(device: str) -> None:
    start, cum, ranges, blocks = DeviceRangeTables.empty(groups=1, rows=2, device=device)
    for wrong in (
        (start[:, :1], cum, ranges, blocks),
        (start, cum.long(), ranges, blocks),
        (start, cum[..., :128], ranges, blocks),
        (start, cum, ranges.T.contiguous(), blocks),
    ):
        with pytest.raises(ValueError, match="range tables must be int32, contiguous"):
            DeviceRangeTables(*wrong)


def check_the_write_kernel_equals_its_reference(device: str) -> None:
    rng = np.random.default_rng(5)
    headers, data = [], []
    begin = 4 * device_range_tables.HEADER
    for flat, count in zip(rng.permutation(6)[:4].tolist(), (0, 1, 17, 256), strict=True):
        first = int(rng.integers(0, 257 - count))
        headers.append([flat, first, count, first + count, int(rng.integers(0, 9999)), begin])
        data += rng.integers(0, 1 << 20, size=2 * count).tolist()
        begin += 2 * count
    packed = torch.tensor([*np.ravel(headers).tolist(), *data], dtype=torch.int32)
    found = DeviceRangeTables.empty(groups=2, rows=3, device=device)
    expected = DeviceRangeTables.empty(groups=2, rows=3, device="cpu")
    device_range_tables.write_rows(found, packed.to(device), 4)
    kernel_reference.write_rows(expected, packed, 4)
    assert all(torch.equal(f.cpu(), e) for f, e in zip(found, expected, strict=True))
