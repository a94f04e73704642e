"""What vLLM reads of its manager's parts: the coordinator, the group managers, the block pool.

The scheduler, the engine and the KV connectors that are served read a handful of their members and
nothing else, so these stand-ins hold just those. Any other member is an AttributeError.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from vllm_tagma.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sized

    from vllm.v1.kv_cache_interface import KVCacheSpec

    from vllm_tagma._native import Pool
    from vllm_tagma.transfer_contract import LeavingRow


class BlockId(NamedTuple):
    """All that vLLM's metrics collector reads of a block."""

    block_id: int


class Group(NamedTuple):
    """Stands in for vLLM's single-type manager of one KV-cache group."""

    block_size: int
    kv_cache_spec: KVCacheSpec


class Coordinator(NamedTuple):
    """Stands in for vLLM's coordinator of all groups. ``num_held`` counts a request's blocks in
    each group."""

    single_type_managers: tuple[Group, ...]
    num_held: Callable[[str], int]
    enable_partial_hash_hits: bool = False

    def get_num_blocks_to_allocate(
        self,
        *,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: tuple[Sized, ...],
        **unused: Any,
    ) -> int:
        """Blocks that a request lacks to hold ``num_tokens``; what else vLLM passes concerns
        windows and states. Raises :class:`UnsupportedError` for a prefix hit, which vLLM passes to
        ``allocate_slots`` only. O(1)."""
        del unused
        if any(len(group) for group in new_computed_blocks):
            raise UnsupportedError(
                f"vLLM asked what request {request_id} lacks beside a prefix hit; use "
                "--kv-cache-backend paged and report this"
            )
        held = self.num_held(request_id)
        return sum(
            max(-(-num_tokens // group.block_size) - held, 0) for group in self.single_type_managers
        )


class BlockPool:
    """Stands in for vLLM's block pool: capacity only, the blocks themselves are native.

    ``give_back`` takes what ``pop_blocks_for_free`` gave (``transfer_contract.py``).
    """

    def __init__(self, pool: Pool, give_back: Callable[[LeavingRow], None]) -> None:
        self._pool = pool
        self._give_back = give_back
        self.num_gpu_blocks = pool.num_blocks

    def get_num_free_blocks(self) -> int:
        """Blocks in holes plus idle cached blocks."""
        return self._pool.num_free

    def free_blocks(self, ordered_blocks: Iterable[LeavingRow]) -> None:
        """Frees the blocks of requests that left earlier, each request's tail first. O(blocks)."""
        for leaving in ordered_blocks:
            self._give_back(leaving)
