"""What the kernels compute, in numpy: their specification, with their signatures.

Slow and obvious on purpose: it reads the tables one range and one request at a time. Tests and the
GPU check compare the kernels with it; nothing in a serving process imports it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from vllm_tagma.kernels.device_range_tables import HEADER, DeviceRangeTables, RowWrite
from vllm_tagma.ranges import NULL_BLOCK, PAD_SLOT_ID, encode


def row_write(block_ids: Sequence[int], *, group: int, row: int, first_range: int = 0) -> RowWrite:
    """What makes a row of the device tables hold these ids, sent from ``first_range`` on."""
    ranges = encode(block_ids)
    cums = [0, *accumulate(r.num_blocks for r in ranges)][:-1]
    sent = [r.start for r in ranges[first_range:]] + cums[first_range:]
    return RowWrite(group, row, first_range, len(block_ids), np.array(sent, dtype=np.int32))


def decode(tables: DeviceRangeTables, *, group: int, row: int) -> npt.NDArray[np.int64]:
    """The block ids of a row."""
    n = int(tables.num_ranges[group, row])
    starts = tables.range_start[group, row, :n].tolist()
    ends = [*tables.range_cum[group, row, 1:n].tolist(), int(tables.num_blocks[group, row])]
    cums = tables.range_cum[group, row, :n].tolist()
    ids: list[int] = []
    for start, cum, end in zip(starts, cums, ends[:n], strict=True):
        ids += [start + i if start != NULL_BLOCK else NULL_BLOCK for i in range(end - cum)]
    return np.array(ids, dtype=np.int64)


def compute_slot_mappings(
    tables: DeviceRangeTables,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_sizes: torch.Tensor,
    enabled: torch.Tensor,
    out: torch.Tensor,
) -> torch.Tensor:
    """As ``slot_mapping.compute_slot_mappings``."""
    slots = np.full(tuple(out.shape), PAD_SLOT_ID, dtype=np.int64)
    starts = query_start_loc.tolist()
    all_positions = positions.cpu().numpy()
    for group in range(len(slots)):
        block_size = int(block_sizes[group])
        for request, row in enumerate(idx_mapping.tolist()):
            if row < 0 or not bool(enabled[group]):
                continue
            ids = decode(tables, group=group, row=row)
            for token in range(starts[request], starts[request + 1]):
                position = int(all_positions[token])
                block = position // block_size
                if 0 <= block < len(ids) and ids[block] != NULL_BLOCK:
                    slots[group, token] = int(ids[block]) * block_size + position % block_size
    return out.copy_(torch.from_numpy(slots))


def expand_block_tables(
    tables: DeviceRangeTables,
    idx_mapping: torch.Tensor,
    *,
    group: int,
    num_rows: int,
    out: torch.Tensor,
    block_size: int,
    num_computed_tokens: torch.Tensor | None = None,
    sliding_window_reach: int = 0,
) -> torch.Tensor:
    """As ``expansion.expand_block_tables``."""
    rows = idx_mapping.tolist()
    for request in range(num_rows):
        if request >= len(rows) or rows[request] < 0:
            out[request].zero_()
            continue
        ids = decode(tables, group=group, row=rows[request])[: out.shape[1]]
        if sliding_window_reach > 0:
            assert num_computed_tokens is not None
            unseen = max(int(num_computed_tokens[rows[request]]) - sliding_window_reach, 0)
            ids[: unseen // block_size] = NULL_BLOCK
        out[request, : len(ids)] = torch.from_numpy(ids)
    return out[:num_rows]


def write_rows(tables: DeviceRangeTables, packed: torch.Tensor, num_writes: int) -> None:
    """As ``device_range_tables.write_rows``."""
    rows = tables.num_blocks.shape[1]
    data = packed.cpu().numpy()
    for flat, first, count, num_ranges, num_blocks, begin in data[: num_writes * HEADER].reshape(
        num_writes, HEADER
    ):
        group, row = divmod(int(flat), rows)
        starts, cums = np.split(data[begin : begin + 2 * count], 2)
        tables.range_start[group, row, first : first + count] = torch.from_numpy(starts)
        tables.range_cum[group, row, first : first + count] = torch.from_numpy(cums)
        tables.num_ranges[group, row] = int(num_ranges)
        tables.num_blocks[group, row] = int(num_blocks)
