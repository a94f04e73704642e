"""The kernels of attention over range tables: no table load inside a range.

A paged kernel loads one table entry per key, in its inner loop. Here a row that is one range is one
loop without any table load: its keys begin at one address, and a tile is address arithmetic
whatever number of blocks it spans. A row of several ranges is a loop over ranges around that loop,
so tiles end where ranges end, and a range costs the load of its descriptor.

    row      |-- range 0 --|---- range 1 ----|-- 2 --|      piece or window: [first_key, end_key)
    tiles    [tile][tile][t|[tile][tile][tile|[tile][|      masked where a range ends

Scores are logits in base 2. The baseline they are compared with is ``unified_attention`` of vLLM.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def range_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    sink_ptr,
    acc_ptr,
    highest_ptr,
    total_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    range_start_ptr,
    range_cum_ptr,
    num_ranges_ptr,
    num_blocks_ptr,
    rows,
    requests,
    scale,
    soft_cap,
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
    WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr,
    SINKS: tl.constexpr,
    SPANS: tl.constexpr,
    SEARCH: tl.constexpr,
    PIECES: tl.constexpr,
    MAX_RANGES: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(0)
    first_query = request * 0
    if SEARCH:
        request, first_query = find_queries(query_start_loc_ptr, request, requests, QUERIES)
    kv_head = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    if first_query >= query_len:
        return
    seq_len = tl.load(seq_lens_ptr + request)
    index = tl.load(idx_mapping_ptr + request)
    served = (index >= 0) & (index < rows)
    row = tl.where(served, index, 0).to(tl.int64)
    range_start_ptr += row * MAX_RANGES
    range_cum_ptr += row * MAX_RANGES
    num_ranges = tl.load(num_ranges_ptr + row)
    num_blocks = tl.where(served, tl.load(num_blocks_ptr + row), 0)

    lane_m = tl.arange(0, ROWS)
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
    before = seq_len - query_len
    position = before + query_index

    highest = tl.full([ROWS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([ROWS], dtype=tl.float32)
    if SINKS:  # noqa: SIM102 - a constant and a value of the device do not join
        if piece == 0:
            sink = tl.load(sink_ptr + head, mask=live, other=float("-inf")).to(tl.float32)
            highest = sink * 1.4426950408889634
            total = tl.where(live, 1.0, 0.0)
    acc = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)

    end_key = tl.minimum(before + tl.minimum(first_query + QUERIES, query_len), seq_len)
    end_key = tl.minimum(end_key, num_blocks * BLOCK_SIZE)
    first_key = end_key * 0
    if WINDOW > 0:
        first_key = tl.maximum(before + first_query - WINDOW + 1, 0)
    if PIECES > 1:
        length = tl.cdiv(tl.maximum(end_key - first_key, 0), PIECES * TILE) * TILE
        first_key += piece * length
        end_key = tl.minimum(first_key + length, end_key)

    key_ptr += kv_head * key_stride_2
    value_ptr += kv_head * value_stride_2
    if num_ranges == 1:
        start = tl.load(range_start_ptr)
        end_key = tl.where(start == NULL_BLOCK, first_key, end_key)
        acc, highest, total = _attend_range(
            acc, highest, total, query, position, live,
            key_ptr, value_ptr, start.to(tl.int64), first_key, end_key, scale, soft_cap,
            key_stride_0, key_stride_1, value_stride_0, value_stride_1,
            HEAD, HEAD_PADDED, BLOCK_SIZE, WINDOW, SOFT_CAP, SPANS, TILE,
        )  # fmt: skip
    elif first_key < end_key:
        lane_r = tl.arange(0, MAX_RANGES)
        cums = tl.load(range_cum_ptr + lane_r, mask=lane_r < num_ranges, other=0x7FFFFFFF)
        first_range = tl.sum((cums <= first_key // BLOCK_SIZE).to(tl.int32), axis=0) - 1
        last_range = tl.sum((cums <= (end_key - 1) // BLOCK_SIZE).to(tl.int32), axis=0) - 1
        for r in range(first_range, last_range + 1):
            start = tl.load(range_start_ptr + r)
            cum = tl.load(range_cum_ptr + r)
            next_cum = tl.load(range_cum_ptr + r + 1, mask=r < num_ranges - 1, other=num_blocks)
            low = tl.maximum(first_key, cum * BLOCK_SIZE)
            high = tl.minimum(end_key, next_cum * BLOCK_SIZE)
            high = tl.where(start == NULL_BLOCK, low, high)
            acc, highest, total = _attend_range(
                acc, highest, total, query, position, live,
                key_ptr, value_ptr, (start - cum).to(tl.int64), low, high, scale, soft_cap,
                key_stride_0, key_stride_1, value_stride_0, value_stride_1,
                HEAD, HEAD_PADDED, BLOCK_SIZE, WINDOW, SOFT_CAP, SPANS, TILE,
            )  # fmt: skip

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


@triton.jit  # type: ignore[untyped-decorator]
def join_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    acc_ptr,
    highest_ptr,
    total_ptr,
    query_start_loc_ptr,
    requests,
    out_stride_0,
    out_stride_1,
    piece_width,
    HEAD: tl.constexpr,
    HEAD_PADDED: tl.constexpr,
    PIECES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    if token >= tl.load(query_start_loc_ptr + requests):  # padding of a graph: nothing was written
        return
    lane = tl.arange(0, PIECES)
    dim = tl.arange(0, HEAD_PADDED)
    entry = (token * tl.num_programs(1) + head) * PIECES + lane
    highest = tl.load(highest_ptr + entry)
    top = tl.max(highest, axis=0)
    weight = tl.exp2(highest - tl.where(top == float("-inf"), 0.0, top))
    total = tl.sum(weight * tl.load(total_ptr + entry), axis=0)
    acc = tl.load(
        acc_ptr + entry[:, None] * piece_width + dim[None, :],
        mask=(dim < HEAD)[None, :],
        other=0.0,
    )
    acc = tl.sum(acc * weight[:, None], axis=0) / tl.where(total == 0.0, 1.0, total)
    tl.store(
        out_ptr + token * out_stride_0 + head * out_stride_1 + dim,
        acc.to(out_ptr.dtype.element_ty),
        mask=dim < HEAD,
    )


@triton.jit  # type: ignore[untyped-decorator]
def find_queries(query_start_loc_ptr, tile, requests, QUERIES: tl.constexpr):  # type: ignore[no-untyped-def]
    """The request and the first query of a tile of queries.

    Request r owns the tiles from ``query_start_loc[r] // QUERIES + r`` on, which needs no sum over
    the requests before it and leaves at most one tile of each without a query.
    """
    low = tile * 0
    high = low + requests
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_loc_ptr + middle) // QUERIES + middle <= tile:
            low = middle + 1
        else:
            high = middle
    request = low - 1
    first = tl.load(query_start_loc_ptr + request) // QUERIES + request
    return request, (tile - first) * QUERIES


@triton.jit  # type: ignore[untyped-decorator]
def _attend_range(  # type: ignore[no-untyped-def]
    acc, highest, total, query, position, live,
    key_ptr, value_ptr, shift, low, high, scale, soft_cap,
    key_stride_0, key_stride_1, value_stride_0, value_stride_1,
    HEAD: tl.constexpr, HEAD_PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr,
    SOFT_CAP: tl.constexpr, SPANS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Adds the keys in ``[low, high)`` of one range: block ``shift + position // BLOCK_SIZE``."""
    lane = tl.arange(0, TILE)
    dim = tl.arange(0, HEAD_PADDED)
    for i in range(low, high, TILE):
        key_pos = i + lane
        inside = key_pos < high
        mask = inside[:, None] & (dim < HEAD)[None, :]
        if SPANS:
            # Made anew in each tile: kept from tile to tile they cost 46 registers a thread on
            # sm_90, a third of what fits on a processor, and saved 28 of 265 instructions.
            slot = shift * BLOCK_SIZE + key_pos
            key_at = key_ptr + (slot * key_stride_1)[:, None] + dim[None, :]
            value_at = value_ptr + (slot * value_stride_1)[:, None] + dim[None, :]
        else:
            first = shift + i // BLOCK_SIZE  # 64 bits once a tile, 32 from there to its keys
            offset = i % BLOCK_SIZE + lane
            block = offset // BLOCK_SIZE
            offset -= block * BLOCK_SIZE
            key_row = block * key_stride_0 + offset * key_stride_1
            value_row = block * value_stride_0 + offset * value_stride_1
            key_at = key_ptr + first * key_stride_0 + key_row[:, None] + dim[None, :]
            value_at = value_ptr + first * value_stride_0 + value_row[:, None] + dim[None, :]
        key = tl.load(key_at, mask=mask, other=0.0)
        value = tl.load(value_at, mask=mask, other=0.0)
        score = tl.dot(query, tl.trans(key.to(query.dtype))) * scale
        if SOFT_CAP:
            # tanh by a power of a negative number, which cannot overflow; in base 2 as the rest.
            x = score / soft_cap
            e = tl.exp2(-2.0 * tl.abs(x))
            score = soft_cap * tl.where(x < 0, e - 1.0, 1.0 - e) / (1.0 + e) * 1.4426950408889634
        sees = inside[None, :] & (key_pos[None, :] <= position[:, None])
        if WINDOW > 0:
            sees = sees & (position[:, None] - key_pos[None, :] < WINDOW)
        score = tl.where(sees & live[:, None], score, float("-inf"))
        now = tl.maximum(highest, tl.max(score, axis=1))
        base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf is no number
        weight = tl.exp2(score - base[:, None])
        old = tl.exp2(highest - base)
        total = total * old + tl.sum(weight, axis=1)
        acc = acc * old[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype))
        highest = now
    return acc, highest, total
