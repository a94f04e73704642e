"""Range tables on the device: per cache group and request, the ranges that hold its blocks.

Range r of a row starts at physical block ``range_start[r]`` and at logical block ``range_cum[r]``.
So ``block = range_start + (position // block_size - range_cum)``.

    ids    7 8 9 | 0 0 | 3 4          0 is the null block: its run has stride 0 and no slots
    start  7       0     3
    cum    0       3     5            num_ranges 3, num_blocks 7

Which ranges a row has is not decided here. Whoever keeps rows on the host (while serving
``worker/staged_range_tables.py``, in the kernel checks plain Python) sends those that changed, all
rows of a step in one copy and one kernel. The tensors never move, so CUDA graphs may hold their
addresses.
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

from vllm_tagma.ranges import MAX_RANGES

HEADER = 6
"""Words of a row write's header; see ``write_rows``."""


class RowWrite(NamedTuple):
    """A row as it is from range ``first_range`` on, and its counts.

    ``ranges``: int32 [2 * n], the starts of its last n ranges and then their first logical blocks.
    What lies in front of ``first_range`` is on the device already.
    """

    group: int
    row: int
    first_range: int
    num_blocks: int
    ranges: npt.NDArray[np.int32]


@dataclass(frozen=True)
class DeviceRangeTables:
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
    def empty(*, groups: int, rows: int, device: torch.device | str) -> DeviceRangeTables:
        """Tables without a block."""
        table, count = (groups, rows, MAX_RANGES), (groups, rows)
        return DeviceRangeTables(
            *(
                torch.zeros(s, dtype=torch.int32, device=device)
                for s in (table, table, count, count)
            )
        )

    def send(self, writes: Sequence[RowWrite]) -> None:
        """Writes rows, at most one write each: one copy, one launch, no synchronisation.

        Runs in stream order, after kernels of earlier steps that read the tables. Mutates the
        tables. O(ranges written). The caller vouches for rows and ranges within the tables.
        """
        if not writes:
            return
        device = self.num_blocks.device
        packed = torch.from_numpy(pack_rows(writes, rows=self.num_blocks.shape[1]))
        if device.type == "cuda":
            # The caching host allocator keeps a pinned buffer until the copy from it has run.
            packed = packed.pin_memory()
        write_rows(self, packed.to(device, non_blocking=True), len(writes))

    def on_host(self) -> DeviceRangeTables:
        """A copy on the host. Synchronises."""
        return DeviceRangeTables(*(table.cpu().clone() for table in self))


def pack_rows(writes: Sequence[RowWrite], *, rows: int) -> npt.NDArray[np.int32]:
    """Row writes as ``write_rows`` takes them, for tables of ``rows`` rows a group. O(ranges)."""
    headers = np.empty((len(writes), HEADER), dtype=np.int32)
    begin = headers.size
    for header, (group, row, first, blocks, ranges) in zip(headers, writes, strict=True):
        count = len(ranges) // 2
        header[:] = group * rows + row, first, count, first + count, blocks, begin
        begin += 2 * count
    return np.concatenate([headers.ravel(), *(write.ranges for write in writes)])


def write_rows(tables: DeviceRangeTables, packed: torch.Tensor, num_writes: int) -> None:
    """Writes rows as ``pack_rows`` packs them: headers, then each write's starts and cums.

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
