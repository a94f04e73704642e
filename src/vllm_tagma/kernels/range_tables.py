"""Range tables on the device: per cache group and request, the ranges that hold its blocks.

A row encodes block ids by run length: range r starts at physical block ``range_start[r]`` and at
logical block ``range_cum[r]``. So ``block = range_start + (position // block_size - range_cum)``.

    ids    7 8 9 | 0 0 | 3 4          0 is the null block: its run has stride 0 and no slots
    start  7       0     3
    cum    0       3     5            num_ranges 3, num_blocks 7

Ids arrive as plain lists, because whoever drives the worker (warm-up, dummy runs) invents them.
The host keeps a mirror; ``append`` changes it at once and notes what is new, and
``apply_staged_writes`` sends that in one copy and one kernel. The device tensors never move, so
CUDA graphs may hold their addresses.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

MAX_RANGES = 256
"""Ranges per row. A row is 2 KiB; the allocator keeps requests far below it."""

NULL_BLOCK = 0
"""vLLM's block without content; positions in it have no slot."""

PAD_SLOT_ID = -1
"""vLLM's marker for a token that is written nowhere."""

HEADER = 6
"""Words of a staged write's header; see ``write_rows``."""


class TooManyRangesError(RuntimeError):
    """The ids of a request form more ranges than a row holds. Nothing was changed."""

    def __init__(self, *, group: int, row: int, needed: int, cap: int) -> None:
        super().__init__(
            f"the block ids of row {row}, cache group {group} form {needed} ranges; a row holds "
            f"{cap}. Use larger blocks, or let the pool become less scattered."
        )
        self.group, self.row, self.needed, self.cap = group, row, needed, cap


@dataclass(frozen=True)
class RangeTables:
    """What the kernels read; all int32, contiguous, on one device.

    ``range_start`` and ``range_cum``: [groups, rows, max_ranges]. ``num_ranges`` and
    ``num_blocks``: [groups, rows]. Entries behind ``num_ranges`` mean nothing. Raises
    ``ValueError`` for tensors that do not belong together. Iterates in this order.
    """

    range_start: torch.Tensor
    range_cum: torch.Tensor
    num_ranges: torch.Tensor
    num_blocks: torch.Tensor

    def __post_init__(self) -> None:
        count = tuple(self.num_blocks.shape)
        shapes = ((*count, MAX_RANGES), (*count, MAX_RANGES), count, count)
        for table, shape in zip(self, shapes, strict=True):
            alike = table.dtype == torch.int32 and table.device == self.num_blocks.device
            if not (alike and tuple(table.shape) == shape and table.is_contiguous()):
                raise ValueError(
                    f"range tables must be int32, contiguous, on one device, {list(shape)}; "
                    f"found {table.dtype} {list(table.shape)} on {table.device}"
                )

    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from (self.range_start, self.range_cum, self.num_ranges, self.num_blocks)

    @staticmethod
    def empty(*, groups: int, rows: int, device: torch.device | str) -> RangeTables:
        """Tables without a block."""
        table, count = (groups, rows, MAX_RANGES), (groups, rows)
        return RangeTables(
            *(
                torch.zeros(s, dtype=torch.int32, device=device)
                for s in (table, table, count, count)
            )
        )


class _Plan(NamedTuple):
    """A checked append to one row: new ranges by their first ids and logical blocks."""

    kept_ranges: int
    starts: npt.NDArray[np.int32]
    cums: npt.NDArray[np.int32]
    num_blocks: int


