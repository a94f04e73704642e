"""Our metrics beside vLLM's own, in the process that serves ``/metrics``.

vLLM has an entry point for loggers, ``vllm.stat_logger_plugins``. It does not fit: the offline
``LLM`` ignores it, it is loaded for paged serving too, and vLLM builds such loggers before its own
Prometheus logger, which then unregisters every metric whose name begins with ``vllm:``. So the one
place that builds all loggers, for the server and for ``LLM``, is wrapped, and ours comes last.

It records first: it takes our entries out of vLLM's statistics before others see them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics import loggers as _loggers

from vllm_tagma import metrics
from vllm_tagma.config import backend_of

_MARK = "__vllm_tagma__"


def install() -> None:
    """Let every ``StatLoggerManager`` of this process record our metrics. Idempotent.

    A manager for a paged engine stays as it was.
    """
    manager = _loggers.StatLoggerManager
    if not hasattr(manager.__init__, _MARK):
        manager.__init__ = _extended(manager.__init__)


def _extended(original: Any) -> Any:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        if backend_of(given["vllm_config"].additional_config) != "tagma":
            return
        for logger in self.stat_loggers:
            if isinstance(logger, _loggers.PrometheusStatLogger):
                self.stat_loggers.insert(0, TagmaStatLogger(logger))
                break

    setattr(__init__, _MARK, True)
    return __init__


class TagmaStatLogger(_loggers.AggregateStatLoggerBase):  # type: ignore[misc]
    """Records the figures of all engines of a front end.

    Built from vLLM's Prometheus logger: the same labels, and the same classes of metrics, which
    under Ray are not those of ``prometheus_client``.
    """

    def __init__(self, prometheus: Any) -> None:
        labels: Mapping[int, list[object]] = prometheus.per_engine_labelvalues
        self._engines = {index: _Engine() for index in labels}
        gauges: dict[str, Any] = {}
        for gauge in metrics.GAUGES:
            metric = gauges.get(gauge.name)
            if metric is None:
                metric = gauges[gauge.name] = prometheus._gauge_cls(
                    name=gauge.name,
                    documentation=gauge.documentation,
                    multiprocess_mode="mostrecent",
                    labelnames=[*_LABELS, *gauge.labels],
                )
            for index, values in labels.items():
                child = metric.labels(*values, *gauge.labels.values())
                self._engines[index].gauges.append((gauge.value, child))
        counters: dict[str, Any] = {}
        for counter in metrics.COUNTERS:
            metric = counters.get(counter.name)
            if metric is None:
                metric = counters[counter.name] = prometheus._counter_cls(
                    name=counter.name,
                    documentation=counter.documentation,
                    labelnames=[*_LABELS, *counter.labels],
                )
            for index, values in labels.items():
                child = metric.labels(*values, *counter.labels.values())
                self._engines[index].counters[counter.key] = child
        ranges = prometheus._histogram_cls(
            name=metrics.REQUEST_RANGES,
            documentation=metrics.REQUEST_RANGES_TEXT,
            buckets=list(metrics.REQUEST_RANGES_BUCKETS),
            labelnames=[*_LABELS],
        )
        self._parts = prometheus._gauge_cls(
            name=metrics.PART_BLOCKS,
            documentation=metrics.PART_BLOCKS_TEXT,
            multiprocess_mode="mostrecent",
            labelnames=[*_LABELS, "state", "part"],
        )
        for index, values in labels.items():
            self._engines[index].request_ranges = ranges.labels(*values)
            self._engines[index].labels = values

    def record(
        self,
        scheduler_stats: Any,
        iteration_stats: Any,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Take our entries out of ``scheduler_stats`` and set the metrics of the engine."""
        del iteration_stats, mm_cache_stats
        if scheduler_stats is None:
            return
        message = metrics.take_message(scheduler_stats.num_kv_fetch_reqs_by_stage)
        engine = self._engines.get(engine_idx)
        if message is None or engine is None:
            return
        for value, gauge in engine.gauges:
            gauge.set(value(message.gauges))
        for key, counter in engine.counters.items():
            counter.inc(message.added.get(key, 0))
        for num_ranges, requests in message.ended.items():
            for _ in range(requests):
                engine.request_ranges.observe(num_ranges)
        for number, part in message.parts.items():
            children = engine.parts.get(number)
            if children is None:
                children = engine.parts[number] = [
                    self._parts.labels(*engine.labels, state, f"{number:02}")
                    for state in metrics.PART_STATES
                ]
            for gauge, blocks in zip(children, part, strict=True):
                gauge.set(blocks)

    def log_engine_initialized(self) -> None:
        """Nothing to say before the first step."""


class _Engine:
    """The children of one engine's labels."""

    def __init__(self) -> None:
        self.labels: list[object] = []
        self.gauges: list[tuple[Any, Any]] = []
        self.counters: dict[str, Any] = {}
        self.request_ranges: Any = None
        self.parts: dict[int, list[Any]] = {}


_LABELS = ("model_name", "engine")
