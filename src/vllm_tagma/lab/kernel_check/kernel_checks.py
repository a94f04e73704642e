"""Kernel against reference, as a list of cases: run by the tests and, natively, by the GPU check.

Each case draws a layout from its own index as seed and compares whole output buffers, so that a
write outside a kernel's part shows too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from vllm_tagma.kernels import expansion, slot_mapping
from vllm_tagma.lab.kernel_check import kernel_reference
from vllm_tagma.lab.kernel_check.layouts import Batch, draw_batch

STALE: Final = -77
"""What output buffers hold before a kernel runs."""

CASES: Final[tuple[tuple[str, dict[str, Any]], ...]] = (
    ("one request, one range", {"requests": 1}),
    ("one request, decode", {"requests": 1, "mix": "decode"}),
    ("two ranges", {"requests": 5, "num_ranges": 2}),
    ("block 16, prefill", {"requests": 3, "num_ranges": (1, 8), "mix": "prefill"}),
    ("block 32, mixed", {"requests": 9, "num_ranges": (1, 8), "block_sizes": (32,)}),
    ("block 48, mixed", {"requests": 9, "num_ranges": (1, 8), "block_sizes": (48,)}),
    ("block 64, decode", {"requests": 64, "block_sizes": (64,), "mix": "decode"}),
    ("block 128, mixed", {"requests": 7, "num_ranges": (1, 8), "block_sizes": (128,)}),
    (
        "block 256, prefill",
        {
            "requests": 2,
            "num_ranges": (1, 4),
            "block_sizes": (256,),
            "mix": "prefill",
            "max_query": 1500,
        },
    ),
    (
        "prefill over several tiles",
        {
            "requests": 2,
            "num_ranges": 3,
            "mix": "prefill",
            "max_query": 3000,
            "blocks_per_row": 200,
        },
    ),
    ("tables over several tiles", {"requests": 1, "num_ranges": (1, 5), "blocks_per_row": 2500}),
    ("17 to 64 ranges", {"requests": 6, "num_ranges": (17, 64), "max_query": 300}),
    ("255 ranges", {"requests": 2, "num_ranges": 255, "mix": "decode"}),
    (
        "256 ranges, prefill",
        {"requests": 1, "num_ranges": 256, "mix": "prefill", "max_query": 2048},
    ),
    ("1 to 256 ranges, decode", {"requests": 9, "num_ranges": (1, 256), "mix": "decode"}),
    ("three groups", {"requests": 4, "num_ranges": (1, 6), "block_sizes": (16, 64, 32)}),
    # In the second group, index -1 would be the last row of the first.
    (
        "dummy requests",
        {"requests": 12, "num_ranges": (1, 3), "dummies": 0.4, "block_sizes": (16, 32)},
    ),
    ("null padding", {"requests": 6, "num_ranges": (2, 6), "nulls": True}),
    ("null rows only", {"requests": 3, "num_ranges": 1, "nulls": True}),
    ("512 requests, decode", {"requests": 512, "mix": "decode", "num_ranges": (1, 2)}),
    (
        "slots beyond 2^31",
        {
            "requests": 4,
            "num_ranges": (1, 4),
            "block_sizes": (256,),
            "first_id": 1 << 24,
            "last_id": (1 << 31) - 1,
        },
    ),
)
"""Names and arguments of ``draw_batch``."""


def batch_of(case: int, *, device: str) -> Batch:
    """The batch of ``CASES[case]``."""
    return draw_batch(seed=case, device=device, **CASES[case][1])


def slot_mapping_of(compute: Callable[..., torch.Tensor], batch: Batch) -> torch.Tensor:
    """Slots that ``compute`` (kernel or reference) writes into a stale buffer with a tail."""
    groups = len(batch.rows)
    device = batch.positions.device
    out = torch.full((groups, batch.num_tokens + 1100), STALE, dtype=torch.int64, device=device)
    return compute(
        batch.tables,
        batch.idx_mapping,
        batch.query_start_loc,
        batch.positions,
        block_sizes=batch.block_sizes,
        enabled=torch.ones(groups, dtype=torch.bool, device=device),
        out=out,
    )


def expansion_of(
    expand: Callable[..., torch.Tensor], batch: Batch, *, group: int, padding: int = 2
) -> torch.Tensor:
    """The whole buffer after ``expand`` (kernel or reference), two padded rows included."""
    width = max(len(ids) for ids in batch.rows[group]) + 3
    rows = batch.idx_mapping.shape[0] + padding
    out = torch.full((rows + 1, width), STALE, dtype=torch.int32, device=batch.positions.device)
    expand(
        batch.tables,
        batch.idx_mapping,
        group=group,
        num_rows=rows,
        out=out,
        block_size=batch.block_size_list[group],
    )
    return out


def on_host(batch: Batch) -> Batch:
    """The same batch with all tensors on the host, for the reference."""
    fields = {
        name: getattr(batch, name).cpu()
        for name in ("idx_mapping", "query_start_loc", "positions", "block_sizes")
    }
    return Batch(rows=batch.rows, tables=batch.tables.on_host(), **fields)


def check_case(case: int, *, device: str) -> None:
    """Runs both kernels of a case on ``device``. Raises ``AssertionError`` where they differ."""
    batch = batch_of(case, device=device)
    host = on_host(batch)
    for group, rows in enumerate(batch.rows):
        for row, ids in enumerate(rows):
            found = kernel_reference.decode(host.tables, group=group, row=row).tolist()
            assert found == ids, f"group {group}, row {row}: the ranges hold other ids"
    found = slot_mapping_of(slot_mapping.compute_slot_mappings, batch).cpu()
    _compare("slots", found, slot_mapping_of(kernel_reference.compute_slot_mappings, host))
    for group in range(len(batch.rows)):
        table = expansion_of(expansion.expand_block_tables, batch, group=group).cpu()
        expected = expansion_of(kernel_reference.expand_block_tables, host, group=group)
        _compare(f"block table of group {group}", table, expected)


def check_graph(*, device: str) -> None:
    """A captured CUDA graph sees rows appended after the capture. Raises ``AssertionError``."""
    batch = batch_of(2, device=device)
    groups = len(batch.rows)
    out = torch.full((groups, batch.num_tokens + 64), STALE, dtype=torch.int64, device=device)
    table = torch.full((batch.idx_mapping.shape[0], 64), STALE, dtype=torch.int32, device=device)
    enabled = torch.ones(groups, dtype=torch.bool, device=device)

    def step(mapping: Any, expand: Any, on: Batch, slots: torch.Tensor, ids: torch.Tensor) -> None:
        given = (on.idx_mapping, on.query_start_loc, on.positions)
        switch = enabled.to(on.positions.device)
        mapping(on.tables, *given, block_sizes=on.block_sizes, enabled=switch, out=slots)
        expand(on.tables, given[0], group=0, num_rows=len(ids), out=ids, block_size=16)

    kernels = (slot_mapping.compute_slot_mappings, expansion.expand_block_tables)
    step(*kernels, batch, out, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(*kernels, batch, out, table)
    for i, row in enumerate(batch.idx_mapping.tolist()):
        ids = range(9000 + 100 * i, 9050 + 100 * i)
        batch.tables.send([kernel_reference.row_write(ids, group=0, row=row)])
    out.fill_(STALE)
    table.fill_(STALE)
    graph.replay()
    expected = (torch.full_like(out.cpu(), STALE), torch.full_like(table.cpu(), STALE))
    references = (kernel_reference.compute_slot_mappings, kernel_reference.expand_block_tables)
    step(*references, on_host(batch), *expected)
    _compare("slots of a replayed graph", out.cpu(), expected[0])
    _compare("block table of a replayed graph", table.cpu(), expected[1])


def _compare(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    wrong = (found != expected).nonzero()
    if len(wrong):
        at = tuple(wrong[0].tolist())
        raise AssertionError(
            f"{what}: {len(wrong)} of {found.numel()} differ, first at {list(at)}: "
            f"{int(found[at])} by the kernel, {int(expected[at])} by the reference"
        )