class DeviceRangeTables:
    """Range tables of ``groups`` x ``rows`` with a host mirror and staged writes.

    ``device`` holds the tensors of ``tables``; their addresses never change.
    """

    def __init__(self, *, groups: int, rows: int, device: torch.device | str) -> None:
        self.tables = RangeTables.empty(groups=groups, rows=rows, device=device)
        self._device = torch.device(device)
        self._start = np.zeros((groups, rows, MAX_RANGES), dtype=np.int32)
        self._cum = np.zeros_like(self._start)
        self._num_ranges = np.zeros((groups, rows), dtype=np.int32)
        self._num_blocks = np.zeros_like(self._num_ranges)
        # (group, row) -> first range that the device does not have yet.
        self._staged: dict[tuple[int, int], int] = {}

    def append(
        self, row: int, block_ids: Sequence[Sequence[int]], *, overwrite: bool = False
    ) -> None:
        """Appends ``block_ids[group]`` to the row of each group, or replaces the row.

        Visible to kernels after ``apply_staged_writes``. O(ids). Raises ``TooManyRangesError``, and
        ``ValueError`` for a negative id or a wrong number of groups; no group is changed then.
        """
        if len(block_ids) != len(self._start):
            raise ValueError(f"{len(block_ids)} lists of block ids for {len(self._start)} groups")
        if not 0 <= row < self._start.shape[1]:
            raise ValueError(f"row {row} is outside 0..{self._start.shape[1] - 1}")
        plans = [
            self._plan(group, row, ids, overwrite=overwrite) for group, ids in enumerate(block_ids)
        ]
        for group, plan in enumerate(plans):
            if plan is not None:
                self._commit(group, row, plan)

    def replace_leading(
        self, row: int, ranges: Sequence[tuple[int, int]], *, group: int = 0
    ) -> None:
        """Replaces the first blocks of a row by those of ``ranges``, (start, count) each, in order.

        The row keeps its length and its other blocks. Visible to kernels after
        ``apply_staged_writes``, together with what is appended until then. O(ranges). Raises
        ``TooManyRangesError``, and ``ValueError`` for a range that is empty or negative or for more
        blocks than the row has; the row is unchanged then.
        """
        held = int(self._num_blocks[group, row])
        runs: list[tuple[int, int]] = []
        moved = 0
        for start, count in ranges:
            if start < 0 or count <= 0:
                raise ValueError(f"range ({start}, {count}) is empty or negative")
            _join(runs, start, count)
            moved += count
        if moved > held:
            raise ValueError(f"{moved} leading blocks for row {row}, which has {held}")
        used = int(self._num_ranges[group, row])
        starts = self._start[group, row, :used].tolist()
        cums = [*self._cum[group, row, :used].tolist(), held]
        for start, cum, end in zip(starts, cums, cums[1:], strict=False):
            kept = max(cum, moved)  # the first block of this range that stays
            if kept < end:
                _join(runs, start + kept - cum if start != NULL_BLOCK else start, end - kept)
        if len(runs) > MAX_RANGES:
            raise TooManyRangesError(group=group, row=row, needed=len(runs), cap=MAX_RANGES)
        encoded = np.array(runs, dtype=np.int32).reshape(-1, 2)
        self._commit(
            group,
            row,
            _Plan(
                kept_ranges=0,
                starts=encoded[:, 0],
                cums=np.cumsum(encoded[:, 1], dtype=np.int32) - encoded[:, 1],
                num_blocks=held,
            ),
        )

    def _plan(
        self, group: int, row: int, block_ids: Sequence[int], *, overwrite: bool
    ) -> _Plan | None:
        if not len(block_ids):
            if not overwrite:
                return None
            empty = np.empty(0, dtype=np.int32)
            return _Plan(kept_ranges=0, starts=empty, cums=empty, num_blocks=0)
        ids = np.asarray(block_ids, dtype=np.int32)
        if int(ids.min()) < 0:
            raise ValueError(f"block id {int(ids.min())} is negative")
        kept = 0 if overwrite else int(self._num_ranges[group, row])
        blocks = 0 if overwrite else int(self._num_blocks[group, row])
        begins = np.empty(len(ids), dtype=bool)
        begins[0] = kept == 0 or int(ids[0]) != self._next_id(group, row)
        if len(ids) > 1:
            before = ids[:-1]
            begins[1:] = ids[1:] != np.where(before == NULL_BLOCK, NULL_BLOCK, before + 1)
        heads = np.flatnonzero(begins)
        needed = kept + len(heads)
        if needed > MAX_RANGES:
            raise TooManyRangesError(group=group, row=row, needed=needed, cap=MAX_RANGES)
        return _Plan(
            kept_ranges=kept,
            starts=ids[heads],
            cums=(heads + blocks).astype(np.int32),
            num_blocks=blocks + len(ids),
        )

    def _next_id(self, group: int, row: int) -> int:
        """The id that would extend the last range of a row."""
        last = int(self._num_ranges[group, row]) - 1
        start = int(self._start[group, row, last])
        if start == NULL_BLOCK:
            return NULL_BLOCK
        return start + int(self._num_blocks[group, row]) - int(self._cum[group, row, last])

    def _commit(self, group: int, row: int, plan: _Plan) -> None:
        end = plan.kept_ranges + len(plan.starts)
        self._start[group, row, plan.kept_ranges : end] = plan.starts
        self._cum[group, row, plan.kept_ranges : end] = plan.cums
        self._num_ranges[group, row] = end
        self._num_blocks[group, row] = plan.num_blocks
        first = self._staged.get((group, row), plan.kept_ranges)
        self._staged[group, row] = min(first, plan.kept_ranges)

    def apply_staged_writes(self) -> None:
        """Brings the device tables up to date: one copy, one launch, no synchronisation.

        Runs in stream order, after kernels of earlier steps that read the tables.
        """
        if not self._staged:
            return
        rows = self._start.shape[1]
        headers = np.empty((len(self._staged), HEADER), dtype=np.int32)
        pieces, begin = [headers.ravel()], headers.size
        for header, ((group, row), first) in zip(headers, self._staged.items(), strict=True):
            end = int(self._num_ranges[group, row])
            blocks = int(self._num_blocks[group, row])
            header[:] = group * rows + row, first, end - first, end, blocks, begin
            pieces.append(self._start[group, row, first:end])
            pieces.append(self._cum[group, row, first:end])
            begin += 2 * (end - first)
        packed = torch.from_numpy(np.concatenate(pieces))
        if self._device.type == "cuda":
            # The caching host allocator keeps a pinned buffer until the copy from it has run.
            packed = packed.pin_memory()
        write_rows(self.tables, packed.to(self._device, non_blocking=True), len(headers))
        self._staged.clear()

    def num_ranges(self, *, group: int, row: int) -> int:
        """Ranges of a row, staged ones included."""
        return int(self._num_ranges[group, row])

    def num_blocks(self, *, group: int, row: int) -> int:
        """Blocks of a row, staged and null ones included."""
        return int(self._num_blocks[group, row])

    def host_copy(self) -> DeviceRangeTables:
        """A copy on the host, read back from the device. Synchronises."""
        assert not self._staged, "writes are staged and not applied"
        groups, rows = self._num_blocks.shape
        copy = DeviceRangeTables(groups=groups, rows=rows, device="cpu")
        for ours, theirs in zip(copy.tables, self.tables, strict=True):
            ours.copy_(theirs)
        return copy

    def check_invariants(self) -> None:
        """Checks the device tables against the mirror. Synchronises; raises ``AssertionError``."""
        assert not self._staged, "writes are staged and not applied"
        mirrors = (self._start, self._cum, self._num_ranges, self._num_blocks)
        names = ("range_start", "range_cum", "num_ranges", "num_blocks")
        for name, table, mirror in zip(names, self.tables, mirrors, strict=True):
            found = table.cpu().numpy()
            if found.ndim == 3:
                used = np.arange(MAX_RANGES) < self._num_ranges[..., None]
                found, mirror = found[used], mirror[used]
            assert np.array_equal(found, mirror), f"{name} on the device differs from the mirror"


