"""What vLLM may pass to the manager's constructor: the last gate before a pool is built.

The gates of ``support.py`` refuse with better messages and earlier. This one guards the contract
itself: whoever builds the manager, in whichever way, gets what is served or an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_tagma.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec


def require_served(
    kv_cache_config: KVCacheConfig,
    unknown: Mapping[str, object],
    *,
    scheduler_block_size: int,
    hash_block_size: int | None,
    num_hash_lookahead_tokens: int,
    num_prefill_lookahead: int,
    dcp_world_size: int,
    pcp_world_size: int,
    enable_mamba_shared_prefix_checkpoint: bool,
    alignment: int,
) -> KVCacheSpec:
    """The cache kind of the one group that is served. ``hash_block_size``: None without caching.

    Raises:
        UnsupportedError: an argument that is not known, or a value that is not served.
    """
    if unknown:
        raise UnsupportedError(
            f"vLLM passed {', '.join(sorted(unknown))} to its KV-cache manager, which this version "
            "of vllm-tagma does not know; use --kv-cache-backend paged or a vLLM version that "
            "`tagma doctor` names"
        )
    groups = kv_cache_config.kv_cache_groups
    if len(groups) != 1:
        raise UnsupportedError(
            f"the model has {len(groups)} KV-cache groups, the tagma backend serves 1; "
            "use --kv-cache-backend paged"
        )
    spec = groups[0].kv_cache_spec
    if hash_block_size is not None and hash_block_size != spec.block_size:
        raise UnsupportedError(
            f"hash_block_size={hash_block_size} differs from block_size={spec.block_size}; "
            "drop --prefix-match-unit or use --kv-cache-backend paged"
        )
    for name, value, served in (
        ("scheduler_block_size", scheduler_block_size, spec.block_size),
        ("num_hash_lookahead_tokens", num_hash_lookahead_tokens, 0),
        ("num_prefill_lookahead", max(num_prefill_lookahead, 1), 1),
        ("dcp_world_size", dcp_world_size, 1),
        ("pcp_world_size", pcp_world_size, 1),
        ("enable_mamba_shared_prefix_checkpoint", enable_mamba_shared_prefix_checkpoint, False),
        ("alignment", alignment, 1),
    ):
        if value != served:
            raise UnsupportedError(
                f"{name}={value}: the tagma backend serves {served} only; "
                "use --kv-cache-backend paged"
            )
    return spec
