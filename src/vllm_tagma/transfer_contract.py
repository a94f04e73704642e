"""What vLLM's scheduler asks of its KV-cache manager for KV connectors, and the pins behind it.

A connector is told block ids and reads or writes these blocks while the scheduler goes on: a pulled
prompt before its request runs, a finished request while another server fetches it. Such a row is
pinned from the call that names its blocks until the one that ends the transfer:

=========  ===============================================  =====================================
a row is   pinned by                                        unpinned by
=========  ===============================================  =====================================
receiving  ``allocate_slots`` with ``delay_cache_blocks``   the next ``allocate_slots``: vLLM
                                                            schedules it once all has arrived
sending    the connector, which keeps a finished request    ``free``
leaving    ``pop_blocks_for_free``: a step in flight may    ``block_pool.free_blocks``
           write into it
=========  ===============================================  =====================================

What a step itself loads or saves needs no pin: a row stays where it is in the step in which it got
blocks, and before the next step is scheduled the output of this one has named what failed. Where
steps overlap, rows do not move at all (``integration/scheduler.py``).

Whatever ends a request (abort, preemption, a load that failed, a lease that ran out) ends in
``free`` or ``pop_blocks_for_free``, which drop its pin. A pin belongs to its row, so none can be
left behind.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_tagma.blocks import TagmaKVCacheBlocks
from vllm_tagma.row_contract import RowContract

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_tagma.group_rows import GroupRows
    from vllm_tagma.observers import Observers
    from vllm_tagma.request_row import Hold, RequestRow


class LeavingRow(NamedTuple):
    """All blocks of a request that is gone; given back through ``block_pool.free_blocks``."""

    pins: tuple[int, ...]


class TransferContract(RowContract):
    """The part of the manager that only KV connectors need."""

    _observers: Observers
    _group_rows: GroupRows | None

    def __init__(self) -> None:
        self.connected = False
        """True once a connector is bound: then ``get_blocks`` shows single blocks as well."""
        self._num_leaving = 0

    # --- what the scheduler asks ------------------------------------------------------------------

    def get_computed_blocks(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[TagmaKVCacheBlocks, int, int]:
        raise NotImplementedError

    def get_computed_blocks_for_connector(
        self, request: Request, max_cache_hit_length: int | None = None
    ) -> tuple[TagmaKVCacheBlocks, int, int, bool]:
        """The longest cached prefix, and False: the hits of one group cannot diverge."""
        return *self.get_computed_blocks(request, max_cache_hit_length), False

    def truncate_computed_blocks(
        self, blocks: TagmaKVCacheBlocks, num_computed_tokens: int
    ) -> TagmaKVCacheBlocks:
        """The part of a look-up's result that holds the first ``num_computed_tokens``, a multiple
        of the block size. O(ranges)."""
        kept = num_computed_tokens // self.block_size
        return TagmaKVCacheBlocks(tuple(group.truncated(kept) for group in blocks.blocks))

    def finalize_partial_tail_offloads(self, request: Request) -> list[tuple[int, int, int]]:
        """Mamba states of a finished request: none."""
        del request
        return []

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Lets go of the blocks in front of what the token behind the processed ones attends to.
        Full attention has none. O(blocks)."""
        del num_prompt_tokens
        row = self._rows.get(request_id)
        if row is not None and self._group_rows is not None:
            self._group_rows.skip(row.handle, row.held_blocks, processed_computed_tokens)

    def evict_blocks(self, block_ids: set[int]) -> None:
        """Withdraws blocks from the prefix cache; references stay. Raises ValueError for an id
        outside the pool, and then changes nothing. O(blocks)."""
        self.pool.evict(block_ids)
        self._observers.blocks_left()

    def pop_blocks_for_free(self, request: Request) -> list[LeavingRow]:
        """Closes a request's row, whose blocks stay taken until they are given to
        ``block_pool.free_blocks``; empty for an unknown request. O(blocks)."""
        row = self._rows.pop(request.request_id, None)
        if row is None:
            return []
        self._unpin(row)
        del self._request_of[row.handle]
        leaving = LeavingRow(self._pins_of(row))
        self._num_leaving += len(leaving.pins)
        self.pool.free(row.handle)
        self._observers.blocks_left()
        return [leaving]

    def _give_back(self, leaving: LeavingRow) -> None:
        for pin in leaving.pins:
            self.pool.unpin(pin)
        self._num_leaving -= len(leaving.pins)

    # --- pins -------------------------------------------------------------------------------------

    def pin_for_sending(self, request_id: str) -> None:
        """The connector keeps the blocks of a finished request until it is freed. O(blocks)."""
        row = self._rows.get(request_id)
        if row is not None:
            self._pin(row, "sending")

    def _pin(self, row: RequestRow, hold: Hold) -> None:
        """Pins the whole row as it is now, in place of what was pinned of it before."""
        self._unpin(row)
        row.pins, row.hold = self._pins_of(row), hold

    def _pins_of(self, row: RequestRow) -> tuple[int, ...]:
        """New pins, one for the row in each group."""
        groups = range(self.num_kv_cache_groups)
        return tuple(self.pool.pin(row.handle, 0, row.held_blocks, group) for group in groups)

    def _unpin(self, row: RequestRow) -> None:
        for pin in row.pins:
            self.pool.unpin(pin)
        row.pins, row.hold = (), ""

    # --- laws -------------------------------------------------------------------------------------

    def _num_pins(self) -> int:
        """Pins that the pool must hold for this manager."""
        return sum(len(row.pins) for row in self._rows.values()) + self._num_leaving
