"""What the manager hands to vLLM's scheduler instead of a list of block objects.

vLLM's ``KVCacheBlocks`` holds one Python object per block. Without a KV connector the scheduler
only asks it for ids, so this one holds one native list of ranges per KV-cache group.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm_tagma._native import BlockRanges


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
