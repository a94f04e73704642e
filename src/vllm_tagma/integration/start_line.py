"""The one line of the log that says what an engine was started with, and what is off and why.

People paste it into questions, so it is complete: pool, groups, compaction, versions, and each
thing that somebody could expect and will not get, with the option that decided it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vllm_tagma import versions
from vllm_tagma.config import TagmaConfig, flag_of
from vllm_tagma.copy_budget import CopyBudget

_GIB = 1 << 30


def start_line(
    kv_cache_config: Any,
    options: TagmaConfig,
    *,
    budget: CopyBudget,
    caching: bool,
    stats: bool,
    lost: str | None,
) -> str:
    """The line for one engine.

    ``kv_cache_config``: vLLM's, of the loaded model. ``budget``: of a step's copies. ``caching``,
    ``stats``: whether vLLM keeps a prefix cache and statistics. ``lost``: why less is moved than
    was asked for, None if it is not. O(groups and tensors).
    """
    parts = [
        f"KV-cache backend tagma: {_pool(kv_cache_config)}",
        _groups(kv_cache_config.kv_cache_groups),
        f"alignment {options.alignment}",
        _compaction(options, budget),
        f"vllm-tagma {versions.tagma_version()}",
        f"vLLM {versions.installed_vllm_version()}",
    ]
    off = _off(options, budget, caching=caching, stats=stats, lost=lost)
    line = f"{', '.join(parts)}. Off: {'; '.join(off) or 'nothing'}."
    slow = [name for name in ("debug_slots", "check_invariants") if getattr(options, name)]
    return f"{line} Slow checks that are on: {', '.join(slow)}." if slow else line


def _pool(kv_cache_config: Any) -> str:
    sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.kv_cache_groups]
    tokens = "/".join(str(size) for size in dict.fromkeys(sizes))
    text = f"{kv_cache_config.num_blocks} blocks of {tokens} tokens"
    num_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    return f"{text} in {num_bytes / _GIB:.2f} GiB" if num_bytes else text


def _groups(groups: Sequence[Any]) -> str:
    named = [
        f"{type(group.kv_cache_spec).__name__.removesuffix('Spec')} of "
        f"{len(group.layer_names)} layer{'s' if len(group.layer_names) != 1 else ''}"
        for group in groups
    ]
    return f"{len(groups)} group{'s' if len(groups) != 1 else ''} ({', '.join(named)})"


def _compaction(options: TagmaConfig, budget: CopyBudget) -> str:
    if options.compaction == "off" or not budget.blocks:
        return "compaction off"
    why = "" if budget.why == "copy_budget" else f" ({budget.why})"
    return f"compaction {options.compaction} with up to {budget.blocks} blocks a step{why}"


def _off(
    options: TagmaConfig, budget: CopyBudget, *, caching: bool, stats: bool, lost: str | None
) -> list[str]:
    off = []
    if not caching:
        off.append("prefix caching (--no-enable-prefix-caching, or vLLM's choice for this model)")
    if options.compaction == "off":
        off.append(f"compaction ({flag_of('compaction')} off)")
    elif not options.copy_budget:
        off.append(f"compaction ({flag_of('copy_budget')} 0)")
    elif not budget.blocks:
        off.append(f"compaction (a block is larger than {flag_of('copy_bytes')})")
    elif lost:
        off.append(f"moves of running requests ({lost})")
    elif options.compaction == "idle":
        off.append(f"moves of running requests ({flag_of('compaction')} idle)")
    if not stats:
        off.append("metrics (--disable-log-stats; offline disable_log_stats, true by default)")
    elif not options.pool_map_parts:
        off.append("the map of the pool (tagma.pool_map_parts 0)")
    return off
