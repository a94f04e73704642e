"""A request's rows as vLLM asks for them: ids, ranges, updates for the workers, what is cached."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from vllm_tagma._native import NULL_BLOCK
from vllm_tagma.blocks import ConnectorBlocks, TagmaKVCacheBlocks
from vllm_tagma.row_update import RowUpdate

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from vllm_tagma._native import BlockRanges, Pool
    from vllm_tagma.request_row import RequestRow


class RowContract:
    """The part of the manager that reads rows and changes nothing."""

    block_size: int
    num_kv_cache_groups: int
    empty_kv_cache_blocks: TagmaKVCacheBlocks
    pool: Pool
    connected: bool
    _rows: dict[str, RequestRow]
    _request_of: dict[int, str]

    def _row_blocks(self, request_id: str) -> tuple[BlockRanges, ...]:
        """A request's row in each group; empty for an unknown request."""
        row = self._rows.get(request_id)
        if row is None:
            return self.empty_kv_cache_blocks.blocks
        if self.num_kv_cache_groups == 1:
            return (self.pool.row_blocks(row.handle),)
        groups = range(self.num_kv_cache_groups)
        return tuple(self.pool.row_blocks(row.handle, group) for group in groups)

    def get_blocks(self, request_id: str) -> Any:
        """A request's row, hits included; empty for an unknown request. O(ranges)."""
        blocks = self._row_blocks(request_id)
        if self.connected:
            return ConnectorBlocks(blocks, self.pool)
        return TagmaKVCacheBlocks(blocks)

    def get_block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """Block ids of a request's row in each group, fresh lists. O(blocks)."""
        return tuple(row.ids() for row in self._row_blocks(request_id))

    def get_block_ids_for_computed_tokens(
        self, request_id: str, num_computed_tokens: int
    ) -> tuple[list[int], ...]:
        """Block ids that hold the first ``num_computed_tokens`` tokens. O(blocks)."""
        blocks = -(-num_computed_tokens // self.block_size)
        rows = self._row_blocks(request_id)
        return tuple(row.truncated(min(blocks, len(row))).ids() for row in rows)

    def _num_held(self, request_id: str) -> int:
        row = self._rows.get(request_id)
        return 0 if row is None else row.held_blocks

    def num_ranges(self, request_id: str) -> tuple[int, ...]:
        """Ranges of a request's row in each group, runs of null blocks not counted; 0 for an
        unknown request."""
        rows = self._row_blocks(request_id)
        return tuple(sum(start != NULL_BLOCK for start, _ in row.ranges()) for row in rows)

    def estimate_cached_tokens(self, request: Request) -> int:
        """Tokens up to the last block of the request's row that is in the prefix cache, in the
        group where they are fewest.

        O(ranges), plus the published blocks that were withdrawn since or never cached.
        """
        row = self._rows.get(request.request_id)
        if row is None:
            return 0
        last = (
            self._last_cached(blocks.truncated(row.published_blocks))
            for blocks in self._row_blocks(request.request_id)
        )
        return min(last) * self.block_size

    def _last_cached(self, row: BlockRanges) -> int:
        """Blocks up to the last one that is in the prefix cache."""
        blocks = len(row)
        for start, count in reversed(row.ranges()):
            if start == NULL_BLOCK:
                return 0  # nothing lies in front of null blocks
            for block_id in reversed(range(start, start + count)):
                if self.pool.is_cached(block_id):
                    return blocks
                blocks -= 1
        return 0

    def take_row_updates(self, whole: Collection[str]) -> list[RowUpdate]:
        """What changed in rows since the last call, for the workers.

        Requests in ``whole`` get their whole rows (new, resumed and streamed ones, which the
        workers do not know or know otherwise), all others the end that changed, if one did.
        O(ranges of both).
        """
        updates: list[RowUpdate] = []
        sent: set[tuple[str, int]] = set()
        changes = self.pool.take_row_updates()
        if self.connected:
            changes = [change for change in changes if not self._is_receiving(change[0])]
        for handle, group, first_block, ranges in changes:
            request_id = self._request_of[handle]
            if request_id in whole:
                if first_block:
                    continue
                sent.add((request_id, group))
            updates.append(RowUpdate(request_id, group, first_block, ranges))
        for request_id in whole:
            if request_id not in self._rows:  # it has ended in the meantime
                continue
            for group, blocks in enumerate(self._row_blocks(request_id)):
                if (request_id, group) not in sent:
                    updates.append(RowUpdate(request_id, group, 0, blocks))
        return updates

    def _is_receiving(self, handle: int) -> bool:
        """The request of this row has not run yet, so no worker knows it."""
        return self._rows[self._request_of[handle]].hold == "receiving"
