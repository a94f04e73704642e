"""The native range table against its specification in plain numpy."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import RangeCapError
from vllm_tagma.ranges import MAX_RANGES, Range, encode
from vllm_tagma.worker import reference
from vllm_tagma.worker.range_table import RangeTable

MAX_ROWS = 6
UNTOUCHED = -99


@st.composite
def row_layouts(draw: st.DrawFn, *, max_ranges: int = MAX_RANGES) -> list[int]:
    """Block ids of a row of up to ``max_ranges`` ranges, some of them null blocks."""
    num_ranges = draw(st.one_of(st.integers(0, 6), st.integers(1, max_ranges)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    # Ids up to 2**31 - 1: with blocks of 16 and more the slots are far beyond 2**31.
    top = draw(st.sampled_from([200, 2**20, 2**31 - 1]))
    block_ids: list[int] = []
    for _ in range(num_ranges):
        count = int(rng.integers(1, 8))
        start = 0 if rng.random() < 0.1 else int(rng.integers(1, top - 8))
        block_ids += [0] * count if start == 0 else range(start, start + count)
    return block_ids


@st.composite
def request_positions(draw: st.DrawFn, *, num_blocks: int, block_size: int) -> list[int]:
    """Positions of one request: a decode token, a prefill chunk, or anything at all."""
    length = num_blocks * block_size
    kind = draw(st.sampled_from(["none", "decode", "prefill", "any"]))
    if kind == "none":
        return []
    if kind == "decode":
        return [max(length - 1 - draw(st.integers(-2, 3)), 0)]
    if kind == "prefill":
        start = draw(st.integers(0, length))
        return list(range(start, start + draw(st.integers(1, 700))))
    return draw(st.lists(st.integers(-40, length + 40), max_size=40))


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[int]], list[list[int]], int]:
    block_size = draw(st.one_of(st.sampled_from([16, 32, 64, 128, 256]), st.integers(16, 256)))
    rows = draw(st.lists(row_layouts(), max_size=MAX_ROWS))
    positions = [
        draw(request_positions(num_blocks=len(row), block_size=block_size)) for row in rows
    ]
    return rows, positions, block_size


def compute(
    table: RangeTable, positions: list[list[int]], *, block_size: int, padding: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray, int]:
    query_start_loc = np.cumsum([0, *map(len, positions)], dtype=np.int32)
    flat = np.array([p for request in positions for p in request], dtype=np.int64)
    out = np.full(len(flat) + padding + 3, UNTOUCHED, dtype=np.int64)
    lookups = table.compute_slots(
        query_start_loc,
        flat,
        out,
        num_reqs=len(positions),
        pad_to=len(flat) + padding,
        block_size=block_size,
    )
    return query_start_loc, flat, out, lookups


def filled(rows: list[list[int]]) -> RangeTable:
    table = RangeTable(max_rows=MAX_ROWS)
    for row, block_ids in enumerate(rows):
        table.append(row, block_ids)
    return table


@given(row=row_layouts(), cuts=st.lists(st.integers(0, 2000), max_size=5), as_array=st.booleans())
def test_ranges_equal_the_reference_however_the_ids_arrive(
    row: list[int], cuts: list[int], as_array: bool
) -> None:
    table = RangeTable(max_rows=2)
    bounds = [0, *sorted(min(c, len(row)) for c in cuts), len(row)]
    for low, high in itertools.pairwise(bounds):
        part = row[low:high]
        table.append(1, np.array(part, dtype=np.int32) if as_array else part)
    assert table.ranges(1) == encode(row)
    assert table.num_ranges(1) == len(table.ranges(1))
    assert table.num_blocks(1) == len(row)
    assert table.ranges(0) == []


@settings(max_examples=200)
@given(batch=batches(), padding=st.integers(0, 20))
def test_slots_equal_the_reference(
    batch: tuple[list[list[int]], list[list[int]], int], padding: int
) -> None:
    rows, positions, block_size = batch
    table = filled(rows)
    starts, flat, out, _ = compute(table, positions, block_size=block_size, padding=padding)
    pad_to = len(flat) + padding
    expected = reference.compute_slots(
        rows, starts.tolist(), flat, block_size=block_size, pad_to=pad_to
    )
    np.testing.assert_array_equal(out[:pad_to], expected)
    assert (out[pad_to:] == UNTOUCHED).all()


@given(batch=batches())
def test_at_most_one_lookup_per_position_block(
    batch: tuple[list[list[int]], list[list[int]], int],
) -> None:
    rows, positions, block_size = batch
    *_, lookups = compute(filled(rows), positions, block_size=block_size)
    entered = 0
    for request in positions:
        blocks = [p // block_size if p >= 0 else None for p in request]
        entered += sum(
            block is not None and block != before
            for before, block in zip([None, *blocks], blocks, strict=False)
        )
    assert lookups <= entered


def test_lookups_of_scattered_and_contiguous_rows() -> None:
    table = filled([list(range(1, 129, 2)), list(range(500, 564))])
    prefill = list(range(64 * 32))
    assert compute(table, [prefill, []], block_size=32)[3] == 64  # one per position block
    assert compute(table, [[], prefill], block_size=32)[3] == 1  # one range serves them all
    assert compute(table, [[2047], [2047]], block_size=32)[3] == 2  # decoding


def test_slots_beyond_32_bits() -> None:
    table = filled([[2**31 - 1]])
    *_, out, _ = compute(table, [[255]], block_size=256)
    assert out[0] == 2**39 - 1


@settings(max_examples=60)
@given(data=st.data())
def test_rows_move_and_swap_like_lists(data: st.DataObject) -> None:
    rows: list[list[int]] = [[] for _ in range(MAX_ROWS)]
    table = RangeTable(max_rows=MAX_ROWS)
    row_index = st.integers(0, MAX_ROWS - 1)
    for _ in range(data.draw(st.integers(1, 30))):
        operation = data.draw(st.sampled_from(["append", "clear", "move", "swap"]))
        a, b = data.draw(row_index), data.draw(row_index)
        if operation == "append":
            block_ids = data.draw(row_layouts(max_ranges=8))
            table.append(a, block_ids)
            rows[a] = rows[a] + block_ids
        elif operation == "clear":
            table.clear(a)
            rows[a] = []
        elif operation == "swap":
            table.swap(a, b)
            rows[a], rows[b] = rows[b], rows[a]
        elif a != b:
            table.move(src=a, dst=b)
            rows[b], rows[a] = rows[a], []
        for row, block_ids in enumerate(rows):
            assert table.ranges(row) == encode(block_ids)


def test_cap_refusal_names_the_way_out_and_leaves_the_row() -> None:
    table = RangeTable(max_rows=2, name_row=lambda row: f"request abc (row {row})")
    table.append(1, list(range(1, 2 * MAX_RANGES, 2)))
    before = table.ranges(1)
    assert len(before) == 256
    with pytest.raises(RangeCapError) as caught:
        table.append(1, [512, 600, 700])
    message = str(caught.value)
    assert "request abc (row 1) form 258 ranges" in message
    assert "holds 256 per request" in message
    assert "--block-size" in message
    assert "reset the prefix cache" in message
    assert table.ranges(1) == before
    table.append(1, [512])  # growing the last range in place is still fine
    assert table.ranges(1)[-1] == Range(511, 2)


@pytest.mark.parametrize("row", [-1, 2, 2**40])
def test_rows_out_of_bounds(row: int) -> None:
    table = RangeTable(max_rows=2)
    for call in (
        lambda: table.append(row, [1]),
        lambda: table.write(row, 0, BlockRanges([(1, 1)])),
        lambda: table.check_write(row, 0, BlockRanges([(1, 1)])),
        lambda: table.packed(row, 0),
        lambda: table.clear(row),
        lambda: table.move(src=row, dst=0),
        lambda: table.move(src=0, dst=row),
        lambda: table.swap(0, row),
        lambda: table.num_ranges(row),
        lambda: table.num_blocks(row),
        lambda: table.ranges(row),
    ):
        with pytest.raises(ValueError, match=r"row|32 bits"):
            call()


@pytest.mark.parametrize("block_ids", [[4, -1], [2**31], [-(2**70)], np.array([-3], np.int32)])
def test_bad_ids_leave_the_row(block_ids: list[int]) -> None:
    table = filled([[3]])
    with pytest.raises((ValueError, OverflowError)):
        table.append(0, block_ids)
    assert table.ranges(0) == [Range(3, 1)]


@pytest.mark.parametrize(
    "block_ids", [["x"], None, np.array([1]), np.array([[1]], np.int32), np.array([1.0])]
)
def test_ids_of_a_wrong_type(block_ids: object) -> None:
    table = RangeTable(max_rows=1)
    with pytest.raises(TypeError):
        table.append(0, block_ids)  # type: ignore[arg-type]
    assert table.num_blocks(0) == 0


def _call(**changes: object) -> None:
    """One decode token of one request, with some arguments replaced."""
    arguments: dict[str, object] = {
        "query_start_loc": np.array([0, 1], np.int32),
        "positions": np.array([5], np.int64),
        "out": np.zeros(2, np.int64),
        "num_reqs": 1,
        "pad_to": 1,
        "block_size": 16,
    }
    filled([[3]]).compute_slots(**{**arguments, **changes})  # type: ignore[arg-type]


def _read_only() -> np.ndarray:
    out = np.zeros(2, np.int64)
    out.setflags(write=False)
    return out


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"query_start_loc": np.array([0, 1], np.int64)}, TypeError),
        ({"positions": np.array([5], np.int32)}, TypeError),
        ({"positions": np.array([5], np.uint64)}, TypeError),
        ({"positions": np.array([[5]], np.int64)}, TypeError),
        ({"positions": np.arange(4, dtype=np.int64)[::2]}, TypeError),
        ({"out": np.zeros(2, np.float64)}, TypeError),
        ({"out": np.zeros(4, np.int64)[::2]}, TypeError),
        ({"out": _read_only()}, (BufferError, ValueError)),
        ({"query_start_loc": np.array([0], np.int32)}, ValueError),
        ({"query_start_loc": np.array([1, 1], np.int32)}, ValueError),
        ({"query_start_loc": np.array([0, -1], np.int32)}, ValueError),
        ({"query_start_loc": np.array([0, 2], np.int32)}, ValueError),
        ({"num_reqs": -1}, ValueError),
        ({"num_reqs": MAX_ROWS + 1, "query_start_loc": np.zeros(9, np.int32)}, ValueError),
        ({"pad_to": 0}, ValueError),
        ({"pad_to": 3}, ValueError),
        ({"pad_to": -1}, ValueError),
        ({"block_size": 0}, ValueError),
        ({"block_size": -16}, ValueError),
    ],
)
def test_bad_batches_are_refused(
    changes: dict[str, object], error: type[Exception] | tuple[type[Exception], ...]
) -> None:
    _call()
    with pytest.raises(error):
        _call(**changes)


@settings(max_examples=150)
@given(data=st.data())
def test_writes_equal_a_plain_list(data: st.DataObject) -> None:
    """Growth, moves, cuts and refusals at a cap of six ranges; a refused write changes nothing."""
    rows: list[list[int]] = [[], []]
    table = RangeTable(max_rows=2, max_ranges=6)
    for _ in range(data.draw(st.integers(1, 12))):
        row = data.draw(st.integers(0, 1))
        first = data.draw(st.integers(0, len(rows[row]) + 1))
        block_ids = data.draw(st.lists(st.integers(0, 4), max_size=8))
        ranges = BlockRanges.from_ids(block_ids)
        wanted = rows[row][:first] + block_ids
        if first > len(rows[row]):
            with pytest.raises(ValueError, match="write from block"):
                table.write(row, first, ranges)
        elif len(encode(wanted)) > 6:
            with pytest.raises(RangeCapError):
                table.check_write(row, first, ranges)
            with pytest.raises(RangeCapError):
                table.write(row, first, ranges)
        else:
            before = table.ranges(row)
            table.check_write(row, first, ranges)
            written = table.write(row, first, ranges)
            rows[row] = wanted
            assert [r.start for r in table.ranges(row)[:written]] == [
                r.start for r in before[:written]
            ]
        for other, ids in enumerate(rows):
            assert table.ranges(other) == encode(ids)
            assert table.num_blocks(other) == len(ids)


def test_packed_ranges_are_starts_and_first_logical_blocks() -> None:
    table = filled([[7, 8, 9, 0, 0, 3, 4]])
    assert table.packed(0, 0).tolist() == [7, 0, 3, 0, 3, 5]
    assert table.packed(0, 2).tolist() == [3, 5]
    assert table.packed(0, 3).tolist() == []
    for first in (-1, 4):
        with pytest.raises(ValueError, match="of row 0, which has 3"):
            table.packed(0, first)


def test_a_write_takes_ranges_and_nothing_else() -> None:
    table = filled([[7]])
    with pytest.raises(TypeError, match="expected BlockRanges"):
        table.write(0, 0, [(1, 2)])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="expected BlockRanges"):
        table.check_write(0, 0, [1, 2])  # type: ignore[arg-type]
    assert table.ranges(0) == [Range(7, 1)]
