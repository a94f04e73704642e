"""Which request comes next: in the order of the trace, or at its times, never before its parent."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence

from vllm_tagma.lab.replay.trace import TraceRequest


class Arrivals:
    """Requests that have not come yet, as indices; times in seconds of the replay's clock.

    ``timed``: a request arrives at its time divided by ``speed``; otherwise all are due at once, in
    the order of the trace. A request with a parent arrives no earlier than the parent ended.
    """

    def __init__(self, requests: Sequence[TraceRequest], *, timed: bool, speed: float) -> None:
        # Traces may begin at any time, before zero as well.
        origin = min(request.arrival for request in requests)
        self._timed = timed
        self._times = [(request.arrival - origin) / speed if timed else 0.0 for request in requests]
        self._children: defaultdict[int, list[int]] = defaultdict(list)
        self._ready: list[tuple[float, int]] = []
        for index, request in enumerate(requests):
            if request.after is None:
                self._ready.append((self._times[index], index))
            else:
                self._children[request.after].append(index)
        heapq.heapify(self._ready)

    def due(self, now: float) -> int | None:
        """Takes the next request that has arrived by ``now``; None if there is none. O(log n)."""
        if not self._ready or self._ready[0][0] > now:
            return None
        return heapq.heappop(self._ready)[1]

    def next_time(self) -> float | None:
        """When the next request arrives; None if all have, or wait for their parents."""
        return self._ready[0][0] if self._ready else None

    def ended(self, index: int, now: float) -> None:
        """Lets the children of a request come. O(children log n)."""
        for child in self._children.pop(index, ()):
            # Without times the trace's order counts: a child is not behind all later roots.
            due = max(self._times[child], now) if self._timed else 0.0
            heapq.heappush(self._ready, (due, child))
