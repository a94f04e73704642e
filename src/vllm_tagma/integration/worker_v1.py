"""The worker of Model Runner V1 on CPU, writing KV by range arithmetic.

vLLM's worker keeps a block table per KV-cache group and computes slots from it. Here each table
also keeps the ranges of its rows, and slots come from those. The table itself stays filled:
attention and others read it.

Seam 1, ``worker_cls``: ``TagmaCPUWorker``, by its public name.
Seam 2, ``CPUModelRunner.may_reinitialize_input_batch``: the one place where the input batch that
will serve is known, whether it was made there or is the placeholder of the constructor. The tables
are converted in place because their buffers are already shared (on CPU the placeholder's device
tensors *are* its host tensors). It can go when vLLM lets a runner name its block table class.
Seam 3, ``BlockTable``: every method that writes a row. vLLM 0.32 and 0.33 write rows in no other
way, with two exceptions: ``preserve_serving_state`` restores saved tensors, and is overridden; the
warm-up of Mamba state caches writes ids directly and puts them back, and concerns no table with
slots.
Seam 4, ``GPUModelRunner._update_states``: rows whose blocks have moved are rewritten before it, in
the step that copies the blocks (``row_moves.py``). It can go when vLLM's scheduler output can say
that a running row changed.
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from vllm.v1.worker.block_table import BlockTable, SlotMappingMode
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tagma import support
from vllm_tagma.config import TagmaConfig
from vllm_tagma.errors import SeamError, UnsupportedError
from vllm_tagma.integration.row_moves import (
    RowMoves,
    moved_block_ids,
    require_within,
    row_moves_of,
)
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.worker.range_table import RangeTable
from vllm_tagma.worker.slot_audit import SlotAudit


class TagmaBlockTable(BlockTable):  # type: ignore[misc]
    """vLLM's block table plus the ranges of its rows.

    Invariant between calls: the ranges of a row encode its first ``num_blocks_per_row`` ids.
    Made by ``adopt_block_table``, never constructed.
    """

    ranges: RangeTable
    audit: SlotAudit | None
    name_row: Callable[[int], str]

    _slots: torch.Tensor | None = None  # the buffer that was checked, and its length
    _num_slots: int

    def append_row(self, block_ids: list[int], row_idx: int) -> None:
        # Ranges first: if they refuse, neither table has changed.
        self.ranges.append(row_idx, block_ids)
        super().append_row(block_ids, row_idx)

    def add_row(self, block_ids: list[int], row_idx: int) -> None:
        self.ranges.clear(row_idx)
        super().add_row(block_ids, row_idx)  # calls append_row

    def clear_row(self, row_idx: int) -> None:
        self.ranges.clear(row_idx)
        super().clear_row(row_idx)

    def move_row(self, src: int, tgt: int) -> None:
        self.ranges.move(src=src, dst=tgt)
        super().move_row(src, tgt)

    def swap_row(self, src: int, tgt: int) -> None:
        self.ranges.swap(src, tgt)
        super().swap_row(src, tgt)

    def replace_leading(self, block_ids: list[int], row_idx: int) -> None:
        """Puts other blocks in place of a row's first ones; the row keeps its length and the rest.

        As after any write, ``commit_block_table`` brings it to the device. O(blocks of the row).
        Raises ``RangeCapError``, and ``InvariantError`` for more blocks than the row has; neither
        table has changed then.
        """
        held = int(self.num_blocks_per_row[row_idx])
        require_within(request=self.name_row(row_idx), moved=len(block_ids), held=held)
        row = self.block_table.np[row_idx, :held].copy()
        row[: len(block_ids)] = block_ids
        self.ranges.replace(row_idx, row)
        self.block_table.np[row_idx, :held] = row

    def clear(self) -> None:
        # vLLM zeroes the ids but keeps the row lengths: rows of null blocks, without slots.
        super().clear()
        self.rebuild_ranges()

    def rebuild_ranges(self) -> None:
        """Derives all ranges from the ids in the table. O(rows x blocks)."""
        for row, num_blocks in enumerate(self.num_blocks_per_row.tolist()):
            self.ranges.clear(row)
            self.ranges.append(row, self.block_table.np[row, :num_blocks])

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
        if self.audit is not None:
            self.audit.check(
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
    table: BlockTable, *, name_row: Callable[[int], str], audit: SlotAudit | None
) -> None:
    """Turns a block table into a ``TagmaBlockTable`` in place, rows included.

    Raises ``UnsupportedError`` for a table whose slots are not those of whole requests, and
    ``SeamError`` if it is not vLLM's own class.
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
    table.ranges = RangeTable(max_rows=table.max_num_reqs, name_row=name_row)
    table.audit = audit
    table.name_row = name_row
    table.__class__ = TagmaBlockTable
    table.rebuild_ranges()


