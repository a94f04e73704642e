"""Hooks on a manager: a row is read just before it is freed, and calls are timed in some steps.

``free`` is the one call that every request ends with, whether it stopped, was aborted or preempted;
reading there needs no guess at which token is the last. The time that the reading takes is
measured and taken off the step. Steps are timed in CPU time, which a busy machine does not stretch;
calls by the wall clock, whose reading is five times cheaper: most calls take a microsecond.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from time import perf_counter_ns, thread_time_ns
from typing import Any

from vllm_tagma.lab.replay.views import PoolView

TIMED_CALLS = ("get_computed_blocks", "allocate_slots", "free")


@dataclass
class CallTime:
    """Calls of one method that were timed."""

    calls: int = 0
    total_ns: int = 0


class Probe:
    """Records the ranges of requests when they end, and times the manager's calls on demand."""

    def __init__(self, manager: Any, view: PoolView) -> None:
        self._manager = manager
        self._view = view
        self._free = manager.free
        manager.free = self._on_free
        self._timed = {name: self._timer(name) for name in TIMED_CALLS if name != "free"}
        self._timing = False
        self.call_times = {name: CallTime() for name in TIMED_CALLS}
        self.step = 0
        """Number of the step that runs; the driver sets it."""
        self.hit_blocks: dict[str, int] = {}
        """Prefix hit of each running request's last admission; the driver sets it."""
        self.reading_ns = 0
        """Time spent here inside the scheduler since the driver set it to zero."""
        self.steps = array("q")
        self.own = array("q")
        """Ranges in all groups together; ``group_own`` has them by group."""
        self.total = array("q")
        num_groups = len(manager.kv_cache_config.kv_cache_groups)
        self.group_own = [array("q") for _ in range(num_groups)]
        self.group_total = [array("q") for _ in range(num_groups)]

    def time_calls(self, wanted: bool) -> None:
        """Times every call until told otherwise."""
        if wanted == self._timing:
            return
        self._timing = wanted
        for name, call in self._timed.items():
            if wanted:
                setattr(self._manager, name, call)
            else:
                delattr(self._manager, name)

    def _on_free(self, request: Any) -> None:
        begin = thread_time_ns()
        hit = self.hit_blocks.pop(request.request_id, None)
        # Never admitted (aborted while it waited): no row. Preempted: it comes back.
        if hit is not None and request.is_finished():
            rows = self._view.rows(request.request_id, hit)
            self.steps.append(self.step)
            self.own.append(sum(row.own for row in rows))
            self.total.append(sum(row.total for row in rows))
            for group, row in enumerate(rows):
                self.group_own[group].append(row.own)
                self.group_total[group].append(row.total)
        self.reading_ns += thread_time_ns() - begin
        if not self._timing:
            self._free(request)
            return
        begin = perf_counter_ns()
        self._free(request)
        record = self.call_times["free"]
        record.total_ns += perf_counter_ns() - begin
        record.calls += 1

    def _timer(self, name: str) -> Callable[..., Any]:
        call = getattr(self._manager, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = perf_counter_ns()
            result = call(*args, **kwargs)
            record = self.call_times[name]
            record.total_ns += perf_counter_ns() - begin
            record.calls += 1
            return result

        return timed
