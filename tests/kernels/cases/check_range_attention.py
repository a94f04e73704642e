"""Attention over ranges equals a reference in fp32 and vLLM's Triton attention over block tables.

A case names what it adds; all are drawn. ``TAGMA_ATTENTION_SWEEP=N`` draws N more, of any shape.
"""

from __future__ import annotations

import itertools
import math
import os
from typing import NamedTuple

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

if os.environ["TAGMA_KERNEL_DEVICE"] == "cpu":
    # What vLLM's CPU worker imports first.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from vllm.v1.attention.ops.triton_unified_attention import unified_attention

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables, RowWrite
from vllm_tagma.kernels.range_attention import Pieces, range_attention
from vllm_tagma.lab.kernel_check.attention_reference import attention


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


class Case(NamedTuple):
    """``lengths``: queries and keys of each request. ``order``: the axes of the cache in memory,
    of blocks, K or V, tokens, heads. ``pieces``: into how many a decode's keys are cut."""

    block_size: int
    heads: int
    kv_heads: int
    head_size: int
    lengths: list[tuple[int, int]]
    ranges: int
    window: int = 0
    cap: float = 0.0
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    order: str = "bkth"
    pieces: int = 1
    dummies: int = 0


CASES = {
    "decode, one range": Case(16, 4, 2, 32, [(1, 1), (1, 16), (1, 77)], 1, order="kbth"),
    "heads outside tokens": Case(16, 4, 2, 32, [(1, 40), (7, 77)], 2, order="bhtk"),
    "256 ranges": Case(16, 4, 1, 16, [(1, 256 * 16)], 256, dtype=torch.float16),
    "prefill and decode": Case(32, 6, 2, 48, [(7, 7), (1, 90), (5, 70)], 2, dummies=1),
    "window": Case(16, 4, 4, 32, [(1, 100), (9, 75)], 3, window=20),
    "decode in pieces": Case(16, 4, 2, 32, [(1, 9), (1, 200)], 2, pieces=4, dummies=1),
    "pieces, all": Case(
        16, 8, 2, 32, [(1, 150), (1, 40)], 4,
        window=90, cap=6.0, sinks=True, dtype=torch.bfloat16, pieces=4,
    ),
    "soft cap": Case(64, 8, 1, 64, [(1, 130), (4, 65)], 2, cap=5.0, order="kbth"),
    "sinks": Case(128, 4, 2, 32, [(1, 300), (3, 129)], 2, sinks=True, order="bhtk"),
    "all, fp16": Case(
        16, 4, 2, 64, [(1, 60), (6, 45)], 3, window=24, cap=8.0, sinks=True, dtype=torch.float16
    ),
    "bf16": Case(16, 4, 2, 64, [(1, 60), (6, 45)], 2, dtype=torch.bfloat16),
}  # fmt: skip


def _drawn(seed: int) -> Case:
    """Any shape: what the cases above combine by hand."""
    rng = np.random.default_rng(seed)
    kv_heads = int(rng.choice([1, 2, 3]))
    decodes = bool(rng.random() < 0.4)
    keys = rng.integers(1, 700, size=int(rng.integers(1, 5)))
    return Case(
        block_size=int(rng.choice([16, 32, 48, 64, 128])),
        heads=kv_heads * int(rng.choice([1, 2, 3, 4, 8])),
        kv_heads=kv_heads,
        head_size=int(rng.choice([16, 32, 48, 64, 80, 128])),
        lengths=[(1 if decodes else int(rng.integers(1, min(n, 40) + 1)), int(n)) for n in keys],
        ranges=int(rng.choice([1, 2, 3, 8, 256])),
        window=int(rng.choice([0, 0, 1, 17, 100])),
        cap=float(rng.choice([0.0, 4.0])),
        sinks=bool(rng.integers(2)),
        dtype=[torch.float32, torch.float16, torch.bfloat16][int(rng.integers(3))],
        order=str(rng.choice(["kbth", "bkth", "bhtk"])),
        pieces=int(rng.choice([2, 16])) if decodes else 1,
        dummies=int(rng.integers(2)),
    )


