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

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_tagma.blocks import NO_RANGES, ConnectorBlocks, TagmaKVCacheBlocks

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_tagma._native import BlockRanges, Pool
    from vllm_tagma.observers import Observers
    from vllm_tagma.request_row import Hold, RequestRow


class LeavingRow(NamedTuple):
    """All blocks of a request that is gone; given back through ``block_pool.free_blocks``."""

    pin: int


class TransferContract:
    """The part of the manager that only KV connectors need."""

    block_size: int
    pool: Pool
    _rows: dict[str, RequestRow]
    _request_of: dict[int, str]
    _observers: Observers

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

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Block ids that hold the first ``num_computed_tokens`` tokens. O(blocks)."""
        blocks = -(-num_computed_tokens // self.block_size)
        held = self._row_blocks(request_id)
        return (held.truncated(min(blocks, len(held))).ids(),)

    def remove_skipped_blocks(
        self,
        request_id: str,
        processed_computed_tokens: int,
        num_prompt_tokens: int | None = None,
    ) -> None:
        """Blocks outside the attention window: none, for full attention."""

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
        leaving = LeavingRow(self.pool.pin(row.handle, 0, row.held_blocks))
        self._num_leaving += 1
        self.pool.free(row.handle)
        self._observers.blocks_left()
        return [leaving]

    def _give_back(self, leaving: LeavingRow) -> None:
        self.pool.unpin(leaving.pin)
        self._num_leaving -= 1

    # --- pins -------------------------------------------------------------------------------------

    def pin_for_sending(self, request_id: str) -> None:
        """The connector keeps the blocks of a finished request until it is freed. O(blocks)."""
        row = self._rows.get(request_id)
        if row is not None:
            self._pin(row, "sending")

    def _is_receiving(self, handle: int) -> bool:
        """The request of this row has not run yet, so no worker knows it."""
        return self._rows[self._request_of[handle]].hold == "receiving"

    def _pin(self, row: RequestRow, hold: Hold) -> None:
        """Pins the whole row as it is now, in place of what was pinned of it before."""
        self._unpin(row)
        row.pin, row.hold = self.pool.pin(row.handle, 0, row.held_blocks), hold

    def _unpin(self, row: RequestRow) -> None:
        if row.pin:
            self.pool.unpin(row.pin)
            row.pin, row.hold = 0, ""

    # --- rows as connectors see them --------------------------------------------------------------

    def _row_blocks(self, request_id: str) -> BlockRanges:
        row = self._rows.get(request_id)
        return NO_RANGES if row is None else self.pool.row_blocks(row.handle)

    def get_blocks(self, request_id: str) -> Any:
        """A request's row, hits included; empty for an unknown request. O(ranges)."""
        blocks = self._row_blocks(request_id)
        if self.connected:
            return ConnectorBlocks((blocks,), self.pool)
        return TagmaKVCacheBlocks((blocks,))

    # --- laws -------------------------------------------------------------------------------------

    def _num_pins(self) -> int:
        """Pins that the pool must hold for this manager."""
        return sum(row.pin != 0 for row in self._rows.values()) + self._num_leaving
