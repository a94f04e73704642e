"""Attention timed on a card: over block tables and over ranges, on the same physical pools.

A workload is one layer of a model of 32 heads, 8 KV heads of 128 and bf16. Its pool is contiguous
(each row one range), cut into 64 ranges a row, or scattered block by block, which no range table
holds: there the paged kernel runs alone. Before it is timed, each way is compared with the paged
one; at tiny shapes all are compared with the definition.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch

from vllm_tagma.kernels.device_range_tables import DeviceRangeTables
from vllm_tagma.kernels.expansion import expand_block_tables
from vllm_tagma.kernels.range_attention import Pieces, range_attention
from vllm_tagma.lab.kernel_check.attention_reference import attention
from vllm_tagma.lab.kernel_check.kernel_reference import row_write
from vllm_tagma.lab.kernel_check.paged_attention import paged_attention

Pool = Literal["contiguous", "cut", "scattered"]
Call = Callable[[], torch.Tensor]

PIECES: Final = 16
FEW: Final = 16
"""Requests up to which a decode is cut into pieces: vLLM's limit for 8 KV heads."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is computed: ``requests`` of ``context`` keys, the last ``query`` of which ask.

    ``ranges``: about how many a row has in a pool that is cut.
    """

    name: str
    requests: int
    query: int
    context: int
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16
    ranges: int = 64


SHAPES: Final = (
    Shape(name="decode 1 x 16K", requests=1, query=1, context=16384),
    Shape(name="decode 64 x 16K", requests=64, query=1, context=16384),
    Shape(name="decode 1 x 128K", requests=1, query=1, context=131072),
    Shape(name="decode 8 x 128K", requests=8, query=1, context=131072),
    Shape(name="prefill 2K of 16K", requests=1, query=2048, context=16384),
    Shape(name="prefill 2K of 128K", requests=1, query=2048, context=131072),
)
_SMALL: Final[dict[str, int]] = {
    "context": 100, "heads": 2, "kv_heads": 1, "head_size": 16, "ranges": 3
}  # fmt: skip
TINY: Final = (
    Shape(name="decode", requests=2, query=1, **_SMALL),
    Shape(name="prefill", requests=1, query=3, **_SMALL),
)
"""For a dry run under Triton's interpreter: the same steps in seconds."""


@dataclass(frozen=True, kw_only=True)
class AttentionWorkload:
    """A shape on a pool, and each way of computing it, by name; "paged" is the baseline."""

    shape: Shape
    pool: Pool
    ways: dict[str, Call]
    expansion: Call | None
    reference: Call


def workloads(shapes: tuple[Shape, ...], device: str) -> Iterator[AttentionWorkload]:
    """Each shape on each pool, one in memory at a time."""
    for shape in shapes:
        for pool in ("contiguous", "cut", "scattered"):
            yield _workload(shape, pool, device)


