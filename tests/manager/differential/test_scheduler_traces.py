"""vLLM's own schedulers, synchronous and asynchronous, decide the same on both managers.

Equal in each step: scheduled token counts, new, resumed, preempted and finished requests, the
number of blocks sent, every output, the cached tokens reported to clients, usage and prefix
statistics, the KV events in content and order. On our side the ids sent add up to the rows, row
moves included, and a worker that is told nothing else finds the KV that each request wrote. At the
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

SEEDS = {"exact": 48, "idle": 24}
_totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


@pytest.mark.parametrize(
    ("mode", "seed"), [(mode, seed) for mode, count in SEEDS.items() for seed in range(count)]
)
def test_trace(mode: str, seed: int, engine_configs: Any) -> None:
    with seed_is_told("test_scheduler_traces.py::test_trace", f"{mode}-{seed}"):
        _totals[mode].update(SchedulerTrace(seed, mode=mode, **engine_configs).run())


@pytest.mark.parametrize("mode", SEEDS)
def test_traces_reach_what_they_claim(mode: str, engine_configs: Any) -> None:
    totals = _totals[mode] or collections.Counter(
        SchedulerTrace(3, mode=mode, **engine_configs).run(steps=200)
    )
    assert totals["finished"] > 0
    assert totals["cached_tokens"] > 0
    assert totals["reads"] > 0
    if _totals[mode]:
        assert totals["preempted"] > 100
        assert totals["withdrawn"] > 0
        assert totals["resets"] > 20
        assert (totals["copies"] > 1_000) == (mode == "idle")


@pytest.mark.parametrize("mode", ["default", "live/65536/0.0", "live/8/0.05"])
@pytest.mark.parametrize("seed", range(100, 108))
def test_live_moves_lose_nothing(mode: str, seed: int, engine_configs: Any) -> None:
    """Ours alone, since live moves may evict ahead: every request finds the KV that it wrote, all
    finish, and nothing is left."""
    with seed_is_told("test_scheduler_traces.py::test_live_moves_lose_nothing", f"{seed}-{mode}"):
        counts = SchedulerTrace(seed, mode=mode, alone=True, **engine_configs).run()
        assert counts["reads"] > 0
        assert counts["finished"] > 0
        _totals["live"].update(counts)


def test_live_traces_move_rows(engine_configs: Any) -> None:
    totals = _totals["live"] or collections.Counter(
        SchedulerTrace(100, mode="live/65536/0.0", alone=True, **engine_configs).run()
    )
    assert totals["rows_moved"] > 20
