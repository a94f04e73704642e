"""vLLM's V2 ``BlockTables`` with ranges behind it: slots and attention's tables by arithmetic.

Same constructor, same methods, same buffers. What differs is where the numbers come from: a row of
ids becomes ranges when it is appended, slots are computed from the ranges, and the tables that
attention reads (``input_block_tables``) are expanded from them, so nothing is copied each step.

The rows of ids themselves (``block_tables[group].gpu``) have one reader besides the methods
replaced here, in vLLM 0.32 and 0.33: the state of Mamba hybrids, whose groups are refused. So ids
are not written unless ``keep_id_rows`` says so: ``debug_slots`` compares with them. Everyone else
(attention, speculators, micro-batching, context-parallel gathering) reads ``input_block_tables`` or
calls ``gather_block_tables`` and ``compute_slot_mappings``. See ``docs/v2-write-path.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm.v1.worker.gpu.block_table import BlockTables

from vllm_tagma import support
from vllm_tagma.errors import RangeCapError, UnsupportedError
from vllm_tagma.integration.row_moves import moved_block_ids, require_within
from vllm_tagma.kernels.expansion import expand_block_tables
from vllm_tagma.kernels.range_tables import NULL_BLOCK, DeviceRangeTables, TooManyRangesError
from vllm_tagma.kernels.slot_mapping import compute_slot_mappings
from vllm_tagma.worker.slot_audit import SlotAudit

_MAX_POSITIONS = 2**31
"""Positions of one row: the kernels divide them in 32 bits."""


class TagmaBlockTables(BlockTables):  # type: ignore[misc]
    """``BlockTables`` of Model Runner V2 that holds each row as ranges.

    Invariant after ``apply_staged_writes``: the ranges of a row encode the ids appended to it since
    it was last overwritten, with ids replaced by the null block where vLLM asks for that.
    """

    def __init__(
        self, *args: Any, keep_id_rows: bool, audit: SlotAudit | None, **kwargs: Any
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
        self.ranges = DeviceRangeTables(
            groups=self.num_kv_cache_groups, rows=self.max_num_reqs, device=self.device
        )
        # vLLM 0.33 clears rows that a larger batch left behind; done for 0.32 as well.
        self._num_dirty_rows = 0

    def append_block_ids(
        self, req_index: int, new_block_ids: tuple[list[int], ...], overwrite: bool
    ) -> None:
        """Appends ids to the row of a request, or replaces it; staged until applied.

        New, resumed and streamed requests come with ``overwrite``. Raises ``RangeCapError`` or
        vLLM's ``RuntimeError`` (a row too long) before anything is changed.
        """
        ends = []
        for group in range(self.num_kv_cache_groups):
            start = 0 if overwrite else int(self.num_blocks.np[group, req_index])
            end = start + len(new_block_ids[group])
            capacity = self.input_block_tables[group].shape[1]
            if end > capacity:
                raise RuntimeError(
                    f"Block table write for request {req_index}, group {group} exceeds "
                    f"row capacity ({end} > {capacity})"
                )
            ends.append(end)
        if self.redirect_writes_to_null_block:
            new_block_ids = tuple([0] * len(ids) for ids in new_block_ids)
        try:
            self.ranges.append(req_index, new_block_ids, overwrite=overwrite)
        except TooManyRangesError as error:
            raise _cap_error(error, request=f"the request in row {req_index}") from None
        if self.keep_id_rows:
            super().append_block_ids(req_index, new_block_ids, overwrite)
        else:
            self.num_blocks.np[:, req_index] = ends

    def replace_leading_blocks(
        self, req_index: int, ranges: Sequence[tuple[int, int]], *, request: str
    ) -> None:
        """Puts other blocks in place of a row's first ones; staged until applied.

        ``ranges``: (start, count) each, in logical order, of the one cache group there is. The row
        keeps its length and the rest of its blocks. O(ranges), with id rows O(blocks). Raises
        ``InvariantError`` (more blocks than the row has) and ``RangeCapError``, and changes nothing
        then.
        """
        moved = sum(count for _, count in ranges)
        held = int(self.num_blocks.np[0, req_index])
        require_within(request=f"{request} (row {req_index})", moved=moved, held=held)
        ids = moved_block_ids(ranges) if self.keep_id_rows else []
        if self.redirect_writes_to_null_block and moved:
            ranges, ids = [(NULL_BLOCK, moved)], [NULL_BLOCK] * moved
        try:
            self.ranges.replace_leading(req_index, ranges)
        except TooManyRangesError as error:
            raise _cap_error(error, request=f"{request} (row {req_index})") from None
        if self.keep_id_rows:
            self.block_tables[0].stage_write(req_index, 0, ids)

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
        reaches = getattr(self, "_sliding_window_reach", [0] * self.num_kv_cache_groups)
        for group, table in enumerate(out):
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
        return slots[:, :num_tokens_padded]

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
                    name_row=lambda request: f"row {rows[request]} (request {request})",
                )


def _cap_error(error: TooManyRangesError, *, request: str) -> RangeCapError:
    return RangeCapError(
        f"The KV blocks of {request} form {error.needed} ranges; the worker's range table holds "
        f"{error.cap} per request. Raise --block-size so that a request has fewer blocks, or let "
        "the pool become less scattered: reset the prefix cache or lower --max-num-seqs."
    )
