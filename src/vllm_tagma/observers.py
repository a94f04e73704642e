"""Who watches the manager's blocks: KV events, and vLLM's residency metrics.

Both are told in vLLM's own order: touched, evicted, allocated, stored. What the core did by itself
(evictions, moves) is read from it afterwards, so nothing is kept while nobody watches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from vllm_tagma._native import NULL_BLOCK
from vllm_tagma.stand_ins import BlockId

if TYPE_CHECKING:
    from vllm.distributed.kv_events import KVCacheEvent
    from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
    from vllm.v1.request import Request

    from vllm_tagma._native import BlockRanges, Pool
    from vllm_tagma.events import EventLog


class Observers:
    """Passes on what happens to the blocks of a pool made with ``record_evictions``.

    ``events``: the log of each KV-cache group.
    """

    def __init__(
        self,
        pool: Pool,
        *,
        events: list[EventLog] | None,
        collector: KVCacheMetricsCollector | None,
        enable_caching: bool,
    ) -> None:
        self._pool = pool
        self._events = events
        self._collector = collector
        self._enable_caching = enable_caching
        self.watching = events is not None or collector is not None

    def allocated(self, hits: Iterable[BlockRanges], added: Iterable[BlockRanges]) -> None:
        """A request adopted the hits and was given the added blocks, one list for each group.
        O(blocks)."""
        collector = self._collector
        if collector is not None:
            for block_id in _ids(hits):
                collector.on_block_accessed(BlockId(block_id))
        self.blocks_left()
        if collector is not None:
            for block_id in _ids(added):
                if self._enable_caching:
                    collector.on_block_evicted(BlockId(block_id))  # ends a sampled lifetime
                collector.on_block_allocated(BlockId(block_id))

    def stored(
        self,
        request: Request,
        first: int,
        last: int,
        group: int = 0,
        spans: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Of the request's blocks [first, last) in a group, ``spans`` or all are in the cache.
        O(tokens)."""
        if self._events is not None:
            self._events[group].stored(request, first, last, spans)

    def blocks_left(self) -> None:
        """Passes on the blocks that left the cache since the last call, and those that moved.

        A call that refuses a request may have moved blocks too. O(these).
        """
        if not self.watching:
            return
        for block_id, group, block_hash in self._pool.take_evicted():
            if self._collector is not None:
                self._collector.on_block_evicted(BlockId(block_id))
            if self._events is not None:
                self._events[group].removed(block_hash)
        moves = self._pool.take_relocations()
        if self._collector is not None:
            self._follow(self._collector, moves)

    def cleared(self) -> None:
        """The cache was emptied."""
        if self._collector is not None:
            self._collector.reset()
        if self._events is not None:
            self._events[0].cleared()  # all groups at once

    def take_events(self) -> list[KVCacheEvent]:
        """KV events since the last call, in order."""
        return self._events[0].take() if self._events is not None else []

    @staticmethod
    def _follow(collector: KVCacheMetricsCollector, moves: list[tuple[int, int]]) -> None:
        """Lets residency samples follow their blocks: a move is neither eviction nor access."""
        for source, destination in moves:
            collector.on_block_evicted(BlockId(destination))  # what was there has left unnoticed
            sample = collector.block_metrics.pop(source, None)
            if sample is not None:
                collector.block_metrics[destination] = sample


def _ids(groups: Iterable[BlockRanges]) -> Iterator[int]:
    """All block ids but the null block's."""
    return (block_id for group in groups for block_id in group.ids() if block_id != NULL_BLOCK)
