"""Slots of a batch by range arithmetic: no table load per position.

A program serves one request of one cache group. If the request has several ranges it loads their
first blocks once, as one vector, and finds the ranges that a tile of positions touches by counting;
then one descriptor load per range touched, however many positions it holds. A paged kernel loads
one table entry per position (``lab/kernel_check/paged.py``).

The grid, the -1 convention and the padding follow vLLM's kernel, so that CUDA graphs see the same.
Slots are 64-bit throughout; vLLM multiplies in 32 bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tagma.kernels.arguments import check_batch
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.ranges import MAX_RANGES, NULL_BLOCK, PAD_SLOT_ID

TILE = 1024
"""Positions that a program handles at a time; vLLM's choice."""


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
    """Writes the slot of each token of each group to ``out``, over its full width; returns it.

    ``idx_mapping``: int32 or int64 [requests], the table row of each request; -1 for none.
    ``query_start_loc``: int32 [>= requests + 1], where each request's tokens begin, from 0.
    ``positions``: int64 [>= tokens]. ``block_sizes``: int32 [groups], tokens per block.
    ``enabled``: bool [groups]. ``out``: int64 [groups, width]. All on the device of ``tables``.

    ``PAD_SLOT_ID`` is written for requests without a row, groups not enabled, positions outside
    every range or in a null run, and behind the last request's tokens. Precondition: a row holds
    less than 2^31 positions. Raises ``ValueError`` for arguments that do not fit; does not
    synchronise, so values on the device are not checked.
    """
    check_batch(
        tables,
        idx_mapping=idx_mapping,
        query_start_loc=query_start_loc,
        positions=positions,
        block_sizes=block_sizes,
        enabled=enabled,
        out=out,
    )
    groups, rows, _ = tables.range_start.shape
    _slot_mapping_kernel[(groups, idx_mapping.shape[0] + 1)](
        out,
        out.stride(0),
        out.shape[1],
        idx_mapping,
        query_start_loc,
        positions,
        *tables,
        rows,
        block_sizes,
        enabled,
        MAX_RANGES=MAX_RANGES,
        NULL_BLOCK=NULL_BLOCK,
        PAD=PAD_SLOT_ID,
        TILE=TILE,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _slot_mapping_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    out_stride,
    out_width,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    range_start_ptr,
    range_cum_ptr,
    num_ranges_ptr,
    num_blocks_ptr,
    rows,
    block_sizes_ptr,
    enabled_ptr,
    MAX_RANGES: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    group = tl.program_id(0)
    request = tl.program_id(1)
    slots_ptr = out_ptr + group.to(tl.int64) * out_stride

    first_token = tl.load(query_start_loc_ptr + request)
    if request == tl.num_programs(1) - 1:
        # The tail, from the real tokens on: stale slots of an earlier step would be written to.
        for i in range(first_token, out_width, TILE):
            token = i + tl.arange(0, TILE)
            tl.store(slots_ptr + token, PAD, mask=token < out_width)
        return
    end_token = tl.load(query_start_loc_ptr + request + 1)

    index = tl.load(idx_mapping_ptr + request)
    served = (index >= 0) & (index < rows) & tl.load(enabled_ptr + group)
    row = group.to(tl.int64) * rows + tl.where(served, index, 0)
    block_size = tl.load(block_sizes_ptr + group)
    num_ranges = tl.load(num_ranges_ptr + row, mask=served, other=0)
    num_blocks = tl.load(num_blocks_ptr + row, mask=served, other=0)
    end_position = num_blocks.to(tl.int64) * block_size
    range_start_ptr += row * MAX_RANGES
    range_cum_ptr += row * MAX_RANGES

    # Only a row of several ranges needs a search: the first logical block of each, in registers.
    several = num_ranges > 1
    lane = tl.arange(0, MAX_RANGES)
    cums = tl.load(
        range_cum_ptr + lane, mask=lane < tl.where(several, num_ranges, 0), other=0x7FFFFFFF
    )

    for i in range(first_token, end_token, TILE):
        token = i + tl.arange(0, TILE)
        live = token < end_token
        position = tl.load(positions_ptr + token, mask=live, other=-1)
        inside = (position >= 0) & (position < end_position)
        # 32 bits hold a position of a row, and 64-bit division is slow on a GPU.
        position = tl.where(inside, position, 0).to(tl.int32)
        block = position // block_size
        offset = position - block * block_size

        first_range = num_ranges * 0
        last_range = num_ranges - 1
        if several:
            lowest = tl.min(tl.where(inside, block, 0x7FFFFFFE), axis=0)
            highest = tl.max(tl.where(inside, block, -1), axis=0)
            first_range = tl.sum((cums <= lowest).to(tl.int32), axis=0) - 1
            last_range = tl.sum((cums <= highest).to(tl.int32), axis=0) - 1

        slot = tl.full([TILE], PAD, dtype=tl.int64)
        for r in range(first_range, last_range + 1):
            start = tl.load(range_start_ptr + r)
            cum = tl.load(range_cum_ptr + r)
            physical = (start + block - cum).to(tl.int64)
            here = tl.where(start == NULL_BLOCK, PAD, physical * block_size + offset)
            slot = tl.where(block >= cum, here, slot)  # a later range overwrites an earlier one
        tl.store(slots_ptr + token, tl.where(inside, slot, PAD), mask=live)
