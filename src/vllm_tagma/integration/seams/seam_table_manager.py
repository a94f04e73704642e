"""The seams of what our manager and its observers call of vLLM. How to read an entry: ``seam.py``.

They are called in the middle of serving, on options that few servers set: a change would stop an
engine at its first eviction or event, not at start-up.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_COLLECTOR = "vllm.v1.core.kv_cache_metrics:KVCacheMetricsCollector"
_UTILS = "vllm.v1.core.kv_cache_utils"
_INTERFACE = "vllm.v1.kv_cache_interface"
_POOL = "vllm.v1.core.block_pool:BlockPool"
_OWN_RECORDS = "vLLM's manager is built of parts that can be replaced one by one"

_OBSERVERS = "follows blocks for --kv-cache-metrics (observers.py)"
_EVENTS = "makes the KV events that vLLM would (events.py)"
_CALLED: Final[Mapping[str, tuple[str, str]]] = {
    f"{_COLLECTOR}.on_block_allocated": ("(self, block) -> None", _OBSERVERS),
    f"{_COLLECTOR}.on_block_accessed": ("(self, block) -> None", _OBSERVERS),
    f"{_COLLECTOR}.on_block_evicted": ("(self, block) -> None", _OBSERVERS),
    f"{_COLLECTOR}.reset": ("(self) -> None", _OBSERVERS),
    f"{_UTILS}:generate_block_hash_extra_keys": (
        "(request, start_token_idx, end_token_idx, start_mm_idx) "
        "-> tuple[tuple[Any, ...] | None, int]",
        _EVENTS,
    ),
    f"{_UTILS}:maybe_convert_block_hash": ("(hash_bytes) -> ExternalBlockHash", _EVENTS),
    f"{_UTILS}:to_event_extra_keys": (
        "(extra_keys) -> list[tuple[Any, ...] | None] | None",
        _EVENTS,
    ),
    f"{_INTERFACE}:get_kv_cache_spec_kind": ("(kv_cache_spec) -> KVCacheSpecKind", _EVENTS),
    f"{_INTERFACE}:get_kv_cache_spec_sliding_window": ("(kv_cache_spec) -> int | None", _EVENTS),
    "vllm.v1.metrics.stats:PrefixCacheStats.record": (
        "(self, num_tokens, num_hits, preempted, hits_by_source=None) -> None",
        "counts hits as vLLM's manager does (manager.py)",
    ),
    "vllm.v1.metrics.stats:BaseCacheStats.reset": (
        "bool = False",
        "tells that the prefix cache was emptied (manager.py)",
    ),
}

_STORED = (
    "(block_hashes=, parent_block_hash=, token_ids=, block_size=, lora_id=, medium=, lora_name=, "
    "extra_keys=, group_idx=, session_id={new})"
)

MANAGER_SEAMS: Final[tuple[Seam, ...]] = (
    *(
        Seam(
            target=target,
            kind="contract",
            room="scheduler",
            why=why,
            expected=expected,
            remove_when=_OWN_RECORDS,
        )
        for target, (expected, why) in _CALLED.items()
    ),
    Seam(
        target=f"{_POOL}._build_block_stored_event",
        callee="BlockStored",
        kind="contract",
        room="scheduler",
        why="what vLLM puts into an event, ours must hold too (events.py); tokens that a hash "
        "looks ahead at come with drafts only, which are refused",
        expected=_STORED.format(new=""),
        changed={"0.33": _STORED.format(new=", lookahead_token_ids=")},
        remove_when=_OWN_RECORDS,
    ),
    Seam(
        target=f"{_POOL}._emit_block_removed_events",
        callee="BlockRemoved",
        kind="contract",
        room="scheduler",
        why="the same, of a block that leaves",
        expected="(block_hashes=, medium=, group_idx=)",
        remove_when=_OWN_RECORDS,
    ),
)