def _row_names(input_batch: Any) -> Callable[[int], str]:
    def name_row(row: int) -> str:
        ids = input_batch.req_ids
        return f"request {ids[row]} (row {row})" if row < len(ids) else f"row {row}"

    return name_row


class TagmaCPUModelRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM's CPU runner whose block tables map slots by range."""

    slot_audit: SlotAudit | None

    def may_reinitialize_input_batch(self, kv_cache_config: Any) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        name_row = _row_names(self.input_batch)
        for table in self.input_batch.block_table.block_tables:
            if type(table) is not TagmaBlockTable:  # may be called again for the same batch
                adopt_block_table(table, name_row=name_row, audit=self.slot_audit)

    def _update_states(self, scheduler_output: Any) -> Any:
        moves = row_moves_of(scheduler_output)
        if moves:
            self._apply_row_moves(moves)  # before vLLM appends to, adds or drops any row
        return super()._update_states(scheduler_output)

    def _apply_row_moves(self, moves: RowMoves) -> None:
        """Rewrites moved rows: the request's own list of ids, and its row if it is in the batch.

        vLLM drops a request from the batch in each step that does not schedule it and adds it again
        from that list. Requests that are unknown here have ended: nothing to do.
        """
        for request_id, ranges in moves.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            (held,) = state.block_ids  # one cache group: support/ refuses more
            block_ids = moved_block_ids(ranges)
            require_within(request=f"request {request_id}", moved=len(block_ids), held=len(held))
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                self.input_batch.block_table[0].replace_leading(block_ids, row)
            held[: len(block_ids)] = block_ids

    @contextmanager
    def preserve_serving_state(self) -> Iterator[None]:
        try:
            with super().preserve_serving_state():
                yield
        finally:
            for table in self.input_batch.block_table.block_tables:
                table.rebuild_ranges()


class TagmaCPUWorker(CPUWorker):  # type: ignore[misc]
    """vLLM's CPU worker with ``TagmaCPUModelRunner``."""

    def init_device(self) -> None:
        require_seams("worker")
        super().init_device()
        runner = self.model_runner
        if type(runner) is not CPUModelRunner:
            raise UnsupportedError(
                f"{type(runner).__module__}.{type(runner).__qualname__} is not Model Runner V1 for "
                "CPU, the only one that maps slots by range. Unset VLLM_USE_V2_MODEL_RUNNER, or "
                "serve with --kv-cache-backend paged."
            )
        config = TagmaConfig.from_sources(self.vllm_config.additional_config)
        runner.slot_audit = SlotAudit() if config.debug_slots else None
        runner.__class__ = TagmaCPUModelRunner
        if runner.slot_audit is not None:
            # An engine inside the caller's process is not always shut down.
            atexit.register(runner.slot_audit.log_summary)

    def slot_audit_counters(self) -> dict[str, int] | None:
        """What ``debug_slots`` has checked so far, or None when it is off."""
        audit = self.model_runner.slot_audit
        return None if audit is None else audit.counters()

    def shutdown(self) -> None:
        audit = getattr(getattr(self, "model_runner", None), "slot_audit", None)
        if audit is not None:
            audit.log_summary()
        super().shutdown()
