"""vLLM's V1 block table with the ranges of its rows beside it: slots by arithmetic.

A row comes to be in one of two ways. If the step carries its ranges (``row_updates.py``), they are
written as they are and the ids in the table are expanded from them: attention reads the table. If
it does not (dummy runs, warm-up, graph capture, a row that vLLM adds again from its own list), the
ranges are derived from vLLM's ids. Either way both say the same, and ``debug_slots`` looks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode

from vllm_tagma import support
from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import SeamError
from vllm_tagma.integration.row_updates import require_fits, require_same_ids, row_too_long
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.worker.range_table import RangeTable
from vllm_tagma.worker.slot_audit import SlotAudit


class TagmaBlockTable(BlockTable):  # type: ignore[misc]
    """vLLM's block table plus the ranges of its rows.

    Invariant between calls (law W1): the ranges of a row encode its first ``num_blocks_per_row``
    ids. Made by ``adopt_block_table``, never constructed.
    """

    ranges: RangeTable
    audit: SlotAudit | None
    request_of: Callable[[int], str | None]
    updates: dict[str, RowUpdate]  # of the step and this group, until the row was written

    first_steps: int | None  # whose slots the self-test still compares; None for all

    _slots: torch.Tensor | None = None  # the buffer that was checked, and its length
    _num_slots: int

    def append_row(self, block_ids: list[int], row_idx: int) -> None:
        update = self._take_update(row_idx)
        if update is not None:
            self.apply_update(update, row_idx, int(self.num_blocks_per_row[row_idx]), block_ids)
        elif block_ids:
            # Ranges first: if they refuse, neither table has changed.
            self.ranges.append(row_idx, block_ids)
            super().append_row(block_ids, row_idx)

    def add_row(self, block_ids: list[int], row_idx: int) -> None:
        update = self._take_update(row_idx)
        if update is not None and update.first_block == 0:
            self.apply_update(update, row_idx, 0, block_ids)
            return
        if update is not None:  # the end of a row that vLLM adds again: its ids have followed
            require_fits(update, held=len(block_ids), brought=0)
        self.ranges.clear(row_idx)
        super().add_row(block_ids, row_idx)  # calls append_row

    def _take_update(self, row_idx: int) -> RowUpdate | None:
        request = self.request_of(row_idx) if self.updates else None
        return None if request is None else self.updates.pop(request, None)

    def apply_update(
        self, update: RowUpdate, row_idx: int, held: int, block_ids: list[int]
    ) -> None:
        """Writes the update of a row that holds ``held`` blocks and that vLLM extends by ids.

        With ``debug_slots`` the ids are compared. Raises ``InvariantError`` (laws W1, W2) and
        ``RangeCapError``; nothing has changed then.
        """
        require_fits(update, held=held, brought=len(block_ids))
        if self.audit is not None:
            require_same_ids(update, block_ids)
        self.write(row_idx, update.first_block, update.ranges)

    def write(self, row_idx: int, first_block: int, ranges: BlockRanges) -> None:
        """The row keeps its first ``first_block`` blocks and then consists of ``ranges``.

        As after any write, ``commit_block_table`` brings it to the device. Ids behind a row's last
        block stay as they are, as in vLLM. O(blocks written). Raises ``RangeCapError``, and
        ``InvariantError`` for a row longer than the table is wide; nothing has changed then.
        """
        end = first_block + len(ranges)
        if end > self.max_num_blocks_per_req:
            raise row_too_long(self.name_row(row_idx), end, self.max_num_blocks_per_req)
        self.ranges.write(row_idx, first_block, ranges)
        ranges.write_ids(self.block_table.np[row_idx], first_block)
        self.num_blocks_per_row[row_idx] = end

    def name_row(self, row_idx: int) -> str:
        """What errors call a row."""
        request = self.request_of(row_idx)
        return f"row {row_idx}" if request is None else f"request {request} (row {row_idx})"

    def clear_row(self, row_idx: int) -> None:
        self.ranges.clear(row_idx)
        super().clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        self.ranges.move(src=src, dst=tgt)
        super().move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        self.ranges.swap(src, tgt)
        super().swap_row(src, tgt)

    def clear(self) -> None:
        # vLLM zeroes the ids but keeps the row lengths: rows of null blocks, without slots.
        super().clear()
        self.rebuild_ranges()

    def rebuild_ranges(self) -> None:
        """Derives all ranges from the ids in the table. O(rows x blocks)."""
        for row, num_blocks in enumerate(self.num_blocks_per_row.tolist()):
            ids = self.block_table.np[row, :num_blocks]
            self.ranges.write(row, 0, BlockRanges.from_ids(ids))

    def compute_slot_mapping(
        self, num_reqs: int, query_start_loc: torch.Tensor, positions: torch.Tensor
    ) -> None:
        """Writes ``slot_mapping``: int64 [tokens], CPU.

        Nothing behind the batch's tokens is padded, as in vLLM's CPU kernel: the runner pads what
        it hands on.
        """
        num_tokens = positions.shape[0]
        slots = self.slot_mapping.gpu
        if slots is not self._slots or num_tokens > self._num_slots:  # vLLM keeps one buffer
            _address(slots, torch.int64, num_tokens)
            self._slots, self._num_slots = slots, slots.shape[0]
        self.ranges.compute_slots_at(
            _address(query_start_loc, torch.int32, num_reqs + 1),
            _address(positions, torch.int64, num_tokens),
            slots.data_ptr(),
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            pad_to=num_tokens,
            block_size=self.block_size,
        )
        audit = self.audit
        if audit is None and self.first_steps != 0:
            audit = SlotAudit()  # its counters are nobody's
            self.first_steps = None if self.first_steps is None else self.first_steps - 1
        if audit is not None:
            audit.check(
                slots.numpy(),
                query_start_loc.numpy()[: num_reqs + 1],
                positions.numpy(),
                block_table=self.block_table.gpu.numpy(),  # what attention reads
                num_blocks=self.num_blocks_per_row,
                block_size=self.block_size,
                name_row=self.name_row,
            )


def _address(tensor: torch.Tensor, dtype: torch.dtype, length: int) -> int:
    """Where a contiguous CPU tensor of ``length`` elements or more begins."""
    if (
        tensor.dtype is not dtype
        or not tensor.is_cpu
        or not tensor.is_contiguous()
        or tensor.shape[0] < length
    ):
        raise SeamError(
            f"expected a contiguous CPU tensor of {length} or more elements of {dtype}, got "
            f"{tuple(tensor.shape)} of {tensor.dtype} on {tensor.device}. Serve with "
            "--kv-cache-backend paged and report this."
        )
    return int(tensor.data_ptr())


def adopt_block_table(
    table: BlockTable,
    *,
    request_of: Callable[[int], str | None],
    audit: SlotAudit | None,
    first_steps: int | None = 0,
) -> None:
    """Turns a block table into a ``TagmaBlockTable`` in place, rows included.

    ``request_of`` says which request a row belongs to, if any. ``first_steps``: how many the
    self-test compares, None for all. Raises ``UnsupportedError`` for a
    table whose slots are not those of whole requests, and ``SeamError`` if it is not vLLM's own.
    """
    if type(table) is not BlockTable:
        raise SeamError(
            f"expected vLLM's BlockTable, found {type(table).__qualname__}: another plugin or an "
            "unknown vLLM has replaced it. Serve with --kv-cache-backend paged."
        )
    if table.slot_mapping_mode is not SlotMappingMode.TOKEN_TO_KV_SLOT:
        mode = f"{table.slot_mapping_mode.value!r}"
        support.refuse("mamba", mode, option="the slot mapping of a cache group")
    if table.dcp_world_size != 1:
        support.refuse("decode-context-parallel", table.dcp_world_size)
    if table.pcp_world_size != 1:
        support.refuse("prefill-context-parallel", table.pcp_world_size)
    table.request_of = request_of
    table.updates = {}
    table.audit = audit
    table.first_steps = first_steps
    table.__class__ = TagmaBlockTable
    table.ranges = RangeTable(max_rows=table.max_num_reqs, name_row=table.name_row)
    table.rebuild_ranges()