CASES |= {f"drawn {n}": _drawn(n) for n in range(int(os.environ.get("TAGMA_ATTENTION_SWEEP", "0")))}


def _caches(case: Case, blocks: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values: [blocks, tokens, heads, head size], laid out in memory as ``case.order``."""
    axes = {"b": blocks, "k": 2, "t": case.block_size, "h": case.kv_heads}
    memory = torch.randn(*(axes[a] for a in case.order), case.head_size, device=device)
    logical = memory.to(case.dtype).permute(*(case.order.index(a) for a in "kbth"), 4)
    return logical[0], logical[1]


@pytest.mark.parametrize("name", CASES)
def check_equals_reference_and_vllm(device: str, name: str) -> None:
    case = CASES[name]
    rng = np.random.default_rng(7)
    torch.manual_seed(7)
    counts = [-(-keys // case.block_size) for _, keys in case.lengths]
    ids, writes, pool = _rows(rng, counts, case.ranges)
    tables = DeviceRangeTables.empty(groups=2, rows=len(counts), device=device)
    tables.send([write._replace(group=1) for write in writes])

    keys, values = _caches(case, pool, device)
    starts = np.cumsum([0] + [n for n, _ in case.lengths])
    tokens = int(starts[-1])
    query = torch.randn(tokens + case.dummies, case.heads, case.head_size, device=device)
    query = query.to(case.dtype)
    sinks = torch.randn(case.heads, device=device).to(case.dtype) if case.sinks else None
    loc = torch.tensor([*starts, tokens + case.dummies], dtype=torch.int32, device=device)
    rows = torch.arange(len(counts), dtype=torch.int64, device=device)
    lengths = [n for _, n in case.lengths]
    seq_lens = torch.tensor(lengths + [1] * case.dummies, dtype=torch.int32, device=device)
    scale = case.head_size**-0.5
    longest = max(n for n, _ in case.lengths)
    parts = torch.full((tokens + 2, case.heads, case.pieces, 128), math.nan, device=device)
    pieces = Pieces(parts, parts[..., 0].clone(), parts[..., 0].clone())

    mine = range_attention(
        tables,
        torch.cat([rows, rows.new_full((case.dummies,), -1)]),
        query,
        keys,
        values,
        group=1,
        query_start_loc=loc,
        seq_lens=seq_lens,
        max_query_len=longest,
        scale=scale,
        out=torch.full_like(query, math.nan),
        window=case.window,
        soft_cap=case.cap,
        sinks=sinks,
        pieces=pieces if case.pieces > 1 else None,
    )
    assert not mine[tokens:].any(), "a request without a row"
    mine, query = mine[:tokens], query[:tokens]
    assert bool(parts[:tokens].isfinite().any()) == (case.pieces > 1)

    table = torch.zeros(len(counts), max(counts), dtype=torch.int32, device=device)
    for row, blocks in enumerate(ids):
        table[row, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    theirs = torch.full_like(query, math.nan)
    one = torch.ones(1, device=device)
    unified_attention(
        q=query, k=keys, v=values, out=theirs, cu_seqlens_q=loc[: len(counts) + 1],
        max_seqlen_q=longest, seqused_k=seq_lens[: len(counts)], max_seqlen_k=max(lengths),
        softmax_scale=scale, causal=True,
        window_size=(case.window - 1, 0) if case.window else (-1, -1), block_table=table,
        softcap=case.cap, q_descale=None, k_descale=one, v_descale=one, sinks=sinks,
    )  # fmt: skip

    # vLLM's own tests of its Triton attention allow this much for half precision.
    half = case.dtype != torch.float32
    near = {"atol": 1.5e-2, "rtol": 1e-2} if half else {"atol": 1e-5, "rtol": 1e-5}
    for row, (first, end) in enumerate(itertools.pairwise(starts)):
        blocks = torch.tensor(ids[row], device=device)
        k, v = (c[blocks].flatten(0, 1)[: lengths[row]] for c in (keys, values))
        right = attention(
            query[first:end], k, v, scale=scale, window=case.window, soft_cap=case.cap, sinks=sinks
        )
        torch.testing.assert_close(mine[first:end].float(), right, **near)
    torch.testing.assert_close(mine.float(), theirs.float(), **near)