def _join(runs: list[tuple[int, int]], start: int, count: int) -> None:
    """Appends a range to ``runs``, as a longer last one if it continues that."""
    if runs:
        last, length = runs[-1]
        if start == (NULL_BLOCK if last == NULL_BLOCK else last + length):
            runs[-1] = (last, length + count)
            return
    runs.append((start, count))


def write_rows(tables: RangeTables, packed: torch.Tensor, num_writes: int) -> None:
    """Writes rows as ``DeviceRangeTables`` packs them: headers, then each write's starts and cums.

    ``packed``: int32 on the tables' device. A header is (group * rows + row, first range, ranges to
    write, ranges in all, blocks in all, where the data begins). Mutates ``tables``.
    """
    _write_rows_kernel[(num_writes,)](packed, *tables, HEADER=HEADER, MAX_RANGES=MAX_RANGES)


@triton.jit  # type: ignore[untyped-decorator]
def _write_rows_kernel(  # type: ignore[no-untyped-def]
    packed_ptr,
    range_start_ptr,
    range_cum_ptr,
    num_ranges_ptr,
    num_blocks_ptr,
    HEADER: tl.constexpr,
    MAX_RANGES: tl.constexpr,
):
    header_ptr = packed_ptr + tl.program_id(0) * HEADER
    row = tl.load(header_ptr).to(tl.int64)
    first = tl.load(header_ptr + 1)
    count = tl.load(header_ptr + 2)
    tl.store(num_ranges_ptr + row, tl.load(header_ptr + 3))
    tl.store(num_blocks_ptr + row, tl.load(header_ptr + 4))

    starts_ptr = packed_ptr + tl.load(header_ptr + 5)
    lane = tl.arange(0, MAX_RANGES)
    mask = lane < count
    entry = row * MAX_RANGES + first + lane
    tl.store(range_start_ptr + entry, tl.load(starts_ptr + lane, mask=mask), mask=mask)
    tl.store(range_cum_ptr + entry, tl.load(starts_ptr + count + lane, mask=mask), mask=mask)
