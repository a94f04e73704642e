"""The baseline of the read path: attention over a block table, as vLLM's Triton attention does it.

Written for comparison, with vLLM's algorithm, grid, tiles and cut into pieces: one table load per
key in the inner loop. ``TABLE = False`` is the same kernel without those loads, for rows whose
blocks follow each other: both read the same keys, so what the loads cost is the difference.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tagma.kernels.attention_kernels import find_queries, join_kernel
from vllm_tagma.kernels.range_attention import LOG2_E, Pieces

PREFILL_TILE = 32
DECODE_TILE = 16


def paged_attention(
    block_table: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    pieces: Pieces | None = None,
    loads_table: bool = True,
) -> torch.Tensor:
    """Causal attention over a batch's ``block_table``, int32 [requests, blocks].

    The rest as ``range_attention``. Without ``loads_table`` only a row's first entry is read.
    """
    tokens, heads, head_size = query.shape
    _, block_size, kv_heads, _ = key_cache.shape
    requests = seq_lens.shape[0]
    per_kv = heads // kv_heads
    rows_m = max(16, triton.next_power_of_2(per_kv))
    queries = rows_m // per_kv
    count = 1 if pieces is None else pieces.acc.shape[2]
    acc, highest, total = (None, None, None) if pieces is None else pieces
    paged_attention_kernel[(tokens // queries + requests, kv_heads, count)](
        out,
        query,
        key_cache,
        value_cache,
        acc,
        highest,
        total,
        block_table,
        query_start_loc,
        seq_lens,
        requests,
        scale * LOG2_E,
        block_table.stride(0),
        *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        0 if pieces is None else pieces.acc.shape[3],
        PER_KV=per_kv,
        QUERIES=queries,
        ROWS=rows_m,
        HEAD=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        PIECES=count,
        TABLE=loads_table,
        TILE=PREFILL_TILE if pieces is None else DECODE_TILE,
    )
    if pieces is not None:
        join_kernel[(tokens, heads)](
            out,
            *pieces,
            query_start_loc,
            requests,
            out.stride(0),
            out.stride(1),
            pieces.acc.shape[3],
            HEAD=head_size,
            HEAD_PADDED=triton.next_power_of_2(head_size),
            PIECES=count,
        )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    acc_ptr,
    highest_ptr,
    total_ptr,
    block_table_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    requests,
    scale,
    table_stride,
    query_stride_0,
    query_stride_1,
    out_stride_0,
    out_stride_1,
    key_stride_0,
    key_stride_1,
    key_stride_2,
    value_stride_0,
    value_stride_1,
    value_stride_2,
    piece_width,
    PER_KV: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PIECES: tl.constexpr,
    TABLE: tl.constexpr,
    TILE: tl.constexpr,
):
    request, first_query = find_queries(query_start_loc_ptr, tl.program_id(0), requests, QUERIES)
    kv_head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    table_ptr = block_table_ptr + request.to(tl.int64) * table_stride
    lane_m = tl.arange(0, ROWS)
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, HEAD_PADDED)
    query_index = first_query + lane_m // PER_KV
    head = kv_head * PER_KV + lane_m % PER_KV
    live = (query_index < query_len) & (lane_m < QUERIES * PER_KV)
    mask_q = live[:, None] & (dim < HEAD)[None, :]
    token = (first_token + query_index).to(tl.int64)
    query = tl.load(
        query_ptr + token[:, None] * query_stride_0 + head[:, None] * query_stride_1 + dim[None, :],
        mask=mask_q,
        other=0.0,
    )
    position = seq_len - query_len + query_index
    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    acc = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)
    first_key = first_query * 0
    end_key = seq_len - query_len + tl.minimum(first_query + QUERIES, query_len)
    if PIECES > 1:
        length = tl.cdiv(end_key, PIECES * TILE) * TILE
        first_key += piece * length
        end_key = tl.minimum(first_key + length, end_key)
    first_block = tl.load(table_ptr).to(tl.int64)
    key_ptr += kv_head * key_stride_2
    value_ptr += kv_head * value_stride_2
    for i in range(first_key, end_key, TILE):
        key_pos = i + lane
        inside = key_pos < end_key
        if TABLE:
            block = tl.load(table_ptr + key_pos // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        else:
            block = first_block + key_pos // BLOCK_SIZE
        offset = key_pos % BLOCK_SIZE
        key_row = block * key_stride_0 + offset * key_stride_1
        value_row = block * value_stride_0 + offset * value_stride_1
        mask = inside[:, None] & (dim < HEAD)[None, :]
        key = tl.load(key_ptr + key_row[:, None] + dim[None, :], mask=mask, other=0.0)
        value = tl.load(value_ptr + value_row[:, None] + dim[None, :], mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key)) * scale
        sees = inside[None, :] & (key_pos[None, :] <= position[:, None]) & live[:, None]
        score = tl.where(sees, score, float("-inf"))
        now = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)
        weight = tl.exp2(score - base[:, None])
        old = tl.exp2(highest - base)
        total = total * old + tl.sum(weight, axis=1)
        acc = acc * old[:, None] + tl.dot(weight.to(query.dtype), value)
        highest = now
    if PIECES > 1:
        entry = (token * tl.num_programs(1) * PER_KV + head) * PIECES + piece
        tl.store(highest_ptr + entry, highest, mask=live)
        tl.store(total_ptr + entry, total, mask=live)
        tl.store(acc_ptr + entry[:, None] * piece_width + dim[None, :], acc, mask=mask_q)
    else:
        acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
        tl.store(
            out_ptr + token[:, None] * out_stride_0 + head[:, None] * out_stride_1 + dim[None, :],
            acc.to(out_ptr.dtype.element_ty),
            mask=mask_q,
        )
