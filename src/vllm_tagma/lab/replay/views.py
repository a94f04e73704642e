"""How each manager's pool is read: ranges of a row, occupancy, evictions, states of blocks.

The two classes answer the same questions, so that what is counted is defined once. Nothing here is
called from inside the scheduler but the counter of published blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

BlockIds = npt.NDArray[np.int64]


_NULL = 0  # the block of positions that nobody reads any more


class RowRanges(NamedTuple):
    """Maximal ascending ranges of consecutive block ids in a request's row."""

    total: int
    own: int
    """Of the part behind the prefix hit."""
    blocks: int


class PoolView(Protocol):
    """What the replay asks of a manager."""

    def rows(self, request_id: str, hit_blocks: int) -> list[RowRanges]:
        """Ranges of a request's row in each KV-cache group; its first ``hit_blocks`` are a prefix
        hit. Null blocks, where a window has passed by, count for nothing."""

    def row_ids(self, request_id: str) -> BlockIds:
        """Ids of a request's blocks, group by group in logical order, without null blocks."""

    def live_share(self) -> float:
        """Share of the pool that running requests reference, 0 to 1."""

    def is_cached(self, block_id: int) -> bool:
        """Whether a block can be hit."""

    def evicted(self) -> int:
        """Blocks evicted from the prefix cache since the start."""

    def moved(self) -> int:
        """Blocks copied by compaction since the start."""


def count_ranges(ids: BlockIds) -> int:
    """Maximal runs of consecutive ascending ids. O(ids)."""
    if not len(ids):
        return 0
    return 1 + int(np.count_nonzero(np.diff(ids) != 1))


def _held(groups: Sequence[list[int]]) -> BlockIds:
    ids = np.concatenate([np.array(group, dtype=np.int64) for group in groups])
    held: BlockIds = ids[ids != _NULL]
    return held


class PagedView:
    """vLLM's own manager: a list of block objects a request."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.block_pool
        self._published = 0
        self._cache_full_blocks = self._pool.cache_full_blocks
        self._pool.cache_full_blocks = self._count_published

    def rows(self, request_id: str, hit_blocks: int) -> list[RowRanges]:
        rows = []
        for group in self._manager.get_block_ids(request_id):
            ids = np.array(group, dtype=np.int64)
            held = ids != _NULL
            own = count_ranges(ids[hit_blocks:][held[hit_blocks:]])
            total, blocks = count_ranges(ids[held]), int(np.count_nonzero(held))
            rows.append(RowRanges(total=total, own=own, blocks=blocks))
        return rows

    def row_ids(self, request_id: str) -> BlockIds:
        return _held(self._manager.get_block_ids(request_id))

    def live_share(self) -> float:
        usage: float = self._pool.get_usage()
        return usage

    def is_cached(self, block_id: int) -> bool:
        return self._pool.blocks[block_id].block_hash is not None

    def evicted(self) -> int:
        # vLLM counts no evictions. A published block stays cached until it is evicted (the replay
        # resets no cache), and this costs nothing a block; a hook into each eviction would.
        cached = sum(block.block_hash is not None for block in self._pool.blocks)
        return self._published - cached

    def moved(self) -> int:
        return 0

    def _count_published(
        self,
        request: Any,
        blocks: Any,
        num_cached_blocks: int,
        num_full_blocks: int,
        *rest: Any,
        block_mask: list[bool] | None = None,
        **more: Any,
    ) -> None:
        fresh = blocks[num_cached_blocks:num_full_blocks]
        wanted = [True] * len(fresh) if block_mask is None else block_mask
        self._published += sum(
            not block.is_null for block, cached in zip(fresh, wanted, strict=True) if cached
        )
        self._cache_full_blocks(
            request,
            blocks,
            num_cached_blocks,
            num_full_blocks,
            *rest,
            block_mask=block_mask,
            **more,
        )


class TagmaView:
    """Our manager: a native list of ranges a request."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._pool = manager.pool

    def rows(self, request_id: str, hit_blocks: int) -> list[RowRanges]:
        rows = []
        for row in self._manager.get_blocks(request_id).blocks:
            held = [count for start, count in row.ranges() if start != _NULL]
            left = len(row) - hit_blocks
            own = 0
            # From the tail: the own part ends there, and it is mostly one range.
            for count in reversed(held):
                if left <= 0:
                    break
                own += 1
                left -= count
            rows.append(RowRanges(total=len(held), own=own, blocks=sum(held)))
        return rows

    def row_ids(self, request_id: str) -> BlockIds:
        return _held(self._manager.get_block_ids(request_id))

    def live_share(self) -> float:
        usage: float = self._manager.usage
        return usage

    def is_cached(self, block_id: int) -> bool:
        cached: bool = self._pool.is_cached(block_id)
        return cached

    def evicted(self) -> int:
        evictions: int = self._pool.stats()["evictions"]
        return evictions

    def moved(self) -> int:
        moved: int = self._pool.stats().get("moved_blocks", 0)
        return moved


def view_of(manager: Any) -> PoolView:
    """The view that fits a manager, by whether its pool is native."""
    return TagmaView(manager) if "pool" in vars(manager) else PagedView(manager)
