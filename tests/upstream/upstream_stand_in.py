"""This package's manager and schedulers under vLLM's names, and a record of what became of them.

vLLM's tests build ``KVCacheManager``, ``Scheduler`` and ``AsyncScheduler`` by the names that they
import. Before any test module is imported, each vLLM module that holds one of these classes gets
ours instead; only in the scheduler's module our scheduler itself puts the manager. The
configurations that the tests write are completed as ``--kv-cache-backend tagma`` would complete
them. Nothing else of either side is changed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from typing import Any
from unittest import mock

import vllm.v1.core.kv_cache_manager as stock_manager
import vllm.v1.core.sched.async_scheduler as stock_async
import vllm.v1.core.sched.scheduler as stock_scheduler
import vllm.v1.engine.core  # noqa: F401  its names are among those that are replaced

from vllm_tagma import support
from vllm_tagma.errors import UnsupportedError
from vllm_tagma.integration import scheduler as ours
from vllm_tagma.manager import TagmaKVCacheManager

# The laws are checked in every step of every scheduler that vLLM's tests drive.
_OPTIONS = {ours.BACKEND_KEY: "tagma", "tagma": {"check_invariants": True}}


class Recorder:
    """Replaces the classes, then counts what is built and listens to what is refused."""

    def __init__(self) -> None:
        self._managers: list[TagmaKVCacheManager] = []
        self._stock_managers = 0
        self._refusals: list[str] = []

    def put_in_place(self) -> None:
        """Replace vLLM's classes in every vLLM module that was imported so far."""
        replaced = {
            stock_manager.KVCacheManager: TagmaKVCacheManager,
            stock_scheduler.Scheduler: ours.TagmaScheduler,
            stock_async.AsyncScheduler: ours.TagmaAsyncScheduler,
        }
        self._watch(stock_manager.KVCacheManager)
        for name, module in list(sys.modules.items()):
            if not name.startswith("vllm."):
                continue
            for attribute, value in list(vars(module).items()):
                if not inspect.isclass(value) or value not in replaced:
                    continue
                if module is stock_scheduler and replaced[value] is TagmaKVCacheManager:
                    continue  # our scheduler refuses a name that is not vLLM's own
                setattr(module, attribute, replaced[value])

    def start_test(self) -> None:
        """Forget the last test."""
        self._managers.clear()
        self._refusals.clear()
        self._stock_managers = 0

    def seen(self) -> dict[str, object]:
        """What the test has built and met so far."""
        return {
            "built": len(self._managers),
            "built_stock": self._stock_managers,
            "refusals": list(dict.fromkeys(self._refusals)),
        }

    def check_invariants(self) -> None:
        """Check the laws of all managers that the test built; raises InvariantError."""
        for manager in self._managers:
            manager.check_invariants()

    def _watch(self, stock_class: type) -> None:
        recorder = self

        def after(cls: type, note):
            build = cls.__init__

            @functools.wraps(build)
            def __init__(self, *args, **kwargs):
                build(self, *args, **kwargs)
                note(self)

            cls.__init__ = __init__

        def built(manager):
            recorder._managers.append(manager)

        def built_stock(manager):
            recorder._stock_managers += 1

        def refused(error):
            recorder._refusals.append(str(error))

        after(TagmaKVCacheManager, built)
        after(stock_class, built_stock)
        after(UnsupportedError, refused)
        for cls in (ours.TagmaScheduler, ours.TagmaAsyncScheduler):
            _complete_configuration(cls)


def _complete_configuration(cls: type) -> None:
    """Let ``cls`` add to its configuration what the backend's flag would have added."""
    build = cls.__init__
    signature = inspect.signature(stock_scheduler.Scheduler.__init__)

    @functools.wraps(build)
    def __init__(self, *args, **kwargs):
        config = signature.bind(self, *args, **kwargs).arguments["vllm_config"]
        config.additional_config = {**config.additional_config, **_OPTIONS}
        parallel = config.parallel_config
        runner = (parallel.worker_cls, bool(config.use_v2_model_runner))
        parallel.worker_cls = ours.WORKERS.get(runner, parallel.worker_cls)
        if not isinstance(config.model_config, mock.NonCallableMock):
            build(self, *args, **kwargs)
            return
        # To whatever is asked of it, a mock says yes; the cache groups beside it are real.
        config.cache_config.enable_mamba_shared_prefix_checkpoint = False
        with _cache_rules_only():
            build(self, *args, **kwargs)

    cls.__init__ = __init__


def _cache_rules_only() -> contextlib.AbstractContextManager[object]:
    """Let the scheduler ask the support matrix about the cache groups alone."""
    ask = support.require_supported

    def require_supported(vllm_config: Any, kv_cache_config: Any = None) -> None:
        ask(None, kv_cache_config)

    return mock.patch.object(support, "require_supported", require_supported)
