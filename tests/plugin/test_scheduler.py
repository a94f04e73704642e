"""The scheduler classes: our manager inside vLLM's own constructor, or a refusal."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import vllm.v1.core.kv_cache_manager as stock
import vllm.v1.core.sched.scheduler as scheduler_module
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.structured_output import StructuredOutputManager

from vllm_tagma.errors import ConfigError, SeamError, UnsupportedError
from vllm_tagma.integration import scheduler as ours
from vllm_tagma.manager import TagmaKVCacheManager

if TYPE_CHECKING:
    from conftest import ConfigFactory

TAGMA = {"kv_cache_backend": "tagma"}


def _cache(spec: Any = None) -> KVCacheConfig:
    spec = spec or FullAttentionSpec(
        block_size=32, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    group = KVCacheGroupSpec(layer_names=["layer"], kv_cache_spec=spec)
    return KVCacheConfig(num_blocks=16, kv_cache_tensors=[], kv_cache_groups=[group])


def _build(cls: type, config: Any, cache: KVCacheConfig | None = None) -> Any:
    """As ``vllm/v1/engine/core.py`` builds its scheduler."""
    cache = cache or _cache()
    config.cache_config.num_gpu_blocks = cache.num_blocks
    return cls(
        vllm_config=config,
        kv_cache_config=cache,
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=32,
        hash_block_size=32,
    )


@pytest.mark.parametrize(
    ("cls", "base"),
    [(ours.TagmaScheduler, Scheduler), (ours.TagmaAsyncScheduler, AsyncScheduler)],
)
def test_our_manager_is_built_and_the_name_put_back(
    vllm_config: ConfigFactory, cls: type, base: type
) -> None:
    scheduler = _build(cls, vllm_config(additional_config=TAGMA))
    assert isinstance(scheduler, base)
    assert type(scheduler.kv_cache_manager) is TagmaKVCacheManager
    assert scheduler_module.KVCacheManager is stock.KVCacheManager
    assert scheduler.kv_cache_manager.usage == 0.0
    plain = _build(Scheduler, vllm_config())
    assert type(plain.kv_cache_manager) is stock.KVCacheManager


def _logged(vllm_config: ConfigFactory, **changes: Any) -> str:
    """What building a scheduler of ours logs: one line."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    # A child of vLLM's logger, so that vLLM's handlers and level show it without more ado.
    logger = logging.getLogger("vllm.tagma")
    assert logger.isEnabledFor(logging.INFO)
    logger.addHandler(handler)
    try:
        _build(ours.TagmaScheduler, vllm_config(**{"additional_config": TAGMA, **changes}))
    finally:
        logger.removeHandler(handler)
    (line,) = lines
    return line


def test_one_line_says_what_was_started(vllm_config: ConfigFactory) -> None:
    line = _logged(vllm_config)
    assert line.startswith(
        "KV-cache backend tagma: 16 blocks of 32 tokens, 1 group (FullAttention of 1 layer), "
        "alignment 1, compaction live with up to 4096 blocks a step, vllm-tagma "
    )
    assert ", vLLM 0.3" in line
    assert line.endswith(". Off: nothing.")


@pytest.mark.parametrize(
    ("changes", "ending"),
    [
        (
            {"enable_prefix_caching": False},
            "Off: prefix caching (--no-enable-prefix-caching, or vLLM's choice for this model).",
        ),
        ({"compaction": "off"}, "Off: compaction (--tagma-compaction off)."),
        ({"copy_budget": 0}, "Off: compaction (--tagma-copy-budget 0)."),
        ({"compaction": "idle"}, "Off: moves of running requests (--tagma-compaction idle)."),
        ({"pool_map_parts": 0}, "Off: the map of the pool (tagma.pool_map_parts 0)."),
        (
            {"debug_slots": True, "check_invariants": True},
            "Off: nothing. Slow checks that are on: debug_slots, check_invariants.",
        ),
    ],
)
def test_the_line_says_what_is_off_and_why(
    vllm_config: ConfigFactory, changes: dict[str, Any], ending: str
) -> None:
    vllm, tagma = ({}, changes) if "enable_prefix_caching" not in changes else (changes, {})
    line = _logged(vllm_config, additional_config={**TAGMA, "tagma": tagma}, **vllm)
    assert line.endswith(ending)
    assert ("compaction off," in line) == ("Off: compaction" in ending)


def test_the_line_says_why_a_connector_stops_live_moves(
    vllm_config: ConfigFactory, tmp_path: Path
) -> None:
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    overlapped = _logged(
        vllm_config,
        kv_transfer_config=connector,
        pipeline_parallel_size=2,
        distributed_executor_backend="mp",
    )
    assert ", compaction idle with up to 4096 blocks a step," in overlapped
    assert "moves of running requests (--tagma-compaction is idle instead of live: " in overlapped
    plain = _logged(vllm_config, kv_transfer_config=connector)
    assert ", compaction live with up to 4096 blocks a step," in plain
    assert plain.endswith("Off: nothing.")


