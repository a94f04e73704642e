"""What the engine core says about its pool: figures for ``/metrics``, warnings for the log.

vLLM asks its scheduler for ``SchedulerStats`` once a step and sends them to one front end. No field
of that class is made for us. ``num_kv_fetch_reqs_by_stage``, a dict from names to counts, is the
one that takes ours without any harm: it is copied as it is by msgspec in both directions, vLLM
reads known names from it, and should our entries ever reach its loggers, all that happens is a
superfluous part of a log line. The candidates that lost are in ``docs/metrics.md``.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable
from typing import Any, Final

from vllm_tagma import metrics
from vllm_tagma._native import Pool

_logger = logging.getLogger("vllm.tagma.stats")

SEND_SECONDS: Final = 0.25
"""Time between two messages while requests run. Scrapers come every few seconds, and a message
costs some thirty times what a step without one does."""

MAP_SECONDS: Final = 1.0
"""Least time between two maps of the pool while requests run."""

MAP_SHARE: Final = 0.001
"""Largest share of the time that maps may take while requests run: they are O(blocks)."""

CAP_SECONDS: Final = 60.0
"""Time between two warnings about the limit of ranges."""


class StatsFeed:
    """Adds the pool's figures to vLLM's statistics, as differences where they are totals.

    Between two messages a step costs a look at the clock. The step that ends the last request
    always sends, so that an idle server shows its true state. ``map_parts``: parts of the pool
    map, 0 for none. Not thread-safe, as the scheduler is not.
    """

    def __init__(
        self, pool: Pool, *, map_parts: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pool = pool
        self._map_parts = map_parts
        self._clock = clock
        self._sent = {counter.key: 0 for counter in metrics.COUNTERS}
        self._sent_parts: list[tuple[int, int]] = []
        self._ended: Counter[int] = Counter()
        self._send_due = self._map_due = -math.inf
        self._cap = CapWatch()

    def request_ends(self, num_ranges: int) -> None:
        """A request ends that holds ``num_ranges`` ranges; 0 if it never got a block."""
        if num_ranges:
            self._ended[num_ranges] += 1

    def add_to(self, scheduler_stats: Any) -> None:
        """Add the figures to a ``SchedulerStats``, if it is time.

        ``None``, when vLLM keeps no statistics, still lets the warnings be given. O(rows), and
        with a map O(blocks).
        """
        now = self._clock()
        idle = self._pool.num_free == self._pool.capacity
        if now < self._send_due and (scheduler_stats is None or not idle):
            return
        self._send_due = now + SEND_SECONDS
        stats = self._pool.stats()
        self._cap.observe(stats, now)
        if scheduler_stats is None:
            return
        message = metrics.Message(
            gauges={key: stats[key] for key in metrics.GAUGE_KEYS},
            added=self._added(stats),
            ended=self._ended,
            parts=self._changed_parts(now, idle=idle),
        )
        self._ended = Counter()
        # A new dict: the scheduler may hand out its own counts.
        scheduler_stats.num_kv_fetch_reqs_by_stage = {
            **scheduler_stats.num_kv_fetch_reqs_by_stage,
            **message.pack(),
        }

    def _added(self, stats: dict[str, int]) -> dict[str, int]:
        added = {}
        for counter in metrics.COUNTERS:
            total, sent = counter.total(stats), self._sent[counter.key]
            if total > sent:
                added[counter.key] = total - sent
                self._sent[counter.key] = total
        return added

    def _changed_parts(self, now: float, *, idle: bool) -> dict[int, tuple[int, int]]:
        if not self._map_parts or (now < self._map_due and not idle):
            return {}
        sent, self._sent_parts = self._sent_parts, self._pool.parts(self._map_parts)
        self._map_due = now + max(MAP_SECONDS, (self._clock() - now) / MAP_SHARE)
        known = len(sent)
        return {
            number: part
            for number, part in enumerate(self._sent_parts)
            if number >= known or part != sent[number]
        }


class CapWatch:
    """Warns when the limit of ranges per request cost something: at once, then once a minute."""

    def __init__(self) -> None:
        self._seen = (0, 0)
        self._due = -math.inf

    def observe(self, stats: dict[str, int], now: float) -> None:
        """Compare ``Pool.stats()`` with what was warned of; ``now`` in seconds."""
        totals = (stats["cap_evictions"], stats["cap_refusals"])
        if totals == self._seen or now < self._due:
            return
        evictions, refusals = (new - old for new, old in zip(totals, self._seen, strict=True))
        self._seen, self._due = totals, now + CAP_SECONDS
        _logger.warning(
            "The pool is fragmented: since the last such line the limit of ranges per request "
            "evicted cached blocks out of order %d times and held requests back %d times although "
            "enough blocks were free (%d holes, the largest of %d blocks). Consider "
            "--tagma-compaction live, or fewer requests at a time with --max-num-seqs.",
            evictions,
            refusals,
            stats["holes"],
            stats["largest_hole_blocks"],
        )
