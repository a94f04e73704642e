"""The self-test of Model Runner V2: its Triton kernels, launched and in a replayed CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from vllm_tagma._native import BlockRanges
from vllm_tagma.kernels.expansion import expand_block_tables
from vllm_tagma.kernels.slot_mapping import compute_slot_mappings
from vllm_tagma.ranges import NULL_BLOCK, PAD_SLOT_ID
from vllm_tagma.worker.self_test import Check, Subject, require_same
from vllm_tagma.worker.self_test_moves import BLOCK_MOVES
from vllm_tagma.worker.staged_range_tables import RowEnd, StagedRangeTables

_STALE: Final = -77
_PADDING: Final = 70  # slots behind the tokens, rows behind the requests: what graphs pad


def _staged(subject: Subject) -> StagedRangeTables:
    return StagedRangeTables(groups=len(subject.groups), rows=subject.rows, device=subject.device)


def _write(tables: StagedRangeTables, subject: Subject) -> None:
    """The rows in two steps, as requests grow: the second sends what the first did not."""
    for second in (False, True):
        for row in range(subject.num_rows):
            ends = []
            for group in subject.groups:
                ids = subject.ids[group][row].tolist()
                half = len(ids) // 2
                part = ids[half:] if second else ids[:half]
                first = half if second else 0
                ends.append(RowEnd(group, first, BlockRanges.from_ids(part)))
            tables.write(row, ends)
        tables.apply_staged_writes()


def row_writes(subject: Subject) -> None:
    """What the device holds of each row, decoded into ids."""
    tables = _staged(subject)
    _write(tables, subject)
    starts, cums, num_ranges, num_blocks = (t.numpy() for t in tables.tables.on_host())
    for group in subject.groups:
        for row, ids in enumerate(subject.ids[group]):
            n = num_ranges[group, row]
            counts = np.diff(np.append(cums[group, row, :n], num_blocks[group, row]))
            found = np.concatenate(
                [
                    np.arange(start, start + count) if start != NULL_BLOCK else np.zeros(count)
                    for start, count in zip(starts[group, row, :n], counts, strict=True)
                ]
            )
            what = f"group {group}, row {row}"
            require_same(f"{what}, number of blocks", np.array([len(found)]), np.array([len(ids)]))
            require_same(f"{what}, block", found.astype(np.int64), ids)


class _Step:
    """The batch on the device, and buffers that the kernels fill."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.tables = _staged(subject)
        batch, groups = subject.batch, len(subject.groups)
        self.index = self._on_device(batch.rows)
        self.starts = self._on_device(batch.starts)
        self.positions = self._on_device(batch.positions)
        self.sizes = self._on_device(np.array(subject.block_sizes, dtype=np.int32))
        self.enabled = torch.ones(groups, dtype=torch.bool, device=subject.device)
        width = len(batch.positions) + _PADDING
        self.slots = self._stale((groups, width), torch.int64)
        rows = len(batch.rows) + 1
        self.tables_of = [self._stale((rows, w), torch.int32) for w in subject.widths]

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(self.subject.device)

    def _stale(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        return torch.full(shape, _STALE, dtype=dtype, device=self.subject.device)

    def map_slots(self) -> None:
        compute_slot_mappings(
            self.tables.tables,
            self.index,
            self.starts,
            self.positions,
            block_sizes=self.sizes,
            enabled=self.enabled,
            out=self.slots,
        )

    def expand(self) -> None:
        for group, table in enumerate(self.tables_of):
            expand_block_tables(
                self.tables.tables,
                self.index,
                group=group,
                num_rows=len(table),
                out=table,
                block_size=self.subject.block_sizes[group],
            )

    def require_slots(self) -> None:
        for group in self.subject.groups:
            padding = np.full(_PADDING, PAD_SLOT_ID)
            expected = np.concatenate([self.subject.slots(group), padding])
            found = self.slots[group].cpu().numpy()
            require_same(f"group {group}, slot of token", found, expected)

    def require_tables(self) -> None:
        for group, table in enumerate(self.tables_of):
            expected = np.full(tuple(table.shape), _STALE, dtype=np.int64)
            for request, row in enumerate(self.subject.batch.rows):
                ids = self.subject.ids[group][row]
                expected[request, : len(ids)] = ids
            expected[-1] = NULL_BLOCK  # a padded row
            require_same(f"table of group {group}, entry", table.cpu().numpy(), expected)


def slot_mapping(subject: Subject) -> None:
    """Slots over the full width, padding included."""
    step = _Step(subject)
    _write(step.tables, subject)
    step.map_slots()
    step.require_slots()


def expansion(subject: Subject) -> None:
    """Attention's tables, entries that must stay stale included."""
    step = _Step(subject)
    _write(step.tables, subject)
    step.expand()
    step.require_tables()


def _replayed(
    kernel: Callable[[_Step], None], require: Callable[[_Step], None]
) -> Callable[[Subject], None]:
    """The kernel captured over empty rows; the rows are written before the replay."""

    def run(subject: Subject) -> None:
        step = _Step(subject)
        stream = torch.cuda.Stream(subject.device)
        stream.wait_stream(torch.cuda.current_stream(subject.device))
        with torch.cuda.stream(stream):
            kernel(step)  # compiles outside the capture
        torch.cuda.current_stream(subject.device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernel(step)
        _write(step.tables, subject)
        step.slots.fill_(_STALE)
        for table in step.tables_of:
            table.fill_(_STALE)
        graph.replay()
        require(step)

    return run


DEVICE_CHECKS: Final = (
    Check("row writes (Triton)", row_writes),
    Check("slot mapping (Triton)", slot_mapping),
    Check("expansion (Triton)", expansion),
    BLOCK_MOVES,
)

GRAPH_CHECKS: Final = (
    Check("slot mapping in a CUDA graph", _replayed(_Step.map_slots, _Step.require_slots)),
    Check("expansion in a CUDA graph", _replayed(_Step.expand, _Step.require_tables)),
)
"""For CUDA, where attention's inputs may be made inside a captured graph."""
