"""The baseline: slots and tables from a block table, as vLLM's Model Runner V2 computes them.

Written for comparison, with vLLM's algorithm, grid and tile: one table load per position for slots,
and a copy of each row of the batch per step for attention. Used by tests (which also run vLLM's own
kernel where vLLM is installed) and by the GPU check, never in serving.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tagma.ranges import PAD_SLOT_ID

TILE = 1024


def compute_slot_mappings(
    block_table: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    *,
    block_size: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Slots of one group from its ``block_table`` (int32 [rows, blocks]) into ``out`` (int64 [n]).

    The rest as ``slot_mapping.compute_slot_mappings``, but positions must lie in their rows.
    """
    _slot_mapping_kernel[(1, idx_mapping.shape[0] + 1)](
        out,
        out.shape[0],
        idx_mapping,
        query_start_loc,
        positions,
        block_table,
        block_table.stride(0),
        block_size,
        PAD=PAD_SLOT_ID,
        TILE=TILE,
    )
    return out


def gather_block_tables(
    block_table: torch.Tensor,
    num_blocks: torch.Tensor,
    idx_mapping: torch.Tensor,
    *,
    num_rows: int,
    out: torch.Tensor,
) -> torch.Tensor:
    """Copies the rows of a batch from ``block_table`` to ``out``; zeroes rows without a request.

    ``num_blocks``: int32 [rows]. Entries behind a row's blocks stay as they are.
    """
    _gather_kernel[(1, num_rows)](
        out,
        out.stride(0),
        out.shape[1],
        idx_mapping,
        idx_mapping.shape[0],
        block_table,
        block_table.stride(0),
        num_blocks,
        TILE=TILE,
    )
    return out[:num_rows]


@triton.jit  # type: ignore[untyped-decorator]
def _slot_mapping_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    out_width,
    idx_mapping_ptr,
    query_start_loc_ptr,
    positions_ptr,
    block_table_ptr,
    block_table_stride,
    block_size,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1)
    first_token = tl.load(query_start_loc_ptr + request)
    if request == tl.num_programs(1) - 1:
        for i in range(first_token, out_width, TILE):
            token = i + tl.arange(0, TILE)
            tl.store(out_ptr + token, PAD, mask=token < out_width)
        return
    end_token = tl.load(query_start_loc_ptr + request + 1)
    index = tl.load(idx_mapping_ptr + request).to(tl.int64)
    served = index >= 0
    end_served = tl.where(served, end_token, first_token)
    for i in range(first_token, end_token, TILE):
        token = i + tl.arange(0, TILE)
        live = token < end_token
        position = tl.load(positions_ptr + token, mask=live, other=0)
        entry = block_table_ptr + index * block_table_stride + position // block_size
        block_id = tl.load(entry, mask=token < end_served, other=0).to(tl.int64)
        slot = block_id * block_size + position % block_size
        tl.store(out_ptr + token, tl.where(served, slot, PAD), mask=live)


@triton.jit(do_not_specialize=["num_requests"])  # type: ignore[untyped-decorator]
def _gather_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    out_stride,
    width,
    idx_mapping_ptr,
    num_requests,
    block_table_ptr,
    block_table_stride,
    num_blocks_ptr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1)
    out_ptr += request.to(tl.int64) * out_stride
    if request >= num_requests:
        for i in range(0, width, TILE):
            block = i + tl.arange(0, TILE)
            tl.store(out_ptr + block, 0, mask=block < width)
        return
    index = tl.load(idx_mapping_ptr + request).to(tl.int64)
    num_blocks = tl.load(num_blocks_ptr + index)
    for i in range(0, num_blocks, TILE):
        block = i + tl.arange(0, TILE)
        mask = block < num_blocks
        ids = tl.load(block_table_ptr + index * block_table_stride + block, mask=mask)
        tl.store(out_ptr + block, ids, mask=mask)
