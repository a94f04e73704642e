"""vLLM's own schedulers, synchronous and asynchronous, decide the same on both managers.

Equal in each step: scheduled token counts, new, resumed, preempted and finished requests, the
number of blocks sent, every output, the cached tokens reported to clients, usage and prefix
statistics, the KV events in content and order. On our side the ids sent add up to the rows. At the
end every request has finished: nothing hangs and nothing is left.

The differences between the backends are listed in ``test_manager_traces``; here only the second can
show, and ``scheduler_trace`` applies to stock what ours does.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from rerun import seed_is_told
from scheduler_trace import SchedulerTrace

SEEDS = 48
_totals: collections.Counter[str] = collections.Counter()


@pytest.mark.parametrize("seed", range(SEEDS))
def test_trace(seed: int, engine_configs: Any) -> None:
    with seed_is_told("test_scheduler_traces.py::test_trace", seed):
        _totals.update(SchedulerTrace(seed, **engine_configs).run())


def test_traces_reach_what_they_claim(engine_configs: Any) -> None:
    totals = _totals or collections.Counter(SchedulerTrace(3, **engine_configs).run(steps=200))
    assert totals["finished"] > 0
    assert totals["cached_tokens"] > 0
    if _totals:
        assert totals["preempted"] > 100
        assert totals["withdrawn"] > 0
        assert totals["resets"] > 20
