"""vLLM's schedulers, built around ``TagmaKVCacheManager``.

vLLM has no factory for its KV-cache manager: ``Scheduler.__init__`` calls a class by its global
name. While that constructor runs, the name stands for our class (``name_swap.py``), so it is built
with vLLM's own arguments and refuses any that it does not know; right after, the type is checked. A
copy of the constructor would have to follow vLLM in every release.

This runs in the engine core, where the cache groups of the loaded model are known, so it is also
the second gate of ``support/``.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from typing import Any

import vllm.v1.core.sched.scheduler as _scheduler_module
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from vllm_tagma import support
from vllm_tagma.class_names import WORKERS
from vllm_tagma.config import BACKEND_KEY, TagmaConfig, backend_of
from vllm_tagma.copy_budget import AUTO, CopyBudget, copy_budget_of
from vllm_tagma.errors import ConfigError, SeamError
from vllm_tagma.integration.copy_rate import copy_rate
from vllm_tagma.integration.name_swap import name_stands_for
from vllm_tagma.integration.row_updates import sent_whole, with_row_updates
from vllm_tagma.integration.seams import require_seams
from vllm_tagma.integration.start_line import start_line
from vllm_tagma.integration.stats import StatsFeed
from vllm_tagma.manager import TagmaKVCacheManager

_logger = logging.getLogger("vllm.tagma.scheduler")


class _ManagerSwap:
    """The constructor that both schedulers share."""

    kv_cache_manager: Any
    connector: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(Scheduler.__init__).bind(self, *args, **kwargs).arguments
        vllm_config, kv_cache_config = given["vllm_config"], given["kv_cache_config"]
        require_seams("scheduler")
        _require_whole_backend(vllm_config)
        support.require_supported(vllm_config, kv_cache_config)
        asked = TagmaConfig.from_sources(vllm_config.additional_config)
        lost = _unordered_moves(vllm_config, asked)
        budget = _budget(kv_cache_config, asked)
        tagma_config = dataclasses.replace(
            asked,
            compaction="idle" if lost else asked.compaction,
            copy_budget=_for_each(budget.blocks, len(kv_cache_config.kv_cache_groups)),
        )
        build = functools.partial(TagmaKVCacheManager, tagma_config=tagma_config)
        with name_stands_for(_scheduler_module, "KVCacheManager", KVCacheManager, build):
            super().__init__(*args, **kwargs)
        if type(self.kv_cache_manager) is not TagmaKVCacheManager:
            raise SeamError(
                f"vLLM built {type(self.kv_cache_manager).__name__} instead of "
                f"TagmaKVCacheManager: it no longer calls KVCacheManager by that name."
            )
        self.kv_cache_manager.connected = self.connector is not None
        self._stats_feed = StatsFeed(
            self.kv_cache_manager.pool, map_parts=tagma_config.pool_map_parts
        )
        line = start_line(
            kv_cache_config,
            dataclasses.replace(tagma_config, copy_budget=asked.copy_budget),
            budget=budget,
            caching=self.kv_cache_manager.enable_caching,
            stats=self.kv_cache_manager.log_stats,
            lost=lost,
        )
        _logger.info("%s", line)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step of vLLM's, with the ranges of the rows that changed (``row_updates.py``)."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        updates = self.kv_cache_manager.take_row_updates(sent_whole(output))
        return with_row_updates(output, updates)

    def _connector_finished(self, request: Any) -> Any:
        """The connector is told the blocks of a request that ended, and may keep them."""
        delay_free, params = super()._connector_finished(request)  # type: ignore[misc]
        if delay_free:
            self.kv_cache_manager.pin_for_sending(request.request_id)
        return delay_free, params

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """vLLM's statistics of this step, with the pool's figures (``stats.py``)."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        self._stats_feed.add_to(stats)
        return stats

    def _free_blocks(self, request: Any) -> None:
        """A request has ended, in whichever way; a preempted one does not come here."""
        for num_ranges in self.kv_cache_manager.num_ranges(request.request_id):
            self._stats_feed.request_ends(num_ranges)
        super()._free_blocks(request)  # type: ignore[misc]


class TagmaScheduler(_ManagerSwap, Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler on ``TagmaKVCacheManager``."""


class TagmaAsyncScheduler(_ManagerSwap, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler on ``TagmaKVCacheManager``."""


def _budget(kv_cache_config: Any, options: TagmaConfig) -> CopyBudget:
    """Blocks that may move in a step, by the options and the device (``copy_budget.py``)."""
    num_bytes = sum(tensor.size for tensor in kv_cache_config.kv_cache_tensors)
    block_bytes = num_bytes // kv_cache_config.num_blocks
    asks = options.compaction != "off" and options.copy_bytes == AUTO and block_bytes > 0
    return copy_budget_of(
        copy_budget=options.copy_budget * len(kv_cache_config.kv_cache_groups),
        copy_bytes=options.copy_bytes,
        block_bytes=block_bytes,
        rate=copy_rate() if asks else None,
    )


def _for_each(blocks: int, groups: int) -> int:
    """The part of a budget that is one group's; the pool adds them up again."""
    return max(blocks // groups, 1) if blocks else 0


def _unordered_moves(vllm_config: Any, options: TagmaConfig) -> str | None:
    """Why running requests must not move here although the options ask for it; None if they may.

    Where steps overlap, a request may end, or have failed to load a block, while the next step has
    been scheduled already and moves it. The connector would name the new blocks before the copy is
    made, or the old ones after vLLM knows the row by its new ones.
    """
    overlapped = vllm_config.max_concurrent_batches > 1
    if vllm_config.kv_transfer_config is None or not overlapped or options.compaction != "live":
        return None
    return (
        "--tagma-compaction is idle instead of live: steps overlap and a KV connector is set, so "
        "blocks may be sent while the next step moves them"
    )


def _require_whole_backend(vllm_config: Any) -> None:
    """Refuse a scheduler class that was set by hand without the rest of the backend.

    Raises:
        ConfigError: ``additional_config`` does not ask for tagma, or the worker is vLLM's own.
    """
    if backend_of(vllm_config.additional_config) != "tagma":
        raise ConfigError(
            f"scheduler_cls is a class of vllm-tagma, but additional_config does not ask for it. "
            f"Add --kv-cache-backend tagma or additional_config={{{BACKEND_KEY!r}: 'tagma'}}."
        )
    worker = vllm_config.parallel_config.worker_cls
    if worker not in WORKERS.values():
        raise ConfigError(
            f"scheduler_cls is a class of vllm-tagma, but worker_cls is {worker}. "
            f"Drop --scheduler-cls and use --kv-cache-backend tagma, which sets both."
        )
