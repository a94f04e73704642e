"""Attention that reads range tables: no table load inside a range.

A program serves a tile of queries of one request and one KV head. It walks the ranges that its
queries see; a range costs one descriptor load, and within it a tile of keys is address arithmetic,
whatever number of blocks it spans. A paged kernel loads one table entry per key. Where a block's
successor lies directly behind it in memory (``SPANS``) a tile is one strided matrix.

Decode and prefill are one kernel, as in vLLM's 2D path: a decode is a prefill of one query.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.ranges import MAX_RANGES, NULL_BLOCK

TILE = 32
"""Keys that a program reads at a time."""


def range_attention(
    tables: DeviceRangeTables,
    idx_mapping: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    *,
    group: int,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    max_query_len: int,
    scale: float,
    out: torch.Tensor,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Writes causal attention of ``query`` over the rows' keys to ``out``; returns it.

    ``query``, ``out``: [tokens, heads, head size]. Caches: [blocks, block size, KV heads, head
    size], any strides but 1 in the last dimension. ``idx_mapping``: [requests], the table row of
    each; -1 for none, whose output stays as it is. ``query_start_loc``: int32 [>= requests + 1].
    ``seq_lens``: int32 [requests], keys of a request, its queries last. ``window``: keys a query
    sees, itself included; 0 for all. ``sinks``: [heads], a logit that takes weight and has no
    value. Raises ``ValueError`` for shapes that do not fit; does not synchronise.
    """
    tokens, heads, head_size = query.shape
    _, block_size, kv_heads, cache_head_size = key_cache.shape
    if value_cache.shape != key_cache.shape or cache_head_size != head_size:
        raise ValueError(
            f"caches must be alike with head size {head_size}, not "
            f"{list(key_cache.shape)} and {list(value_cache.shape)}"
        )
    if heads % kv_heads:
        raise ValueError(f"{heads} query heads are no multiple of {kv_heads} KV heads")
    if out.shape != query.shape:
        raise ValueError(f"out must have shape {list(query.shape)}, not {list(out.shape)}")
    if any(t.stride(-1) != 1 for t in (query, out, key_cache, value_cache)):
        raise ValueError("query, out and caches must have stride 1 in their last dimension")
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"sinks must have shape [{heads}], not {list(sinks.shape)}")
    requests = idx_mapping.shape[0]
    if not (tokens and requests and max_query_len):
        return out
    per_kv = heads // kv_heads
    rows_m = max(16, triton.next_power_of_2(per_kv))
    queries = rows_m // per_kv
    spans = all(c.stride(0) == block_size * c.stride(1) for c in (key_cache, value_cache))
    grid = (triton.cdiv(max_query_len, queries), requests, kv_heads)
    _range_attention_kernel[grid](
        out,
        query,
        key_cache,
        value_cache,
        sinks,
        idx_mapping,
        query_start_loc,
        seq_lens,
        *(table[group] for table in tables),
        tables.num_blocks.shape[1],
        scale,
        soft_cap,
        *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        PER_KV=per_kv,
        QUERIES=queries,
        ROWS=rows_m,
        HEAD=head_size,
        HEAD_PADDED=triton.next_power_of_2(head_size),
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        SINKS=sinks is not None,
        SPANS=spans,
        MAX_RANGES=MAX_RANGES,
        NULL_BLOCK=NULL_BLOCK,
        TILE=TILE,
    )
    return out


