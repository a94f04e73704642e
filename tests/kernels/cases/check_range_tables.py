"""Range tables: encoding at the append, staged writes, the cap, and addresses that stay."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from vllm_tagma.kernels import range_tables
from vllm_tagma.kernels.range_tables import (
    MAX_RANGES,
    DeviceRangeTables,
    RangeTables,
    TooManyRangesError,
)
from vllm_tagma.lab.kernel_check import kernel_reference


def _ids(tables: DeviceRangeTables, row: int, group: int = 0) -> list[int]:
    """The ids of a row as the device has them."""
    host = tables.host_copy()
    return [int(i) for i in kernel_reference.decode(host.tables, group=group, row=row)]


def _state(tables: DeviceRangeTables) -> list[list[int]]:
    return [t.flatten().tolist() for t in tables.tables]


def check_random_appends_equal_a_list(device: str) -> None:
    """A list per row is the model; ids are drawn so that ranges join, break and are null."""
    rng = np.random.default_rng(11)
    tables = DeviceRangeTables(groups=2, rows=5, device=device)
    model: list[list[list[int]]] = [[[] for _ in range(5)] for _ in range(2)]
    for _ in range(150):
        row, overwrite = int(rng.integers(5)), bool(rng.random() < 0.2)
        new = []
        for group in range(2):
            ids = [] if overwrite else list(model[group][row])
            for _ in range(int(rng.integers(0, 7))):
                joins = ids and ids[-1] and rng.random() < 0.7
                ids.append(ids[-1] + 1 if joins else int(rng.integers(0, 4)))
            new.append(ids[0 if overwrite else len(model[group][row]) :])
            model[group][row] = ids
        tables.append(row, new, overwrite=overwrite)
        for group in range(2):
            ids = model[group][row]
            assert tables.num_blocks(group=group, row=row) == len(ids)
            assert tables.num_ranges(group=group, row=row) == len(kernel_reference.encode(ids))
        if rng.random() < 0.4:
            tables.apply_staged_writes()
            tables.check_invariants()
            at = int(rng.integers(5))
            assert [_ids(tables, at, group) for group in range(2)] == [m[at] for m in model]


def check_writes_show_only_when_applied(device: str) -> None:
    tables = DeviceRangeTables(groups=1, rows=2, device=device)
    tables.append(1, [[4, 5, 9]])
    assert tables.tables.num_blocks.tolist() == [[0, 0]]
    assert tables.num_blocks(group=0, row=1) == 3
    with pytest.raises(AssertionError, match="staged and not applied"):
        tables.check_invariants()
    tables.apply_staged_writes()
    assert _ids(tables, 1) == [4, 5, 9]


def check_only_the_changed_ranges_are_sent(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A block that extends the last range sends one header and no range."""
    sent: list[int] = []
    write_rows = range_tables.write_rows

    def spy(tables: object, packed: torch.Tensor, num_writes: int) -> None:
        sent.append(packed.numel())
        write_rows(tables, packed, num_writes)  # type: ignore[arg-type]

    monkeypatch.setattr(range_tables, "write_rows", spy)
    tables = DeviceRangeTables(groups=1, rows=2, device=device)
    tables.append(0, [[3, 4, 8]])
    tables.apply_staged_writes()
    tables.append(0, [[9]])
    tables.apply_staged_writes()
    tables.append(0, [[20]])
    tables.apply_staged_writes()
    tables.apply_staged_writes()
    header = range_tables.HEADER
    assert sent == [header + 4, header, header + 2]
    assert _ids(tables, 0) == [3, 4, 8, 9, 20]


def check_addresses_stay(device: str) -> None:
    tables = DeviceRangeTables(groups=1, rows=3, device=device)
    before = [t.data_ptr() for t in tables.tables]
    for step in range(4):
        tables.append(step % 3, [[7 * step + 1]], overwrite=step == 3)
        tables.apply_staged_writes()
    assert [t.data_ptr() for t in tables.tables] == before


def check_a_row_replaced_before_it_was_applied(device: str) -> None:
    tables = DeviceRangeTables(groups=1, rows=2, device=device)
    tables.append(0, [[1, 3, 5, 7]])
    tables.apply_staged_writes()
    tables.append(0, [[9, 11]])
    tables.append(0, [[40]], overwrite=True)
    tables.append(0, [[41]])
    tables.append(1, [[2]])
    tables.append(1, [[]], overwrite=True)
    tables.apply_staged_writes()
    tables.check_invariants()
    assert (_ids(tables, 0), _ids(tables, 1)) == ([40, 41], [])


def check_replaced_leading_blocks_equal_a_list(device: str) -> None:
    """Whole rows, parts that end inside a range, parts that join what stays; appends in between."""
    rng = np.random.default_rng(23)
    tables = DeviceRangeTables(groups=2, rows=3, device=device)
    model: list[list[list[int]]] = [[[] for _ in range(3)] for _ in range(2)]
    for _ in range(150):
        row, group = int(rng.integers(3)), int(rng.integers(2))
        ids = model[group][row]
        if rng.random() < 0.4:
            more = [int(rng.integers(0, 9)) + i for i in range(int(rng.integers(5)))]
            ids += more
            tables.append(row, [more if g == group else [] for g in range(2)])
        else:
            new: list[tuple[int, int]] = []
            left = int(rng.integers(0, len(ids) + 1))
            at = 0
            while at < left:
                count = int(rng.integers(1, left - at + 1))
                joins = at + count < len(ids) and rng.random() < 0.3
                start = max(1, ids[at + count] - count) if joins else int(rng.integers(0, 4))
                new.append((start, count))
                ids[at : at + count] = [start + i if start else 0 for i in range(count)]
                at += count
            tables.replace_leading(row, new, group=group)
        assert tables.num_blocks(group=group, row=row) == len(ids)
        assert tables.num_ranges(group=group, row=row) == len(kernel_reference.encode(ids))
        if rng.random() < 0.3:
            tables.apply_staged_writes()
            tables.check_invariants()
            assert [_ids(tables, row, g) for g in range(2)] == [m[row] for m in model]


