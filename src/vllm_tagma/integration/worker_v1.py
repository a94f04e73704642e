"""The worker of Model Runner V1 on CPU, writing KV by range arithmetic.

vLLM's worker keeps a block table per KV-cache group and computes slots from it. Here each table
also keeps the ranges of its rows, as the scheduler sends them, and slots come from those
(``block_table_v1.py``, ``row_updates.py``).

Seam 1, ``worker_cls``: ``TagmaCPUWorker``, by its public name.
Seam 2, ``CPUModelRunner.may_reinitialize_input_batch``: the one place where the input batch that
will serve is known, whether it was made there or is the placeholder of the constructor. The tables
are converted in place because their buffers are already shared (on CPU the placeholder's device
tensors *are* its host tensors). It can go when vLLM lets a runner name its block table class.
Seam 3, ``BlockTable``: every method that writes a row. vLLM 0.32 and 0.33 write rows in no other
way, with two exceptions: ``preserve_serving_state`` restores saved tensors, and is overridden; the
warm-up of Mamba state caches writes ids directly and puts them back, and concerns no table with
slots.
Seam 4, ``GPUModelRunner._update_states``: while it runs, the tables know the step's row updates.
Before it the request's own list of ids follows the moves, because vLLM appends to that list and
adds rows from it; after it rows that moved and got no new block are written. It can go when vLLM's
scheduler output can say that a running row changed.
Seam 5, ``InputBatch.req_ids``: which request a table row belongs to when it is written.
Seam 6, ``copy_kv_cache_blocks_inplace``: while ``_update_states`` runs, our mover stands for it
(``block_copies.py``).
"""

from __future__ import annotations

import atexit
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import vllm.v1.worker.gpu_model_runner as _runner_module
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker

from vllm_tagma.config import TagmaConfig
from vllm_tagma.errors import InvariantError, UnsupportedError
from vllm_tagma.integration import start_test
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.integration.block_table_v1 import TagmaBlockTable, adopt_block_table
from vllm_tagma.integration.row_updates import by_group, require_fits, row_updates_of
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.worker.slot_audit import SlotAudit

_logger = logging.getLogger("vllm.tagma.worker")


def _requests_of(input_batch: Any) -> Callable[[int], str | None]:
    def request_of(row: int) -> str | None:
        ids = input_batch.req_ids
        return ids[row] if row < len(ids) else None

    return request_of


class TagmaCPUModelRunner(CPUModelRunner):  # type: ignore[misc]
    """vLLM's CPU runner whose block tables map slots by range."""

    slot_audit: SlotAudit | None
    block_copies: BlockCopies

    def may_reinitialize_input_batch(self, kv_cache_config: Any) -> None:
        super().may_reinitialize_input_batch(kv_cache_config)
        request_of = _requests_of(self.input_batch)
        options = TagmaConfig.from_sources(self.vllm_config.additional_config)
        steps = start_test.self_test_steps(options)
        for table in self.input_batch.block_table.block_tables:
            if type(table) is not TagmaBlockTable:  # may be called again for the same batch
                adopt_block_table(
                    table, request_of=request_of, audit=self.slot_audit, first_steps=steps
                )

    def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        super().initialize_kv_cache(*args, **kwargs)
        options = TagmaConfig.from_sources(self.vllm_config.additional_config)
        start_test.check_v1(self, options, self.block_copies)

    def _update_states(self, scheduler_output: Any) -> Any:
        with self.block_copies.stand_in(_runner_module, scheduler_output):
            return self._update_rows(scheduler_output)

    def _update_rows(self, scheduler_output: Any) -> Any:
        updates = row_updates_of(scheduler_output)
        if not updates:
            return super()._update_states(scheduler_output)
        tables = self.input_batch.block_table.block_tables
        of_groups = by_group(updates, len(tables))
        self._move_ids(updates)
        for table, of_group in zip(tables, of_groups, strict=True):
            table.updates = of_group
        try:
            after = super()._update_states(scheduler_output)
            for group, table in enumerate(tables):
                self._write_moved_rows(group, table)
        finally:
            for table in tables:
                table.updates = {}
        return after

    def _move_ids(self, updates: Iterable[RowUpdate]) -> None:
        """Lets the ids of known requests follow their blocks, as far as the worker holds them.

        vLLM extends these lists, and adds rows from them after a step that did not schedule the
        request; it replaces those of streamed and resumed requests. O(blocks that moved).
        """
        for request_id, group, first, ranges in updates:
            state = self.requests.get(request_id)
            if state is None:
                continue
            ids = state.block_ids[group]
            if first < len(ids):
                moved = ranges.truncated(len(ids) - first).ids()
                ids[first : first + len(moved)] = moved

    def _write_moved_rows(self, group: int, table: TagmaBlockTable) -> None:
        """Writes what vLLM had no reason to touch: rows that moved and got no new block.

        A request that is unknown here has ended, or will bring its whole row.
        """
        for request_id, update in table.updates.items():
            state = self.requests.get(request_id)
            if state is None:
                continue
            held = len(state.block_ids[group])
            require_fits(update, held=held, brought=0)
            row = self.input_batch.req_id_to_index.get(request_id)
            if row is not None:
                table.apply_update(update, row, int(table.num_blocks_per_row[row]), [])

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
        require_seams("worker", "worker_v1")
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
        runner.block_copies = BlockCopies()
        runner.__class__ = TagmaCPUModelRunner
        if runner.slot_audit is not None:
            # An engine inside the caller's process is not always shut down.
            atexit.register(runner.slot_audit.log_summary)

    def execute_model(self, scheduler_output: Any) -> Any:
        """One step of vLLM's. A broken law ends it, on whichever rank.

        The ``mp`` executor hears the exceptions of one rank. Another that raised would leave the
        engine waiting for the time-out of a collective operation; that the process ended, it sees.
        """
        try:
            return super().execute_model(scheduler_output)
        except InvariantError:
            if is_heard(self.parallel_config, self.rank):
                raise
            _logger.exception("rank %d has broken a law and ends", self.rank)
            logging.shutdown()
            os._exit(1)

    def slot_audit_counters(self) -> dict[str, int] | None:
        """What ``debug_slots`` has checked so far, or None when it is off."""
        audit = self.model_runner.slot_audit
        return None if audit is None else audit.counters()

    def shutdown(self) -> None:
        audit = getattr(getattr(self, "model_runner", None), "slot_audit", None)
        if audit is not None:
            audit.log_summary()
        super().shutdown()


def is_heard(parallel_config: Any, rank: int) -> bool:
    """Whether the executor answers for what this rank raises: its first one of the last stage, or
    any that runs inside the engine's process."""
    if parallel_config.distributed_executor_backend != "mp":
        return True
    last_stage = parallel_config.world_size - parallel_config.tensor_parallel_size
    return bool(rank == last_stage)