@triton.jit  # type: ignore[untyped-decorator]
def _range_attention_kernel(  # type: ignore[no-untyped-def]
    out_ptr,
    query_ptr,
    key_ptr,
    value_ptr,
    sink_ptr,
    idx_mapping_ptr,
    query_start_loc_ptr,
    seq_lens_ptr,
    range_start_ptr,
    range_cum_ptr,
    num_ranges_ptr,
    num_blocks_ptr,
    rows,
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
    MAX_RANGES: tl.constexpr,
    NULL_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    request = tl.program_id(1)
    kv_head = tl.program_id(2).to(tl.int64)
    first_token = tl.load(query_start_loc_ptr + request)
    query_len = tl.load(query_start_loc_ptr + request + 1) - first_token
    first_query = tl.program_id(0) * QUERIES
    index = tl.load(idx_mapping_ptr + request)
    if (first_query >= query_len) | (index < 0) | (index >= rows):
        return
    row = index.to(tl.int64)
    seq_len = tl.load(seq_lens_ptr + request)
    range_start_ptr += row * MAX_RANGES
    range_cum_ptr += row * MAX_RANGES
    num_ranges = tl.load(num_ranges_ptr + row)
    num_blocks = tl.load(num_blocks_ptr + row)

    lane_m = tl.arange(0, ROWS)
    dim = tl.arange(0, HEAD_PADDED)
    lane_k = tl.arange(0, TILE)
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
    if SINKS:
        highest = tl.load(sink_ptr + head, mask=live, other=float("-inf")).to(tl.float32)
        total = tl.where(live, 1.0, 0.0)
    acc = tl.zeros([ROWS, HEAD_PADDED], dtype=tl.float32)

    end_key = tl.minimum(before + tl.minimum(first_query + QUERIES, query_len), seq_len)
    end_key = tl.minimum(end_key, num_blocks * BLOCK_SIZE)
    first_key = end_key * 0
    if WINDOW > 0:
        first_key = tl.maximum(before + first_query - WINDOW + 1, 0)

    # Only a row of several ranges needs a search.
    several = num_ranges > 1
    lane_r = tl.arange(0, MAX_RANGES)
    cums = tl.load(
        range_cum_ptr + lane_r, mask=lane_r < tl.where(several, num_ranges, 0), other=0x7FFFFFFF
    )
    first_range = num_ranges * 0
    last_range = num_ranges - 1
    if several:
        first_range = tl.sum((cums <= first_key // BLOCK_SIZE).to(tl.int32), axis=0) - 1
        last_range = tl.sum((cums <= (end_key - 1) // BLOCK_SIZE).to(tl.int32), axis=0) - 1

    for r in range(first_range, last_range + 1):
        start = tl.load(range_start_ptr + r)
        cum = tl.load(range_cum_ptr + r)
        next_cum = tl.load(range_cum_ptr + r + 1, mask=r < num_ranges - 1, other=num_blocks)
        shift = (start - cum).to(tl.int64)
        low = tl.maximum(first_key, cum * BLOCK_SIZE)
        high = tl.minimum(end_key, next_cum * BLOCK_SIZE)
        high = tl.where(start == NULL_BLOCK, low, high)
        for i in range(low, high, TILE):
            key_pos = i + lane_k
            inside = key_pos < high
            if SPANS:
                slot = shift * BLOCK_SIZE + key_pos
                key_at = slot * key_stride_1
                value_at = slot * value_stride_1
            else:
                block = key_pos // BLOCK_SIZE
                offset = key_pos - block * BLOCK_SIZE
                key_at = (shift + block) * key_stride_0 + offset * key_stride_1
                value_at = (shift + block) * value_stride_0 + offset * value_stride_1
            mask_k = inside[:, None] & (dim < HEAD)[None, :]
            key = tl.load(
                key_ptr + kv_head * key_stride_2 + key_at[:, None] + dim[None, :],
                mask=mask_k,
                other=0.0,
            )
            value = tl.load(
                value_ptr + kv_head * value_stride_2 + value_at[:, None] + dim[None, :],
                mask=mask_k,
                other=0.0,
            )
            score = tl.dot(query, tl.trans(key.to(query.dtype))) * scale
            if SOFT_CAP:
                # tanh(x) by exp of a negative number, which cannot overflow.
                x = score / soft_cap
                e = tl.exp(-2.0 * tl.abs(x))
                score = soft_cap * tl.where(x < 0, -1.0, 1.0) * (1.0 - e) / (1.0 + e)
            sees = inside[None, :] & (key_pos[None, :] <= position[:, None])
            if WINDOW > 0:
                sees = sees & (position[:, None] - key_pos[None, :] < WINDOW)
            score = tl.where(sees & live[:, None], score, float("-inf"))
            now = tl.maximum(highest, tl.max(score, axis=1))
            base = tl.where(now == float("-inf"), 0.0, now)  # -inf - -inf is no number
            weight = tl.exp(score - base[:, None])
            old = tl.exp(highest - base)
            total = total * old + tl.sum(weight, axis=1)
            acc = acc * old[:, None] + tl.dot(weight.to(query.dtype), value.to(query.dtype))
            highest = now

    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(
        out_ptr + token[:, None] * out_stride_0 + head[:, None] * out_stride_1 + dim[None, :],
        acc.to(out_ptr.dtype.element_ty),
        mask=mask_q,
    )
