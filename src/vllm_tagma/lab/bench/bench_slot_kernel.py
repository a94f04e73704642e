"""Slot mapping as the worker calls it: the converted block table against vLLM's own C++ kernel.

Ours is the whole of ``TagmaBlockTable.compute_slot_mapping``, checks included; theirs is the bare
kernel, without the two Python functions that vLLM calls it through. Only vLLM's CPU build has the
kernel; elsewhere there is nothing to compare with.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import BenchError, Measure, timed_calls

GROUP = "kv_slot_mapping"
BLOCK_SIZE = 32  # the CPU attention backend's smallest
ROW_BLOCKS = 512


def slot_kernel_scenarios(effort: Effort) -> list[Planned]:
    """A prefill and a decode batch."""
    return [
        Planned(
            name=f"{GROUP}/vllm_kernel/{name}",
            group=GROUP,
            title=title,
            iterations=effort.calls(2_000),
            ours="range",
            baseline="vllm",
            target=1.0,
            note=(
                "Both called from Python with the same tensors, on one thread: the process is "
                "pinned to one CPU."
            ),
            open=functools.partial(_open, batch, effort.calls(2_000)),
        )
        for name, title, batch in (
            ("prefill_4k", "slots of a 4,096-token prefill, against vLLM's C++ kernel", _prefill),
            ("decode_512", "slots of 512 decoding requests, against vLLM's C++ kernel", _decode),
        )
    ]


class _Batch:
    """Positions and block ids of some requests."""

    def __init__(self, rows: int) -> None:
        self.random = random.Random(rows)
        self.rows: list[list[int]] = []
        self.starts = [0]
        self.positions: list[int] = []

    def add(self, *, tokens: int, first: int, pieces: int) -> None:
        """A request of ``tokens`` tokens in ``pieces`` ranges, which computes from ``first`` on."""
        blocks = -(-tokens // BLOCK_SIZE)
        ids: list[int] = []
        for piece in range(pieces):
            count = blocks * (piece + 1) // pieces - len(ids)
            start = 1 + self.random.randrange(1 << 20)
            ids += range(start, start + count)
        self.rows.append(ids)
        self.positions += range(first, tokens)
        self.starts.append(len(self.positions))


def _prefill() -> _Batch:
    batch = _Batch(1)
    batch.add(tokens=4_096, first=0, pieces=4)
    return batch


def _decode() -> _Batch:
    batch = _Batch(512)
    for row in range(512):
        tokens = 1_000 + batch.random.randrange(8_000)
        batch.add(tokens=tokens, first=tokens - 1, pieces=1 + row % 3)
    return batch


@contextmanager
def _open(make: Callable[[], _Batch], iterations: int) -> Iterator[dict[str, Measure]]:
    import torch
    from vllm.platforms import current_platform
    from vllm.v1.worker.block_table import BlockTable

    from vllm_tagma.integration.block_table_v1 import adopt_block_table

    current_platform.import_kernels()
    kernel = getattr(torch.ops._C, "compute_slot_mapping_kernel_impl", None)
    if kernel is None:
        raise BenchError(
            "this vLLM has no C++ slot-mapping kernel, only its CPU build has; choose other "
            "scenarios with --only"
        )
    batch = make()
    rows, tokens = len(batch.rows), len(batch.positions)
    starts = torch.tensor(batch.starts, dtype=torch.int32)
    positions = torch.tensor(batch.positions, dtype=torch.int64)
    ours, theirs = (
        BlockTable(BLOCK_SIZE, rows, ROW_BLOCKS, tokens, False, torch.device("cpu"), 1)
        for _ in range(2)
    )
    adopt_block_table(ours, request_of=lambda _: None, audit=None)
    for table in (ours, theirs):
        for row, ids in enumerate(batch.rows):
            table.add_row(ids, row)
        table.commit_block_table(rows)

    def by_range() -> object:
        return ours.compute_slot_mapping(rows, starts, positions)

    def by_table() -> None:
        kernel(starts, positions, theirs.block_table.gpu, theirs.slot_mapping.gpu, BLOCK_SIZE)

    threads = torch.get_num_threads()
    # Two OpenMP threads on one CPU would wait for each other.
    torch.set_num_threads(1)
    try:
        by_range()
        by_table()
        if not torch.equal(ours.slot_mapping.gpu[:tokens], theirs.slot_mapping.gpu[:tokens]):
            raise BenchError("the range table and vLLM's kernel compute different slots")
        yield {
            "range": functools.partial(timed_calls, by_range, iterations=iterations),
            "vllm": functools.partial(timed_calls, by_table, iterations=iterations),
        }
    finally:
        torch.set_num_threads(threads)
