"""Block tables of a batch straight from the ranges, for attention kernels that read tables.

The paged runner keeps a table row per request, writes new ids to it each step and copies the rows
of the batch into the tables that attention reads. Here the copy's source does not exist: an entry
is ``range_start + (block - range_cum)``, so a step stores and hardly loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tagma.kernels.arguments import check_expansion
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.ranges import MAX_RANGES, NULL_BLOCK

TILE = 1024
"""Table entries that a program writes at a time; vLLM's choice for its copy."""


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
    """Writes the block ids of a batch to ``out[:num_rows]``; returns that view.

    ``idx_mapping``: int32 or int64 [requests <= num_rows], the table row of each request; -1 for
    none. ``out``: int32 [>= num_rows, width], contiguous. Row r gets the ids of request r, at most
    ``width``; entries behind them stay as they are, like in vLLM. Rows without a request are zeroed
    over the full width. With ``sliding_window_reach`` > 0 (tokens), entries wholly below
    ``num_computed_tokens[row] - reach`` become the null block; ``num_computed_tokens``: int32
    [rows]. Raises ``ValueError`` for arguments that do not fit; does not synchronise.
    """
    check_expansion(
        tables,
        idx_mapping=idx_mapping,
        group=group,
        num_rows=num_rows,
        out=out,
        num_computed_tokens=num_computed_tokens,
        reach=sliding_window_reach,
    )
    masks_window = sliding_window_reach > 0
    if num_rows:
        _expansion_kernel[(num_rows,)](
            out,
            out.stride(0),
            out.shape[1],
            idx_mapping,
            idx_mapping.shape[0],
            *(table[group] for table in tables),
            tables.num_blocks.shape[1],
            num_computed_tokens if masks_window else tables.num_blocks,
            sliding_window_reach,
            block_size,
            MASKS_WINDOW=masks_window,
            MAX_RANGES=MAX_RANGES,
            NULL_BLOCK=NULL_BLOCK,
            TILE=TILE,
        )
    return out[:num_rows]


@triton.jit(do_not_specialize=["num_requests", "reach"])  # type: ignore[untyped-decorator]
def _expansion_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    out_stride,
    width,
    idx_mapping_ptr,
    num_requests,
    range_start_ptr,
    range_cum_ptr,
    num_ranges_ptr,
    num_blocks_ptr,
    rows,
    num_computed_tokens_ptr,
    reach,
    block_size,
    MASKS_WINDOW: tl.constexpr,
    MAX_RANGES: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    out_ptr += request.to(tl.int64) * out_stride
    index = tl.load(idx_mapping_ptr + request, mask=request < num_requests, other=-1)
    if (index < 0) | (index >= rows):
        for i in range(0, width, TILE):
            block = i + tl.arange(0, TILE)
            tl.store(out_ptr + block, NULL_BLOCK, mask=block < width)
        return

    row = index.to(tl.int64)
    num_ranges = tl.load(num_ranges_ptr + row)
    num_blocks = tl.minimum(tl.load(num_blocks_ptr + row), width)
    range_start_ptr += row * MAX_RANGES
    range_cum_ptr += row * MAX_RANGES
    several = num_ranges > 1
    lane = tl.arange(0, MAX_RANGES)
    cums = tl.load(
        range_cum_ptr + lane, mask=lane < tl.where(several, num_ranges, 0), other=0x7FFFFFFF
    )

    num_null = num_blocks * 0
    if MASKS_WINDOW:
        unseen = tl.maximum(tl.load(num_computed_tokens_ptr + row) - reach, 0)
        num_null = unseen // block_size

    for i in range(0, num_blocks, TILE):
        block = i + tl.arange(0, TILE)
        first_range = num_ranges * 0
        last_range = num_ranges - 1
        if several:
            first_range = tl.sum((cums <= i).to(tl.int32), axis=0) - 1
            end = tl.minimum(i + TILE, num_blocks)
            last_range = tl.sum((cums < end).to(tl.int32), axis=0) - 1
        ids = tl.full([TILE], NULL_BLOCK, dtype=tl.int32)
        for r in range(first_range, last_range + 1):
            start = tl.load(range_start_ptr + r)
            cum = tl.load(range_cum_ptr + r)
            here = tl.where(start == NULL_BLOCK, NULL_BLOCK, start + block - cum)
            ids = tl.where(block >= cum, here, ids)
        ids = tl.where(block < num_null, NULL_BLOCK, ids)
        tl.store(out_ptr + block, ids, mask=block < num_blocks)