def check_a_replacement_and_an_append_are_applied_together(device: str) -> None:
    """A step's move and its new blocks, over a row that the device has with more ranges."""
    tables = DeviceRangeTables(groups=1, rows=2, device=device)
    tables.append(0, [[1, 3, 5, 7, 9]])
    tables.append(1, [[50]])
    tables.apply_staged_writes()
    tables.replace_leading(0, [(20, 4)])
    tables.append(0, [[10, 11]])
    assert _state(tables)[3] == [5, 1]
    tables.apply_staged_writes()
    tables.check_invariants()
    assert (_ids(tables, 0), _ids(tables, 1)) == ([20, 21, 22, 23, 9, 10, 11], [50])


@pytest.mark.parametrize(
    ("ranges", "error", "message"),
    [
        ([(1, 301)], ValueError, "301 leading blocks for row 0, which has 300"),
        ([(1, 2), (9, 0)], ValueError, r"range \(9, 0\) is empty or negative"),
        ([(-1, 2)], ValueError, r"range \(-1, 2\) is empty"),
        ([(2 * i + 500, 1) for i in range(256)], TooManyRangesError, "form 257 ranges"),
    ],
)
def check_a_refused_replacement_leaves_the_row(
    device: str, ranges: list[tuple[int, int]], error: type[Exception], message: str
) -> None:
    tables = DeviceRangeTables(groups=1, rows=1, device=device)
    tables.append(0, [list(range(1, 301))])
    tables.apply_staged_writes()
    with pytest.raises(error, match=message):
        tables.replace_leading(0, ranges)
    tables.apply_staged_writes()
    tables.check_invariants()
    assert _ids(tables, 0) == list(range(1, 301))


@pytest.mark.parametrize("held", [0, 1, 255, 256])
@pytest.mark.parametrize("overwrite", [False, True])
def check_more_than_256_ranges_are_refused(device: str, held: int, overwrite: bool) -> None:
    """With count and cap; neither the group over the cap nor the one before it has changed."""
    tables = DeviceRangeTables(groups=2, rows=2, device=device)
    row = [2 * i + 1 for i in range(held)]
    tables.append(1, [row, row])
    tables.apply_staged_writes()
    before = _state(tables)
    more = [1000 + 2 * i for i in range(MAX_RANGES + 1 - (0 if overwrite else held))]
    with pytest.raises(TooManyRangesError, match="form 257 ranges; a row holds 256") as error:
        tables.append(1, [[5000], more] if held < 256 else [[], more], overwrite=overwrite)
    assert (error.value.group, error.value.needed, error.value.cap) == (1, 257, 256)
    tables.apply_staged_writes()
    assert _state(tables) == before
    assert tables.num_blocks(group=0, row=1) == held
    tables.append(1, [more[:-1]] * 2, overwrite=overwrite)
    tables.apply_staged_writes()
    assert _ids(tables, 1) == ([] if overwrite else row) + more[:-1]


def check_wrong_arguments_are_refused(device: str) -> None:
    tables = DeviceRangeTables(groups=2, rows=2, device=device)
    with pytest.raises(ValueError, match="block id -3 is negative"):
        tables.append(0, [[1], [2, -3]])
    with pytest.raises(ValueError, match="1 lists of block ids for 2 groups"):
        tables.append(0, [[1]])
    with pytest.raises(ValueError, match=r"row 2 is outside 0\.\.1"):
        tables.append(2, [[1], [1]])
    tables.apply_staged_writes()
    assert tables.tables.num_blocks.tolist() == [[0, 0], [0, 0]]


def check_tables_that_do_not_belong_together_are_refused(device: str) -> None:
    start, cum, ranges, blocks = RangeTables.empty(groups=1, rows=2, device=device)
    for wrong in (
        (start[:, :1], cum, ranges, blocks),
        (start, cum.long(), ranges, blocks),
        (start, cum[..., :128], ranges, blocks),
        (start, cum, ranges.T.contiguous(), blocks),
    ):
        with pytest.raises(ValueError, match="range tables must be int32, contiguous"):
            RangeTables(*wrong)


def check_the_write_kernel_equals_its_reference(device: str) -> None:
    rng = np.random.default_rng(5)
    headers, data = [], []
    begin = 4 * range_tables.HEADER
    for flat, count in zip(rng.permutation(6)[:4].tolist(), (0, 1, 17, 256), strict=True):
        first = int(rng.integers(0, 257 - count))
        headers.append([flat, first, count, first + count, int(rng.integers(0, 9999)), begin])
        data += rng.integers(0, 1 << 20, size=2 * count).tolist()
        begin += 2 * count
    packed = torch.tensor([*np.ravel(headers).tolist(), *data], dtype=torch.int32)
    found = DeviceRangeTables(groups=2, rows=3, device=device).tables
    expected = DeviceRangeTables(groups=2, rows=3, device="cpu").tables
    range_tables.write_rows(found, packed.to(device), 4)
    kernel_reference.write_rows(expected, packed, 4)
    assert all(torch.equal(f.cpu(), e) for f, e in zip(found, expected, strict=True))
