"""Attention over ranges equals a reference in fp32 and vLLM's Triton attention over block tables.

The interpreter got bf16 wrong in this kernel (products of 1e9), so bf16 is not compared here.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

if os.environ["TAGMA_KERNEL_DEVICE"] == "cpu":
    # What vLLM's CPU worker imports first.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables, RowWrite
from vllm_tagma.kernels.range_attention import range_attention


def _rows(
    rng: np.random.Generator, counts: list[int], ranges: int
) -> tuple[list[list[int]], list[RowWrite], int]:
    """Block ids and row writes of rows of ``counts`` blocks, each of at most ``ranges`` ranges."""
    pieces, writes = [], []
    for row, count in enumerate(counts):
        number = min(ranges, count)
        cuts = np.sort(rng.choice(np.arange(1, count), number - 1, replace=False))
        cums = np.array([0, *cuts])
        pieces += [
            (row, int(c), int(n)) for c, n in zip(cums, np.diff([*cums, count]), strict=True)
        ]
    rng.shuffle(pieces)
    ids = [[0] * count for count in counts]
    starts: list[dict[int, int]] = [{} for _ in counts]
    block = 1
    for row, cum, length in pieces:
        ids[row][cum : cum + length] = range(block, block + length)
        starts[row][cum] = block
        block += length + 1  # a gap, so that ranges never join
    for row, count in enumerate(counts):
        cums = sorted(starts[row])
        words = np.array([*(starts[row][c] for c in cums), *cums], dtype=np.int32)
        writes.append(RowWrite(0, row, 0, count, words))
    return ids, writes, block


def _reference(q: Any, k: Any, v: Any, scale: float, window: int, cap: float, sinks: Any) -> Any:
    """Causal attention of one request in fp32. ``q``: [queries, heads, d], ``k``: [keys, kv, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.float().repeat_interleave(group, dim=1) for t in (k, v))
    score = torch.einsum("qhd,khd->hqk", q.float(), k) * scale
    if cap:
        score = cap * torch.tanh(score / cap)
    place = torch.arange(k.shape[0] - q.shape[0], k.shape[0], device=q.device)[:, None]
    key = torch.arange(k.shape[0], device=q.device)[None]
    sees = key <= place
    if window:
        sees &= place - key < window
    score = score.masked_fill(~sees, -math.inf)
    if sinks is not None:
        sink = sinks.float()[:, None, None].expand(-1, q.shape[0], 1)
        score = torch.cat([score, sink], dim=2)
    weight = score.softmax(dim=2)[..., : k.shape[0]]
    return torch.einsum("hqk,khd->qhd", weight, v)


# block size, heads, KV heads, head size, (queries, keys) of each request, ranges, options
CASES: dict[str, tuple[int, int, int, int, list[tuple[int, int]], int, dict[str, Any]]] = {
    "decode, one range": (16, 4, 2, 32, [(1, 1), (1, 16), (1, 77)], 1, {}),
    "decode, ranges of one block": (16, 4, 1, 64, [(1, 200), (1, 33)], 256, {}),
    "256 ranges": (16, 2, 2, 16, [(1, 256 * 16)], 256, {}),
    "prefill and decode": (32, 6, 2, 48, [(7, 7), (1, 90), (5, 70)], 2, {}),
    "window": (16, 4, 4, 32, [(1, 100), (9, 75)], 3, {"window": 20}),
    "soft cap": (64, 8, 1, 64, [(1, 130), (4, 65)], 2, {"cap": 5.0}),
    "sinks": (128, 4, 2, 32, [(1, 300), (3, 129)], 2, {"sinks": True}),
    "all, fp16": (
        16, 4, 2, 64, [(1, 60), (6, 45)], 3,
        {"window": 24, "cap": 8.0, "sinks": True, "dtype": torch.float16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("joint", [False, True], ids=["spans", "K and V by turns"])
@pytest.mark.parametrize("name", CASES)
def check_equals_reference_and_vllm(device: str, name: str, joint: bool) -> None:
    block_size, heads, kv_heads, head_size, lengths, ranges, options = CASES[name]
    window, cap = options.get("window", 0), options.get("cap", 0.0)
    dtype = options.get("dtype", torch.float32)
    rng = np.random.default_rng(7)
    torch.manual_seed(7)
    counts = [-(-keys // block_size) for _, keys in lengths]
    ids, writes, pool = _rows(rng, counts, ranges)
    tables = DeviceRangeTables.empty(groups=1, rows=len(counts), device=device)
    tables.send(writes)

    shape = (pool, 2, block_size, kv_heads, head_size)
    if joint:
        keys, values = torch.randn(shape, device=device).to(dtype).unbind(1)
    else:
        keys, values = torch.randn(2, pool, *shape[2:], device=device).to(dtype)
    starts = np.cumsum([0] + [n for n, _ in lengths])
    query = torch.randn(int(starts[-1]), heads, head_size, device=device).to(dtype)
    sinks = torch.randn(heads, device=device).to(dtype) if options.get("sinks") else None
    loc = torch.tensor(starts, dtype=torch.int32, device=device)
    seq_lens = torch.tensor([n for _, n in lengths], dtype=torch.int32, device=device)
    scale = head_size**-0.5
    longest = max(n for n, _ in lengths)

    mine = range_attention(
        tables,
        torch.arange(len(counts), dtype=torch.int32, device=device),
        query,
        keys,
        values,
        group=0,
        query_start_loc=loc,
        seq_lens=seq_lens,
        max_query_len=longest,
        scale=scale,
        out=torch.full_like(query, math.nan),
        window=window,
        soft_cap=cap,
        sinks=sinks,
    )

    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, blocks in enumerate(ids):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    theirs = torch.full_like(query, math.nan)
    one = torch.ones(1, device=device)
    unified_attention(
        q=query, k=keys, v=values, out=theirs, cu_seqlens_q=loc, max_seqlen_q=longest,
        seqused_k=seq_lens, max_seqlen_k=max(n for _, n in lengths), softmax_scale=scale,
        causal=True, window_size=(window - 1, 0) if window else (-1, -1), block_table=table,
        softcap=cap, q_descale=None, k_descale=one, v_descale=one, sinks=sinks,
    )  # fmt: skip

    near = {"atol": 1e-5, "rtol": 1e-5}
    if dtype == torch.float16:
        near = {"atol": 1.5e-2, "rtol": 1e-2}
    for row, (first, end) in enumerate(itertools.pairwise(starts)):
        blocks = torch.tensor(ids[row], device=device)
        k, v = (c[blocks].flatten(0, 1)[: lengths[row][1]] for c in (keys, values))
        right = _reference(query[first:end], k, v, scale, window, cap, sinks)
        torch.testing.assert_close(mine[first:end].float(), right, **near)
    torch.testing.assert_close(mine.float(), theirs.float(), **near)
