"""What the manager hands to vLLM's scheduler instead of a list of block objects.

vLLM's ``KVCacheBlocks`` holds one Python object per block. Without a KV connector the scheduler
only asks it for ids, so this one holds one native list of ranges per KV-cache group. A connector
also looks at single blocks: ``ConnectorBlocks`` makes their objects when it does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from vllm_tagma._native import NULL_BLOCK, BlockRanges, Pool

NO_RANGES: Final = BlockRanges()
"""Immutable, so one will do."""


class TagmaKVCacheBlocks:
    """Blocks of one request, per KV-cache group; stands in for vLLM's ``KVCacheBlocks``.

    Immutable. ``blocks[group]`` is a :class:`BlockRanges`, whose ``len()`` counts blocks. It is not
    iterable: what vLLM's lists hold are block objects, which do not exist here, and ids in their
    place would fail later and less plainly.
    """

    __slots__ = ("blocks",)

    def __init__(self, blocks: tuple[BlockRanges, ...]) -> None:
        self.blocks = blocks

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """Block ids in logical order, one fresh list per group (vLLM's worker extends them).

        With ``allow_none``, None if every chosen group is empty. O(blocks).
        """
        groups = self.blocks if group_ids is None else tuple(self.blocks[i] for i in group_ids)
        if allow_none and not any(groups):
            return None
        return tuple(group.ids() for group in groups)

    @property
    def num_ranges(self) -> tuple[int, ...]:
        """Maximal ranges, per group."""
        return tuple(group.num_ranges for group in self.blocks)

    def __repr__(self) -> str:
        return f"TagmaKVCacheBlocks({self.blocks!r})"


class BlockView(NamedTuple):
    """What a connector reads of one block. ``block_hash``: whose content it holds, if that is in
    the prefix cache; without the number of the group that vLLM appends."""

    block_id: int
    block_hash: bytes | None
    is_null: bool


_NULL = BlockView(NULL_BLOCK, None, True)


class ConnectorBlocks:
    """A request's row as KV connectors see it; stands in for vLLM's ``KVCacheBlocks``.

    What is cached is read from the pool when it is asked for.
    """

    __slots__ = ("_pool", "_rows")

    def __init__(self, rows: tuple[BlockRanges, ...], pool: Pool) -> None:
        self._rows = rows
        self._pool = pool

    @property
    def blocks(self) -> tuple[list[BlockView], ...]:
        """An object for each block, per group. O(blocks)."""
        hash_of = self._pool.block_hash
        return tuple(
            [
                _NULL if block == NULL_BLOCK else BlockView(block, hash_of(block), False)
                for block in row.ids()
            ]
            for row in self._rows
        )

    def get_block_ids(
        self, allow_none: bool = False, *, group_ids: Sequence[int] | None = None
    ) -> tuple[list[int], ...] | None:
        """As ``TagmaKVCacheBlocks.get_block_ids``."""
        return TagmaKVCacheBlocks(self._rows).get_block_ids(allow_none, group_ids=group_ids)

    def get_unhashed_block_ids(self) -> list[int]:
        """Ids of the blocks that are not in the prefix cache. Raises ValueError if there is more
        than one group. O(blocks)."""
        (ids,) = self.get_unhashed_block_ids_all_groups()
        return ids

    def get_unhashed_block_ids_all_groups(self) -> list[list[int]]:
        """The same for each group, without null blocks. O(blocks)."""
        cached = self._pool.is_cached
        return [
            [block for block in row.ids() if block != NULL_BLOCK and not cached(block)]
            for row in self._rows
        ]

    def new_empty(self) -> ConnectorBlocks:
        """No blocks, in as many groups."""
        return ConnectorBlocks(tuple(BlockRanges() for _ in self._rows), self._pool)

    @property
    def num_ranges(self) -> tuple[int, ...]:
        """Maximal ranges, per group."""
        return tuple(row.num_ranges for row in self._rows)

    def __repr__(self) -> str:
        return f"ConnectorBlocks({self._rows!r})"
