"""What vLLM reads of its manager's parts: the coordinator, the group managers, the block pool.

Without a KV connector the scheduler and the engine read a handful of their members and nothing
else, so these stand-ins hold just those. Any other member is an AttributeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from vllm_tagma.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm.v1.kv_cache_interface import KVCacheSpec

    from vllm_tagma._native import Pool


class BlockId(NamedTuple):
    """All that vLLM's metrics collector reads of a block."""

    block_id: int


class Group(NamedTuple):
    """Stands in for vLLM's single-type manager of one KV-cache group."""

    block_size: int
    kv_cache_spec: KVCacheSpec


class Coordinator(NamedTuple):
    """Stands in for vLLM's coordinator of all groups."""

    single_type_managers: tuple[Group, ...]
    enable_partial_hash_hits: bool = False


class BlockPool:
    """Stands in for vLLM's block pool: capacity only, the blocks themselves are native."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self.num_gpu_blocks = pool.num_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks in holes plus idle cached blocks."""
        return self._pool.num_free

    def free_blocks(self, ordered_blocks: Iterable[object]) -> None:
        """vLLM gives back the end points of block copies here; this manager orders none.

        Raises:
            UnsupportedError: blocks were given back.
        """
        if any(True for _ in ordered_blocks):
            raise UnsupportedError(
                "vLLM gave blocks back through block_pool.free_blocks(), which the tagma backend "
                "never lends; use --kv-cache-backend paged and report this"
            )
