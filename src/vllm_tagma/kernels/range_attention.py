"""Attention over range tables: checks, and how the kernels are launched.

As in vLLM's Triton attention, decode and prefill are one kernel: a program serves a tile of queries
of one request and one KV head. Where a batch of decodes is too small to fill a device, each program
takes a piece of a row's keys, and a second kernel joins the pieces. What the loops do and load:
``attention_kernels.py``.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import torch
import triton

from vllm_tagma.kernels import attention_kernels
from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.ranges import MAX_RANGES, NULL_BLOCK

TILE: Final = 32
"""Keys that a program reads at a time."""

LOG2_E: Final = 1.4426950408889634


class Pieces(NamedTuple):
    """Where pieces of rows meet, fp32; contents mean nothing between calls.

    ``acc``: [tokens, heads, pieces, head size or more]. ``highest``, ``total``: [tokens, heads,
    pieces]. ``pieces`` is a power of two.
    """

    acc: torch.Tensor
    highest: torch.Tensor
    total: torch.Tensor


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
    pieces: Pieces | None = None,
) -> torch.Tensor:
    """Writes causal attention of ``query`` over the rows' keys to ``out``; returns it.

    ``query``, ``out``: [tokens, heads, head size]. Caches: [blocks, block size, KV heads, head
    size], any strides but 1 in the last dimension. ``idx_mapping``: [requests], the table row of
    each; -1 for none, whose output is zero. ``query_start_loc``: int32 [>= requests + 1].
    ``seq_lens``: int32 [requests], keys of a request, its queries last. ``window``: keys a query
    sees, itself included; 0 for all. ``sinks``: [heads], a logit that takes weight and has no
    value. ``pieces``: cut rows into so many, if every query is one token and ``tokens`` fit; both
    are mutated. Raises ``ValueError`` for shapes that do not fit; does not synchronise.
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
    head_padded = triton.next_power_of_2(head_size)
    # One tile of queries holds the longest: a program is a request, and none searches for its own.
    search = max_query_len > queries
    cut = pieces is not None and max_query_len == 1 and tokens <= pieces.acc.shape[0]
    count = pieces.acc.shape[2] if cut and pieces is not None else 1
    acc, highest, total = pieces if cut and pieces is not None else (None, None, None)
    grid = (tokens // queries + requests if search else requests, kv_heads, count)
    attention_kernels.range_attention_kernel[grid](
        out,
        query,
        key_cache,
        value_cache,
        sinks,
        acc,
        highest,
        total,
        idx_mapping,
        query_start_loc,
        seq_lens,
        *(table[group] for table in tables),
        tables.num_blocks.shape[1],
        requests,
        scale * LOG2_E,
        soft_cap,
        *(query.stride(0), query.stride(1), out.stride(0), out.stride(1)),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        pieces.acc.shape[3] if cut and pieces is not None else 0,
        PER_KV=per_kv,
        QUERIES=queries,
        ROWS=rows_m,
        HEAD=head_size,
        HEAD_PADDED=head_padded,
        BLOCK_SIZE=block_size,
        WINDOW=window,
        SOFT_CAP=soft_cap > 0,
        SINKS=sinks is not None,
        SPANS=spans_blocks(key_cache) and spans_blocks(value_cache),
        SEARCH=search,
        PIECES=count,
        MAX_RANGES=MAX_RANGES,
        NULL_BLOCK=NULL_BLOCK,
        TILE=TILE,
    )
    if cut and pieces is not None:
        attention_kernels.join_kernel[(tokens, heads)](
            out,
            *pieces,
            query_start_loc,
            requests,
            out.stride(0),
            out.stride(1),
            pieces.acc.shape[3],
            HEAD=head_size,
            HEAD_PADDED=head_padded,
            PIECES=count,
        )
    return out


def spans_blocks(cache: torch.Tensor) -> bool:
    """Whether a block's successor lies directly behind it in memory, for one KV head.

    ``cache``: [blocks, block size, KV heads, head size]. True for the layouts with tokens outside
    heads, false where each block holds its heads one after another.
    """
    return bool(cache.stride(0) == cache.shape[1] * cache.stride(1))
