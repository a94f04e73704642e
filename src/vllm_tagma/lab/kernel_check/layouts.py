"""Random physical layouts and batches, for the tests and the GPU check.

A layout fixes the number of ranges of each row; everything else is drawn from a seed. Ranges are
drawn so that no two neighbours join, otherwise a row would have fewer ranges than asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables, RowWrite
from vllm_tagma.lab.kernel_check.kernel_reference import row_write
from vllm_tagma.ranges import NULL_BLOCK, encode

Mix = Literal["prefill", "decode", "mixed"]


def draw_row(
    rng: np.random.Generator,
    *,
    num_ranges: int,
    num_blocks: int,
    first_id: int = 1,
    last_id: int,
    nulls: bool = False,
) -> list[int]:
    """Block ids of one row that form exactly ``num_ranges`` ranges in first_id..last_id.

    With ``nulls`` the first range is a run of null blocks. Needs ``num_blocks >= num_ranges``.
    """
    cuts = np.sort(rng.choice(np.arange(1, num_blocks), size=num_ranges - 1, replace=False))
    lengths = np.diff(np.concatenate([[0], cuts, [num_blocks]])).tolist()
    ids: list[int] = []
    for r, length in enumerate(lengths):
        if nulls and r == 0:
            ids += [NULL_BLOCK] * length
            continue
        start = int(rng.integers(first_id, last_id - length + 2))
        if ids and ids[-1] != NULL_BLOCK and start == ids[-1] + 1:
            start = start - 1 if start > first_id else start + 1
        ids += range(start, start + length)
    return ids


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of ids per group in range tables, and one step's requests over them.

    ``rows``: ids by group and table row. ``idx_mapping``: int32 [requests]. ``query_start_loc``:
    int32 [requests + 1]. ``positions``: int64 [tokens]. ``block_sizes``: int32 [groups].
    """

    tables: DeviceRangeTables
    rows: list[list[list[int]]]
    idx_mapping: torch.Tensor
    query_start_loc: torch.Tensor
    positions: torch.Tensor
    block_sizes: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """Tokens of the step."""
        return int(self.query_start_loc[-1])

    @property
    def block_size_list(self) -> list[int]:
        """``block_sizes`` on the host."""
        return [int(size) for size in self.block_sizes]

    def block_table(self, group: int, *, width: int) -> torch.Tensor:
        """The paged table of the same layout: int32 [rows, width], zero behind each row."""
        table = np.zeros((len(self.rows[group]), width), dtype=np.int32)
        for row, ids in enumerate(self.rows[group]):
            table[row, : len(ids)] = ids
        return torch.from_numpy(table).to(self.positions.device)


def draw_batch(
    *,
    seed: int,
    device: torch.device | str,
    requests: int,
    num_ranges: int | tuple[int, int] = 1,
    block_sizes: Sequence[int] = (16,),
    mix: Mix = "mixed",
    blocks_per_row: int = 0,
    max_query: int = 64,
    query: int | None = None,
    first_id: int = 1,
    last_id: int = 1 << 20,
    dummies: float = 0.0,
    nulls: bool = False,
) -> Batch:
    """A batch of ``requests`` requests, on ``requests`` + 3 table rows in random order.

    ``num_ranges``: of each row, or bounds to draw from. ``max_query``: tokens of the longest
    prefill. ``query``: tokens of every request, ending where its row ends, instead of ``mix``.
    ``first_id``, ``last_id``: bounds of block ids. ``dummies``: share of requests with index -1.
    ``nulls``: rows begin with null blocks.
    """
    rng = np.random.default_rng(seed)
    num_rows = requests + 3
    low, high = (num_ranges, num_ranges) if isinstance(num_ranges, int) else num_ranges
    tables = DeviceRangeTables.empty(groups=len(block_sizes), rows=num_rows, device=device)
    rows: list[list[list[int]]] = [[] for _ in block_sizes]
    heads: list[RowWrite] = []
    wholes: list[RowWrite] = []
    for row in range(num_rows):
        for group in range(len(block_sizes)):
            n = int(rng.integers(low, high + 1))
            blocks = max(blocks_per_row, n + int(rng.integers(0, n + 2)))
            rows[group].append(
                draw_row(
                    rng,
                    num_ranges=n,
                    num_blocks=blocks,
                    first_id=first_id,
                    last_id=last_id,
                    nulls=nulls,
                )
            )
            # In two pieces, as a request grows: the second write sends no range that the first one
            # sent, and may make its last one longer.
            ids = rows[group][row]
            head = ids[: int(rng.integers(0, len(ids) + 1))]
            known = len(encode(head))
            heads.append(row_write(head, group=group, row=row))
            wholes.append(row_write(ids, group=group, row=row, first_range=known))
    tables.send(heads)
    tables.send(wholes)

    index = rng.permutation(num_rows)[:requests]
    capacity = [
        min(len(rows[g][r]) * block_sizes[g] for g in range(len(block_sizes))) for r in index
    ]
    queries, positions = [], []
    for request in range(requests):
        prefills = mix == "prefill" or (mix == "mixed" and bool(rng.integers(2)))
        tokens = int(rng.integers(1, min(max_query, capacity[request]) + 1)) if prefills else 1
        first = int(rng.integers(0, capacity[request] - tokens + 1))
        if query is not None:
            tokens, first = query, capacity[request] - query
        queries.append(tokens)
        positions.append(np.arange(first, first + tokens, dtype=np.int64))
    index = np.where(rng.random(requests) < dummies, -1, index)

    def on_device(array: np.ndarray, dtype: torch.dtype) -> torch.Tensor:
        return torch.from_numpy(array).to(device=device, dtype=dtype)

    return Batch(
        tables=tables,
        rows=rows,
        idx_mapping=on_device(index, torch.int32),
        query_start_loc=on_device(np.concatenate([[0], np.cumsum(queries)]), torch.int32),
        positions=on_device(np.concatenate(positions), torch.int64),
        block_sizes=on_device(np.array(block_sizes), torch.int32),
    )
