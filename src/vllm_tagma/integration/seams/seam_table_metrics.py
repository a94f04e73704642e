"""The seams of the metrics. How to read an entry: ``seam.py``."""

from __future__ import annotations

from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_LOGGERS = "vllm.v1.metrics.loggers"
_PROMETHEUS = f"{_LOGGERS}:PrometheusStatLogger.__init__"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_PLUGIN_STATS = "vLLM lets a plugin add figures to SchedulerStats, and loggers for LLM as well"

METRICS_SEAMS: Final[tuple[Seam, ...]] = (
    # ---- the front end ----
    Seam(
        target=f"{_LOGGERS}:StatLoggerManager.__init__",
        kind="patch",
        room="config",
        why="puts our logger first among those of a front end (stat_logger.py)",
        expected="(self, vllm_config, engine_idxs=None, custom_stat_loggers=None, "
        "enable_default_loggers=True, aggregate_engine_logging=False, client_count=1)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target="vllm.v1.engine.async_llm:AsyncLLM.__init__",
        callee="StatLoggerManager",
        kind="contract",
        room="config",
        why="the server builds its loggers through the class that is wrapped",
        expected="(vllm_config=, engine_idxs=, custom_stat_loggers=, enable_default_loggers=, "
        "client_count=, aggregate_engine_logging=)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target="vllm.v1.engine.llm_engine:LLMEngine.__init__",
        callee="StatLoggerManager",
        kind="contract",
        room="config",
        why="so does the offline LLM",
        expected="(vllm_config=, custom_stat_loggers=, enable_default_loggers=, "
        "aggregate_engine_logging=)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=f"{_LOGGERS}:StatLoggerManager.record",
        callee="stat_logger.record",
        kind="contract",
        room="config",
        why="TagmaStatLogger.record takes these arguments, and records before the others",
        expected="(*2, mm_cache_stats=, engine_idx=)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=f"{_LOGGERS}:AggregateStatLoggerBase",
        bases=True,
        kind="subclass",
        room="config",
        why="TagmaStatLogger extends it",
        expected="(StatLoggerBase)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=f"{_LOGGERS}:StatLoggerBase.record",
        kind="subclass",
        room="config",
        why="what TagmaStatLogger does in each step",
        expected="(self, scheduler_stats, iteration_stats, mm_cache_stats=None, engine_idx=0)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=f"{_LOGGERS}:StatLoggerBase.log_engine_initialized",
        kind="subclass",
        room="config",
        why="asked of every logger when an engine is up",
        expected="(self)",
        remove_when=_PLUGIN_STATS,
    ),
    *(
        Seam(
            target=_PROMETHEUS,
            callee=f"self.{name}",
            kind="contract",
            room="config",
            why="our metrics are made by vLLM's classes of metrics, with the same labels",
            expected=expected,
            remove_when=_PLUGIN_STATS,
        )
        for name, expected in (
            (
                "_gauge_cls",
                "(name=, documentation=, labelnames=, multiprocess_mode=) | "
                "(name=, documentation=, multiprocess_mode=, labelnames=)",
            ),
            ("_counter_cls", "(name=, documentation=, labelnames=)"),
            ("_histogram_cls", "(name=, documentation=, buckets=, labelnames=)"),
        )
    ),
    Seam(
        target=_PROMETHEUS,
        callee="unregister_vllm_metrics",
        kind="contract",
        room="config",
        why="it forgets every metric named vllm:..., so ours must be made after it",
        expected="()",
        remove_when=_PLUGIN_STATS,
    ),
    # ---- the statistics that travel ----
    Seam(
        target="vllm.v1.metrics.stats:SchedulerStats.num_kv_fetch_reqs_by_stage",
        kind="contract",
        room="scheduler",
        why="the dict that carries our figures from the engine core to the front end (stats.py)",
        expected="dict[str, int] = field(default_factory=dict)",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=_LOGGERS,
        owner="scheduler_stats.num_kv_fetch_reqs_by_stage",
        kind="contract",
        room="config",
        why="vLLM must read only names that it knows from this dict",
        expected="get",
        remove_when=_PLUGIN_STATS,
    ),
    # ---- the engine core ----
    Seam(
        target=f"{_SCHEDULER}.make_stats",
        kind="subclass",
        room="scheduler",
        why="adds our figures to those of a step (scheduler.py)",
        expected="(self, spec_decoding_stats=None, kv_connector_stats=None, cudagraph_stats=None, "
        "perf_stats=None, ec_connector_stats=None) -> SchedulerStats | None",
        remove_when=_PLUGIN_STATS,
    ),
    Seam(
        target=f"{_SCHEDULER}._free_blocks",
        kind="subclass",
        room="scheduler",
        why="counts the ranges of a request that ends (scheduler.py)",
        expected="(self, request)",
        remove_when="the KV-cache manager learns whether a freed request has ended",
    ),
    Seam(
        target=f"{_SCHEDULER}._free_request",
        callee="self._free_blocks",
        kind="contract",
        room="scheduler",
        why="every request that ends must come by; a preempted one must not",
        expected="(*1)",
        remove_when="the KV-cache manager learns whether a freed request has ended",
    ),
)