def _rows(shape: Shape, pool: Pool) -> list[list[int]]:
    """Block ids of each row; block 0 is left out, as in serving."""
    rng = np.random.default_rng(shape.context + shape.requests)
    blocks = -(-shape.context // shape.block_size)
    ids = np.arange(1, 1 + shape.requests * blocks)
    if pool == "scattered":
        rng.shuffle(ids)
    elif pool == "cut":
        runs = np.array_split(ids, shape.requests * shape.ranges)
        order = rng.permutation(len(runs))
        ids = np.concatenate([runs[i] for i in order])
    return [[int(i) for i in row] for row in ids.reshape(shape.requests, blocks)]


def _workload(shape: Shape, pool: Pool, device: str) -> AttentionWorkload:
    rows = _rows(shape, pool)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    blocks = 1 + sum(len(row) for row in rows)
    kv = (blocks, shape.block_size, shape.kv_heads, 2 * shape.head_size)
    keys, values = torch.randn(kv, dtype=dtype, device=device).split(shape.head_size, dim=-1)
    tokens = shape.requests * shape.query
    asked = (tokens, shape.heads, shape.head_size)
    query = torch.randn(asked, dtype=dtype, device=device)
    few = shape.query == 1 and shape.requests <= FEW
    parts = torch.empty((tokens, shape.heads, PIECES, shape.head_size), device=device)
    pieces = Pieces(parts, parts[..., 0].contiguous(), parts[..., 0].contiguous())
    given: dict[str, Any] = {
        "query_start_loc": torch.arange(
            0, tokens + 1, shape.query, dtype=torch.int32, device=device
        ),
        "seq_lens": torch.full((shape.requests,), shape.context, dtype=torch.int32, device=device),
        "max_query_len": shape.query,
        "scale": shape.head_size**-0.5,
        "pieces": pieces if few else None,
    }
    table = torch.tensor(rows, dtype=torch.int32, device=device)
    memory = (query, keys, values)

    def paged(loads: bool) -> Call:
        out = torch.empty_like(query)
        return lambda: paged_attention(table, *memory, out=out, loads_table=loads, **given)

    ways = {"paged": paged(True)}
    if pool == "contiguous":
        ways["no table"] = paged(False)
        if flash := _flash_attention(shape, *memory, given["seq_lens"]):
            ways["flash"] = flash
    if pool != "scattered":
        tables = DeviceRangeTables.empty(groups=1, rows=shape.requests, device=device)
        for row, ids in enumerate(rows):
            tables.send([row_write(ids, group=0, row=row)])
        index = torch.arange(shape.requests, device=device)
        out = torch.empty_like(query)
        ways["ranges"] = lambda: range_attention(tables, index, *memory, group=0, out=out, **given)
        written = torch.zeros_like(table)

        def expand() -> torch.Tensor:
            size = shape.block_size
            return expand_block_tables(
                tables, index, group=0, num_rows=len(rows), out=written, block_size=size
            )

    def reference() -> torch.Tensor:
        asked = query.unflatten(0, (shape.requests, shape.query))
        found = [
            attention(asked[row], keys[ids].flatten(0, 1)[: shape.context],
                      values[ids].flatten(0, 1)[: shape.context], scale=given["scale"])
            for row, ids in enumerate(table.long())
        ]  # fmt: skip
        return torch.cat(found)

    return AttentionWorkload(
        shape=shape,
        pool=pool,
        ways=ways,
        expansion=None if pool == "scattered" else expand,
        reference=reference,
    )


def _flash_attention(
    shape: Shape,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    seq_lens: torch.Tensor,
) -> Call | None:
    """FlashAttention, if installed, on rows that follow each other, which it sees as one tensor."""
    if not query.is_cuda or importlib.util.find_spec("flash_attn") is None:
        return None
    attend = importlib.import_module("flash_attn").flash_attn_with_kvcache
    rows = (shape.requests, -1, shape.kv_heads, shape.head_size)
    blocks = [cache[1:].flatten(0, 1).unflatten(0, rows[:2]) for cache in (keys, values)]
    asked = query.view(shape.requests, shape.query, shape.heads, shape.head_size)
    return lambda: attend(asked, *blocks, cache_seqlens=seq_lens, causal=True).view(query.shape)


def require_equal(workload: AttentionWorkload, *, definition: bool = False) -> None:
    """Raises ``AssertionError`` where a way differs by more than rounding from the paged one, or
    with ``definition`` from the definition."""
    right = (workload.reference if definition else workload.ways["paged"])().float().clone()
    assert right.isfinite().all()
    assert right.abs().max() > 0
    for name, call in workload.ways.items():
        found = call().float()
        worst = float((found - right).abs().max())
        if worst > 1.5e-2:
            raise AssertionError(
                f"attention, {workload.shape.name}, {workload.pool}: {name} differs by {worst:.3g}"
            )


LAYERS: Final = 32
GAIN: Final = 0.02
LOSS: Final = 0.01


def decision(times: dict[tuple[str, str], dict[str, float]]) -> list[str]:
    """What the figures say of the read path, as lines of text.

    ``times``: microseconds by shape and pool, then by way; "expansion" once a step.
    """
    lines: list[str] = []
    contiguous: list[float] = []
    cut: list[float] = []
    for (shape, pool), by_way in times.items():
        if "ranges" not in by_way:
            continue
        before = LAYERS * by_way["paged"] + by_way["expansion"]
        gain = 1 - LAYERS * by_way["ranges"] / before
        (contiguous if pool == "contiguous" else cut).append(gain)
        share = ""
        if "no table" in by_way:
            share = f"; table loads are {1 - by_way['no table'] / by_way['paged']:.1%} of paged"
        lines.append(f"{shape}, {pool}: range reads spare {gain:.1%}{share}")
    yes = bool(contiguous) and min(contiguous) >= GAIN and all(gain >= -LOSS for gain in cut)
    rule = (
        f"Rule: read ranges if in every shape that spares at least {GAIN:.0%} of the time of "
        f"attention in {LAYERS} layers and one expansion on a contiguous pool, and costs at most "
        f"{LOSS:.0%} of it where the pool is cut into 64 ranges a row."
    )
    return [*lines, rule, f"Range reads on this card: {'yes' if yes else 'no'}."]
