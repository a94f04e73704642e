"""vLLM's V2 ``BlockTables`` with ranges behind it: slots and attention's tables by arithmetic.

Same constructor, same methods, same buffers. What differs is where the numbers come from: a row is
ranges, the scheduler's own if the step carries them (``row_updates.py``), else derived from the ids
that vLLM appends (warm-up, dummy runs). Slots are computed from the ranges, and the tables that
attention reads (``input_block_tables``) are expanded from them, so nothing is copied each step.

The rows of ids themselves (``block_tables[group].gpu``) have one reader besides the methods
replaced here, in vLLM 0.32 and 0.33: the state of Mamba hybrids, whose groups are refused. So ids
are not written unless ``keep_id_rows`` says so: ``debug_slots`` compares with them. Everyone else
(attention, speculators, micro-batching, context-parallel gathering) reads ``input_block_tables`` or
calls ``gather_block_tables`` and ``compute_slot_mappings``. See ``docs/v2-write-path.md``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_tagma import support
from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.integration.row_updates import require_fits, require_same_ids, row_too_long
from vllm_tagma.kernels.expansion import expand_block_tables
from vllm_tagma.kernels.slot_mapping import compute_slot_mappings
from vllm_tagma.ranges import NULL_BLOCK
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.worker.first_steps import FirstSteps
from vllm_tagma.worker.slot_audit import SlotAudit
from vllm_tagma.worker.staged_range_tables import RowEnd, StagedRangeTables

_MAX_POSITIONS = 2**31
"""Positions of one row: the kernels divide them in 32 bits."""


class TagmaBlockTables(BlockTables):  # type: ignore[misc]
    """``BlockTables`` of Model Runner V2 that holds each row as ranges.

    ``request_of`` says which request a row belongs to, if any. ``updates`` are the row updates of
    the step by group and request, until the row was written; the runner sets them.

    Invariant after ``apply_staged_writes`` (law W1): the ranges of a row encode the ids that vLLM
    appended to it since it was last overwritten and that have moved since, with ids replaced by the
    null block where vLLM asks for that.
    """

    def __init__(
        self,
        *args: Any,
        keep_id_rows: bool,
        audit: SlotAudit | None,
        request_of: Callable[[int], str | None],
        first_steps: int | None = 0,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if self.cp_size != 1:
            support.refuse("decode-context-parallel", self.cp_size)
        for group, (table, size) in enumerate(
            zip(self.input_block_tables, self.block_sizes, strict=True)
        ):
            if table.shape[1] * size >= _MAX_POSITIONS:
                raise UnsupportedError(
                    f"a row of cache group {group} spans {table.shape[1] * size} positions; range "
                    f"arithmetic holds less than {_MAX_POSITIONS}. Lower --max-model-len, or serve "
                    "with --kv-cache-backend paged."
                )
        self.keep_id_rows = keep_id_rows or audit is not None
        self.audit = audit
        self.request_of = request_of
        self.updates: list[dict[str, RowUpdate]] = [{} for _ in range(self.num_kv_cache_groups)]
        self.ranges = StagedRangeTables(
            groups=self.num_kv_cache_groups,
            rows=self.max_num_reqs,
            device=self.device,
            name_row=self.name_row,
        )
        steps = None if first_steps == 0 else FirstSteps(first_steps, self.name_row)
        self.first_steps = steps
        # vLLM 0.33 clears rows that a larger batch left behind; done for 0.32 as well.
        self._num_dirty_rows = 0
        self._batch_rows: torch.Tensor | None = None
        self._read_by_range: set[int] = set()

    def read_by_range(self, group: int) -> torch.Tensor:
        """The batch's rows for attention that reads the ranges of ``group`` itself.

        From then on its table is not expanded and stays zero, so a reader of it would see the null
        block. Returns int64 [rows], on the device, rewritten whenever tables are gathered: the
        table row of each request of the batch, -1 behind them and in dummy runs.
        """
        if self._batch_rows is None:
            self._batch_rows = torch.full(
                (self.max_num_reqs,), -1, dtype=torch.int64, device=self.device
            )
        self._read_by_range.add(group)
        return self._batch_rows

    def get_dummy_block_tables(self, num_reqs: int) -> tuple[torch.Tensor, ...]:
        """As vLLM's; who reads ranges finds no row."""
        if self._batch_rows is not None:
            self._batch_rows.fill_(-1)
        tables: tuple[torch.Tensor, ...] = super().get_dummy_block_tables(num_reqs)
        return tables

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Appends blocks to the row of a request, or replaces it; staged until applied.

        The blocks are those of the request's row update, if the step has one, else these ids. New,
        resumed and streamed requests come with ``overwrite``. Raises ``InvariantError`` (laws W1,
        W2) or ``RangeCapError``; no row is changed then.
        """
        request = self.request_of(req_index)
        ends = []
        for group, updates in enumerate(self.updates):
            held = 0 if overwrite else int(self.num_blocks.np[group, req_index])
            ids = new_block_ids[group]
            update = updates.pop(request, None) if request is not None else None
            if update is not None:
                ends.append(self._end(update, held, ids))
            elif ids or overwrite:
                ends.append(RowEnd(group, held, BlockRanges.from_ids(ids)))
        self._write(req_index, ends)

    def apply_updates(self, row_of: Callable[[str], int | None]) -> None:
        """Writes the step's updates that no append has taken: rows that moved and got no block.

        ``row_of`` gives a request's row; one without has ended, or will bring its whole row. Raises
        as :meth:`append_block_ids`; that row is unchanged then.
        """
        for group, updates in enumerate(self.updates):
            for request, update in updates.items():
                row = row_of(request)
                if row is not None:
                    held = int(self.num_blocks.np[group, row])
                    self._write(row, [self._end(update, held, [])])
            updates.clear()

    def _end(self, update: RowUpdate, held: int, block_ids: list[int]) -> RowEnd:
        """What an update writes to a row of ``held`` blocks, which vLLM extends by ids."""
        require_fits(update, held=held, brought=len(block_ids))
        if self.audit is not None:
            require_same_ids(update, block_ids)
        return RowEnd(update.group, update.first_block, update.ranges)

    def _write(self, row: int, ends: list[RowEnd]) -> None:
        for at, (group, first, ranges) in enumerate(ends):
            width = self.input_block_tables[group].shape[1]
            if first + len(ranges) > width:
                name = f"{self.name_row(row)}, group {group},"
                raise row_too_long(name, first + len(ranges), width)
            if self.redirect_writes_to_null_block and len(ranges):
                ends[at] = RowEnd(group, first, BlockRanges([(NULL_BLOCK, len(ranges))]))
        self.ranges.write(row, ends)
        for group, first, ranges in ends:
            self.num_blocks.np[group, row] = first + len(ranges)
            if self.keep_id_rows:
                self.block_tables[group].stage_write(row, first, ranges.ids())

    def name_row(self, row: int) -> str:
        """What errors call a row."""
        request = self.request_of(row)
        return f"row {row}" if request is None else f"request {request} (row {row})"

    def apply_staged_writes(self) -> None:
        """Brings ranges (and id rows, if kept) on the device up to date, in stream order."""
        self.ranges.apply_staged_writes()
        if self.keep_id_rows:
            super().apply_staged_writes()
        else:
            # Readers of the counts alone stay right whether or not ids are kept.
            self.num_blocks.copy_to_uva()

    def gather_block_tables(
        self,
        idx_mapping: torch.Tensor,
        num_reqs_padded: int,
        out: tuple[torch.Tensor, ...] | None = None,
        out_ptrs: torch.Tensor | None = None,
        num_computed_tokens: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, ...]:
        """Expands the ranges of a batch into the tables that attention reads.

        As in vLLM: entries behind a row's blocks stay, padded rows are zeroed, and (0.33) entries
        below a sliding window become null where ``num_computed_tokens`` is given. ``out_ptrs`` is
        vLLM's table of addresses of ``out``, which one launch per group does not need.
        """
        num_rows = num_reqs_padded
        if out is None:
            out = tuple(self.input_block_tables)
            num_rows = max(num_rows, self._num_dirty_rows)
            self._num_dirty_rows = idx_mapping.shape[0]
            if self._batch_rows is not None:
                self._batch_rows[: idx_mapping.shape[0]].copy_(idx_mapping)
                self._batch_rows[idx_mapping.shape[0] : num_reqs_padded].fill_(-1)
        reaches = getattr(self, "_sliding_window_reach", [0] * self.num_kv_cache_groups)
        for group, table in enumerate(out):
            if group in self._read_by_range:
                continue
            expand_block_tables(
                self.ranges.tables,
                idx_mapping,
                group=group,
                num_rows=num_rows,
                out=table,
                block_size=self.block_sizes[group],
                num_computed_tokens=num_computed_tokens,
                sliding_window_reach=0 if num_computed_tokens is None else reaches[group],
            )
        return tuple(table[:num_reqs_padded] for table in out)

    def compute_slot_mappings(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        num_tokens_padded: int,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Slots of a batch by range arithmetic, -1 behind its tokens over the full width."""
        slots = self.slot_mappings if out is None else out
        if self.num_kv_cache_groups:
            compute_slot_mappings(
                self.ranges.tables,
                idx_mapping,
                query_start_loc,
                positions,
                block_sizes=self.block_sizes_tensor,
                enabled=self.slot_mapping_enabled,
                out=slots,
            )
            if self.audit is not None:
                self._check_slots(idx_mapping, query_start_loc, positions, slots)
            if self.first_steps is not None:
                self._look(self.first_steps, idx_mapping, query_start_loc, positions, slots)
        return slots[:, :num_tokens_padded]

    def _look(self, first_steps: FirstSteps, *given: torch.Tensor) -> None:
        """Hands the slots of a step to the self-test, until it has seen enough."""
        index, starts, positions, slots = given
        first_steps.look(
            index=index,
            starts=starts,
            positions=positions,
            slots=slots,
            rows=self.ranges.all_ranges,
            block_sizes=self.block_sizes,
            enabled=self._slot_mapping_enabled,
        )
        if first_steps.is_over:
            self.first_steps = None

    def _check_slots(
        self,
        idx_mapping: torch.Tensor,
        query_start_loc: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Compares slots with the id rows; copies both to the host, so it synchronises."""
        assert self.audit is not None
        rows = idx_mapping.cpu().numpy()
        real = rows >= 0
        at = np.where(real, rows, 0)
        for group, enabled in enumerate(self._slot_mapping_enabled):
            if enabled:
                self.audit.check(
                    slots[group].cpu().numpy(),
                    query_start_loc[: len(rows) + 1].cpu().numpy(),
                    positions.cpu().numpy(),
                    block_table=self.block_tables[group].gpu.cpu().numpy()[at],
                    num_blocks=np.where(real, self.num_blocks.np[group, at], 0),
                    block_size=self.block_sizes[group],
                    name_row=lambda request: self.name_row(int(rows[request])),
                )