def test_the_second_gate_sees_the_cache_groups(vllm_config: ConfigFactory) -> None:
    states = MambaSpec(block_size=32, shapes=((2, 2),), dtypes=(torch.float32,))
    with pytest.raises(UnsupportedError, match=r"Mamba.*is MambaSpec"):
        _build(ours.TagmaScheduler, vllm_config(additional_config=TAGMA), _cache(states))
    assert scheduler_module.KVCacheManager is stock.KVCacheManager


def test_the_second_gate_repeats_the_first(vllm_config: ConfigFactory) -> None:
    config = vllm_config(additional_config=TAGMA)
    config.parallel_config.decode_context_parallel_size = 2
    with pytest.raises(UnsupportedError, match="--decode-context-parallel-size is 2"):
        _build(ours.TagmaScheduler, config)


def test_half_a_backend_is_refused(vllm_config: ConfigFactory) -> None:
    name = "vllm_tagma.integration.scheduler.TagmaScheduler"
    alone = vllm_config(scheduler_cls=name)
    with pytest.raises(ConfigError, match=r"does not ask for it.*--kv-cache-backend tagma"):
        _build(ours.TagmaScheduler, alone)
    config = vllm_config(additional_config=TAGMA)
    config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"
    with pytest.raises(ConfigError, match=r"worker_cls is vllm\.v1\.worker\.cpu_worker\.CPUWorker"):
        _build(ours.TagmaScheduler, config)


def test_another_plugins_manager_is_not_overwritten(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Foreign:
        pass

    monkeypatch.setattr(scheduler_module, "KVCacheManager", Foreign)
    with pytest.raises(SeamError, match=r"Foreign.*another plugin.*--kv-cache-backend paged"):
        _build(ours.TagmaScheduler, vllm_config(additional_config=TAGMA))
    assert scheduler_module.KVCacheManager is Foreign


def test_a_paged_engine_built_meanwhile_keeps_vllms_manager(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another thread, while the name stands for ours."""
    ours_config, plain_config = vllm_config(additional_config=TAGMA), vllm_config()
    built: list[Any] = []
    original = TagmaKVCacheManager.__init__

    def build_another(self: Any, *args: Any, **kwargs: Any) -> None:
        monkeypatch.setattr(TagmaKVCacheManager, "__init__", original)
        other = threading.Thread(target=lambda: built.append(_build(Scheduler, plain_config)))
        other.start()
        other.join()
        original(self, *args, **kwargs)

    monkeypatch.setattr(TagmaKVCacheManager, "__init__", build_another)
    scheduler = _build(ours.TagmaScheduler, ours_config)
    assert type(scheduler.kv_cache_manager) is TagmaKVCacheManager
    (plain,) = built
    assert type(plain.kv_cache_manager) is stock.KVCacheManager


def test_a_constructor_that_fails_puts_the_name_back(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Any, *args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no manager today")

    monkeypatch.setattr(TagmaKVCacheManager, "__init__", fail)
    with pytest.raises(RuntimeError, match="no manager today"):
        _build(ours.TagmaScheduler, vllm_config(additional_config=TAGMA))
    assert scheduler_module.KVCacheManager is stock.KVCacheManager


def test_a_scheduler_that_no_longer_uses_the_name_is_noticed(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Scheduler.__init__

    def other_name(
        self: Any,
        vllm_config: Any,
        kv_cache_config: Any,
        structured_output_manager: Any,
        block_size: int,
        **rest: Any,
    ) -> None:
        swapped = scheduler_module.KVCacheManager
        scheduler_module.KVCacheManager = stock.KVCacheManager
        try:
            original(
                self, vllm_config, kv_cache_config, structured_output_manager, block_size, **rest
            )
        finally:
            scheduler_module.KVCacheManager = swapped

    monkeypatch.setattr(Scheduler, "__init__", other_name)
    with pytest.raises(SeamError, match="built KVCacheManager instead of TagmaKVCacheManager"):
        _build(ours.TagmaScheduler, vllm_config(additional_config=TAGMA))


def test_options_reach_the_manager(
    vllm_config: ConfigFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Any] = []
    original = TagmaKVCacheManager.__init__

    def record(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(kwargs["tagma_config"])
        original(self, *args, **kwargs)

    monkeypatch.setattr(TagmaKVCacheManager, "__init__", record)
    config = vllm_config(additional_config={**TAGMA, "tagma": {"check_invariants": True}})
    _build(ours.TagmaScheduler, config)
    assert [c.check_invariants for c in seen] == [True]
