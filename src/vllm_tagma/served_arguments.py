"""What vLLM may pass to the manager's constructor: the last gate before a pool is built.

The gates of ``support/`` refuse earlier, by the same rules. This one guards the contract itself:
whoever builds the manager, in whichever way, gets what is served or an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_tagma import support
from vllm_tagma.cache_groups import CacheGroups
from vllm_tagma.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig


def require_served(
    kv_cache_config: KVCacheConfig,
    unknown: Mapping[str, object],
    *,
    scheduler_block_size: int,
    hash_block_size: int | None,
    num_prefill_lookahead: int,
    dcp_world_size: int,
    pcp_world_size: int,
    enable_mamba_shared_prefix_checkpoint: bool,
    alignment: int,
    use_eagle: bool,
    max_in_flight_tokens: int,
    max_model_len: int,
) -> CacheGroups:
    """The cache groups that are served. ``hash_block_size``: None without caching.

    Raises:
        UnsupportedError: an argument that is not known, or a value that is not served.
    """
    if unknown:
        raise UnsupportedError(
            f"vLLM passed {', '.join(sorted(unknown))} to its KV-cache manager, which this version "
            "of vllm-tagma does not know; use --kv-cache-backend paged or a vLLM version that "
            "`tagma doctor` names"
        )
    support.require_supported(None, kv_cache_config)
    groups = CacheGroups.of_config(
        kv_cache_config, max_in_flight_tokens=max_in_flight_tokens, max_model_len=max_model_len
    )
    if hash_block_size is not None and hash_block_size != groups.block_size:
        unit = f"{hash_block_size} tokens with a block size of {groups.block_size}"
        support.refuse("prefix-match-unit", unit, option="hash_block_size")
    for rule, name, value, served in (
        ("multi-module-mtp", "num_prefill_lookahead", max(num_prefill_lookahead, 1), 1),
        ("decode-context-parallel", "dcp_world_size", dcp_world_size, 1),
        ("prefill-context-parallel", "pcp_world_size", pcp_world_size, 1),
        (
            "mamba",
            "enable_mamba_shared_prefix_checkpoint",
            enable_mamba_shared_prefix_checkpoint,
            False,
        ),
        ("alignment", "alignment", alignment, 1),
        # Last: the degrees above are factors of it; what is left are sizes of other groups.
        ("cache-groups", "scheduler_block_size", scheduler_block_size, groups.block_size),
        ("cache-groups", "use_eagle", use_eagle and not groups.plain, False),
    ):
        if value != served:
            support.refuse(rule, f"{value}, not {served}", option=name)
    return groups
