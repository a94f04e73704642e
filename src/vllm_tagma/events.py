"""KV events: what left and what entered the prefix cache, in vLLM's own event types.

Consumers (routers, gateways) replay the stream to know what is resident. One ``BlockStored`` per
call that publishes, one ``BlockRemoved`` per block that leaves, also while a duplicate of it stays,
as in vLLM: consumers count.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVCacheEvent,
)
from vllm.v1.core.kv_cache_utils import (
    generate_block_hash_extra_keys,
    maybe_convert_block_hash,
    to_event_extra_keys,
)
from vllm.v1.kv_cache_interface import get_kv_cache_spec_kind, get_kv_cache_spec_sliding_window

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheSpec
    from vllm.v1.request import Request


class EventLog:
    """Collects the events of one KV-cache group, among those of the others, until the scheduler
    takes them.

    Args:
        block_size: Tokens per block.
        group: Index of the KV-cache group.
        spec_kind: vLLM's name of the group's cache kind.
        sliding_window: Window in tokens, or None.
        lookahead_tokens: Tokens behind a block that its hash covers too (vLLM 0.33, EAGLE-like
            drafts).
        events: The list that all groups of a model append to, in the order of what happens.
    """

    def __init__(
        self,
        *,
        block_size: int,
        group: int,
        spec_kind: str,
        sliding_window: int | None,
        lookahead_tokens: int = 0,
        events: list[KVCacheEvent] | None = None,
    ) -> None:
        self._block_size = block_size
        self._lookahead_tokens = lookahead_tokens
        self._group = group
        self._spec_kind = spec_kind
        self._sliding_window = sliding_window
        self._events = [] if events is None else events

    @classmethod
    def of_groups(
        cls, specs: Iterable[KVCacheSpec], *, lookahead_tokens: int = 0
    ) -> list[EventLog]:
        """The logs of cache groups with these specs; they share one list of events."""
        events: list[KVCacheEvent] = []
        return [
            cls(
                block_size=spec.block_size,
                group=group,
                spec_kind=get_kv_cache_spec_kind(spec).value,
                sliding_window=get_kv_cache_spec_sliding_window(spec),
                lookahead_tokens=lookahead_tokens,
                events=events,
            )
            for group, spec in enumerate(specs)
        ]

    def stored(
        self,
        request: Request,
        first: int,
        last: int,
        spans: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        """Blocks [first, last) of the request are in the cache, or of these only ``spans``. The
        event tells the tokens of all of them, as vLLM's does. O(tokens)."""
        if first >= last:
            return
        kept = range(first, last) if spans is None else [i for span in spans for i in range(*span)]
        size = self._block_size
        hashes = request.block_hashes
        extra_keys = []
        mm_index = 0
        for block in kept:
            keys, mm_index = self._extra_keys(request, block, mm_index)
            extra_keys.append(keys)
        lora = request.lora_request
        self._events.append(
            BlockStored(
                block_hashes=[maybe_convert_block_hash(hashes[i]) for i in kept],
                parent_block_hash=maybe_convert_block_hash(hashes[first - 1]) if first else None,
                token_ids=request.all_token_ids[first * size : last * size],
                block_size=size,
                lora_id=lora.adapter_id if lora else None,
                medium=MEDIUM_GPU,
                lora_name=lora.name if lora else None,
                extra_keys=to_event_extra_keys(extra_keys),
                group_idx=self._group,
                kv_cache_spec_kind=self._spec_kind,
                kv_cache_spec_sliding_window=self._sliding_window,
                session_id=request.session_id,
                **self._lookahead(request, first, last),
            )
        )

    def _extra_keys(self, request: Request, block: int, mm_index: int) -> tuple[Any, int]:
        """What the hash of a block covers beside tokens, and where to look for the next one."""
        start, end = block * self._block_size, (block + 1) * self._block_size
        if not self._lookahead_tokens:
            return generate_block_hash_extra_keys(request, start, end, mm_index)  # type: ignore[no-any-return]
        from vllm.v1.core.kv_cache_utils import generate_lookahead_block_hash_extra_keys

        return generate_lookahead_block_hash_extra_keys(  # type: ignore[no-any-return]
            request, start, end, end + self._lookahead_tokens, mm_index
        )

    def _lookahead(self, request: Request, first: int, last: int) -> dict[str, Any]:
        """The field of an event that vLLM fills where hashes look ahead."""
        if not self._lookahead_tokens:
            return {}
        ends = range(
            (first + 1) * self._block_size, (last + 1) * self._block_size, self._block_size
        )
        tokens = [request.all_token_ids[end : end + self._lookahead_tokens] for end in ends]
        return {"lookahead_token_ids": tokens}

    def removed(self, block_hash: bytes) -> None:
        """One block with this hash left the cache."""
        self._events.append(
            BlockRemoved(
                block_hashes=[maybe_convert_block_hash(block_hash)],
                medium=MEDIUM_GPU,
                group_idx=self._group,
            )
        )

    def cleared(self) -> None:
        """The cache was emptied."""
        self._events.append(AllBlocksCleared())

    def take(self) -> list[KVCacheEvent]:
        """The events since the last call, in order."""
        events = self._events[:]
        self._events.clear()
        return events
