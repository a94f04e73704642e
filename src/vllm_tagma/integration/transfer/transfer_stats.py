"""Figures of transfers posted as runs, beside those that vLLM's NIXL connectors keep.

vLLM carries a connector's statistics from the worker to the front end and lets the connector's
class make metrics of them, so these need no way of their own: they are more entries of the same
dict, and more metrics after vLLM's. They work on either KV-cache backend.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import (
    NixlKVConnectorStats,
    NixlPromMetrics,
)
from vllm.v1.metrics.utils import create_metric_per_engine

from vllm_tagma.integration.transfer.run_agent import UNMERGED_REASONS
from vllm_tagma.metrics import NAME_PREFIX

_PREFIX: Final = NAME_PREFIX + "transfer_"

_COUNTERS: Final = {
    "run_transfers": (
        "merged",
        "Number of KV transfers that this worker posted as runs of blocks.",
    ),
    "run_blocks": ("blocks", "Number of KV-cache blocks in transfers that were posted as runs."),
    "run_count": (
        "runs",
        "Number of runs: blocks of a transfer that adjoin on both sides. Divided by the transfers, "
        "the descriptors that a region needs.",
    ),
    "run_descriptors": (
        "descriptors",
        "Number of descriptors posted for runs: one for each run and region.",
    ),
    "run_bytes": ("bytes", "Number of bytes in transfers that were posted as runs."),
    "preparation_seconds": (
        "preparation_seconds",
        "Time it took to describe transfers to NIXL, before vllm:nixl_post_time_seconds begins; "
        "those that were not merged included.",
    ),
}
"""Key in the dict -> name after the prefix, documentation."""

_UNMERGED_KEY: Final = "unmerged_reasons"


class RunStats(NixlKVConnectorStats):  # type: ignore[misc]
    """vLLM's statistics of a worker with ours; also what ``RunAgent`` records into.

    Push transfers are posted by a thread of their own, so recording and taking exclude each other.
    """

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        super().__post_init__()

    def reset(self) -> None:
        super().reset()
        self.data.update({key: [] for key in (*_COUNTERS, _UNMERGED_KEY)})

    def __reduce__(self) -> tuple[Any, ...]:
        return RunStats, (self.data,)  # without the lock: these go from process to process

    def record_runs(self, *, blocks: int, runs: int, descriptors: int, num_bytes: int) -> None:
        values = (1, blocks, runs, descriptors, num_bytes)
        with self._lock:
            for key, value in zip(_COUNTERS, values, strict=False):
                self.data[key].append(value)

    def record_unmerged(self, *, reason: str, descriptors: int) -> None:
        del descriptors  # vLLM's own metric counts them
        with self._lock:
            self.data[_UNMERGED_KEY].append(UNMERGED_REASONS.index(reason))

    def record_preparation(self, seconds: float) -> None:
        with self._lock:
            self.data["preparation_seconds"].append(seconds)

    def clone_and_reset(self) -> RunStats:
        with self._lock:
            taken = RunStats(data=self.data)
            self.reset()
        return taken

    def is_empty(self) -> bool:
        return super().is_empty() and not self.data["preparation_seconds"]

    def reduce(self) -> dict[str, int | float]:
        """vLLM's line for the log, and how many runs the transfers had."""
        reduced: dict[str, int | float] = super().reduce()
        merged = len(self.data["run_transfers"])
        if merged:
            reduced["Avg number of runs"] = round(sum(self.data["run_count"]) / merged, 1)
            reduced["Avg number of blocks"] = round(sum(self.data["run_blocks"]) / merged, 1)
        if self.data[_UNMERGED_KEY]:
            reduced["Num unmerged transfers"] = len(self.data[_UNMERGED_KEY])
        return reduced


class RunPromMetrics(NixlPromMetrics):  # type: ignore[misc]
    """vLLM's metrics of NIXL, then ours, made by the same classes with the same labels."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._run_counters = {
            key: create_metric_per_engine(
                self._counter_cls(
                    name=_PREFIX + name, documentation=documentation, labelnames=self._labelnames
                ),
                self.per_engine_labelvalues,
            )
            for key, (name, documentation) in _COUNTERS.items()
        }
        unmerged = self._counter_cls(
            name=_PREFIX + "unmerged",
            documentation="Number of KV transfers that were posted block by block, as vLLM does, "
            "because they could not be merged.",
            labelnames=[*self._labelnames, "reason"],
        )
        self._unmerged = {
            index: [unmerged.labels(*values, reason) for reason in UNMERGED_REASONS]
            for index, values in self.per_engine_labelvalues.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        super().observe(transfer_stats_data, engine_idx)
        for key, counters in self._run_counters.items():
            counters[engine_idx].inc(sum(transfer_stats_data.get(key, ())))
        for reason in transfer_stats_data.get(_UNMERGED_KEY, ()):
            self._unmerged[engine_idx][reason].inc()
