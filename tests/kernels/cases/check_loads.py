"""How much the kernels load, counted where the Triton interpreter loads: by address, active lanes.

Paged: one table entry per position, one per table entry gathered. Ranges: one descriptor per range
that a tile of positions touches, and the first blocks of a request's ranges once, if it has more
than one. The same is read off the code compiled for a GPU in ``test_compiled.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from vllm_tagma.kernels import expansion, slot_mapping
from vllm_tagma.lab.kernel_check import kernel_checks, kernel_reference, paged
from vllm_tagma.lab.kernel_check.layouts import Batch, draw_batch


@pytest.fixture(autouse=True)
def _interpreted(device: str) -> None:
    if device != "cpu":
        pytest.skip("loads are counted in the interpreter")


class Loads:
    """Lanes loaded from each named tensor."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        self.lanes = dict.fromkeys(tensors, 0)
        self._spans = {
            name: (t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
            for name, t in tensors.items()
        }

    def add(self, addresses: np.ndarray, mask: np.ndarray) -> None:
        active = np.broadcast_to(addresses, mask.shape)[mask.astype(bool)].astype(np.int64)
        for name, (begin, end) in self._spans.items():
            self.lanes[name] += int(((active >= begin) & (active < end)).sum())


@contextmanager
def counted(**tensors: torch.Tensor) -> Iterator[Loads]:
    """Counts every load of kernels that run inside."""
    loads = Loads(**tensors)
    original = interpreter.InterpreterBuilder.create_masked_load

    def create_masked_load(self: Any, ptrs: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        loads.add(ptrs.data, mask.data)
        return original(self, ptrs, mask, *rest, **more)

    interpreter.InterpreterBuilder.create_masked_load = create_masked_load
    try:
        yield loads
    finally:
        interpreter.InterpreterBuilder.create_masked_load = original


def _requests(batch: Batch) -> Iterator[tuple[int, np.ndarray]]:
    """Row and positions of each request."""
    starts = batch.query_start_loc.tolist()
    for request, row in enumerate(batch.idx_mapping.tolist()):
        yield row, batch.positions[starts[request] : starts[request + 1]].numpy()


def _range_of_block(ids: list[int]) -> np.ndarray:
    return np.repeat(*np.array([[r, n] for r, (_, n) in enumerate(kernel_reference.encode(ids))]).T)


BATCHES = {
    "prefill, one range": {
        "requests": 3,
        "mix": "prefill",
        "max_query": 2500,
        "blocks_per_row": 300,
    },
    "decode, one range": {"requests": 20, "mix": "decode"},
    "mixed, several ranges": {
        "requests": 6,
        "num_ranges": (1, 9),
        "max_query": 2500,
        "blocks_per_row": 200,
    },
    "decode, 256 ranges": {"requests": 2, "mix": "decode", "num_ranges": 256},
}


@pytest.mark.parametrize("name", BATCHES)
def check_slots_load_one_descriptor_per_range_and_tile(name: str) -> None:
    batch = draw_batch(seed=1, device="cpu", **BATCHES[name])
    tables = batch.tables
    with counted(start=tables.range_start, cum=tables.range_cum, positions=batch.positions) as got:
        kernel_checks.slot_mapping_of(slot_mapping.compute_slot_mappings, batch)
    descriptors = searched = blocks_entered = 0
    for row, positions in _requests(batch):
        range_of = _range_of_block(batch.rows[0][row])
        if range_of[-1] > 0:
            searched += int(range_of[-1]) + 1
        for i in range(0, len(positions), slot_mapping.TILE):
            blocks = positions[i : i + slot_mapping.TILE] // 16
            descriptors += len(np.unique(range_of[blocks]))
            blocks_entered += len(np.unique(blocks))
    assert got.lanes["positions"] == batch.num_tokens
    assert got.lanes["start"] == descriptors
    assert got.lanes["cum"] == descriptors + searched
    assert got.lanes["start"] <= blocks_entered  # never more than one per block of positions
    if name == "prefill, one range":
        assert descriptors < batch.num_tokens / 200


@pytest.mark.parametrize("name", BATCHES)
def check_paged_slots_load_one_entry_per_position(name: str) -> None:
    batch = draw_batch(seed=1, device="cpu", **BATCHES[name])
    table = batch.block_table(0, width=max(len(ids) for ids in batch.rows[0]))
    out = torch.full((batch.num_tokens + 5,), kernel_checks.STALE, dtype=torch.int64)
    with counted(table=table) as loads:
        paged.compute_slot_mappings(
            table,
            batch.idx_mapping,
            batch.query_start_loc,
            batch.positions,
            block_size=16,
            out=out,
        )
    assert loads.lanes["table"] == batch.num_tokens
    expected = kernel_checks.slot_mapping_of(slot_mapping.compute_slot_mappings, batch)[0]
    assert torch.equal(out, expected[: len(out)])


@pytest.mark.parametrize("name", BATCHES)
def check_expansion_loads_descriptors_and_no_ids(name: str) -> None:
    batch = draw_batch(seed=1, device="cpu", **BATCHES[name])
    tables = batch.tables
    with counted(start=tables.range_start, cum=tables.range_cum) as loads:
        found = kernel_checks.expansion_of(expansion.expand_block_tables, batch, group=0, padding=0)
    ranges = searched = 0
    for row, _ in _requests(batch):
        range_of = _range_of_block(batch.rows[0][row])
        searched += int(range_of[-1]) + 1 if range_of[-1] > 0 else 0
        for i in range(0, len(range_of), expansion.TILE):
            ranges += len(np.unique(range_of[i : i + expansion.TILE]))
    assert loads.lanes == {"start": ranges, "cum": ranges + searched}

    requests = batch.idx_mapping.shape[0]
    table = batch.block_table(0, width=found.shape[1])
    copied = torch.full_like(found, kernel_checks.STALE)
    with counted(table=table) as loads:
        paged.gather_block_tables(
            table, tables.num_blocks[0], batch.idx_mapping, num_rows=requests, out=copied
        )
    assert loads.lanes["table"] == sum(len(batch.rows[0][row]) for row, _ in _requests(batch))
    assert torch.equal(copied, found)
