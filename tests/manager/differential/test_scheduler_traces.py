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


SPECULATING = [
    (method, mode, seed)
    for method in ("ngram", "draft_model", "eagle")
    for mode, seeds in (("exact", range(12)), ("idle", range(20, 26)))
    for seed in seeds
]


@pytest.mark.parametrize(("method", "mode", "seed"), SPECULATING)
def test_trace_with_drafts(
    method: str, mode: str, seed: int, speculating_configs: dict[str, Any]
) -> None:
    """Slots for drafts ahead of the tokens, drafts that are rejected, and, with EAGLE, hits without
    their last block, or hashes that look ahead from vLLM 0.33 on."""
    test = "test_scheduler_traces.py::test_trace_with_drafts"
    with seed_is_told(test, f"{method}-{mode}-{seed}"):
        counts = SchedulerTrace(seed, mode=mode, **speculating_configs[method]).run()
        _totals[f"{method} drafts"].update(counts)


@pytest.mark.parametrize("seed", range(200, 206))
@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_live_moves_lose_nothing_of_drafts(
    method: str, seed: int, speculating_configs: dict[str, Any]
) -> None:
    """Ours alone, rows moving between the steps that write and confirm drafts."""
    test = "test_scheduler_traces.py::test_live_moves_lose_nothing_of_drafts"
    with seed_is_told(test, f"{method}-{seed}"):
        counts = SchedulerTrace(
            seed, mode="live/65536/0.0", alone=True, **speculating_configs[method]
        ).run()
        _totals["live drafts"].update(counts)


@pytest.mark.parametrize("method", ["ngram", "draft_model", "eagle"])
def test_traces_with_drafts_reach_what_they_claim(
    method: str, speculating_configs: dict[str, Any]
) -> None:
    totals = _totals[f"{method} drafts"] or collections.Counter(
        SchedulerTrace(3, **speculating_configs[method]).run(steps=200)
    )
    for count in ("finished", "cached_tokens", "reads", "accepted", "rejected"):
        assert totals[count] > 0, count
    if _totals["live drafts"]:
        assert _totals["live drafts"]["rows_moved"] > 5
        assert totals["preempted"] > 30
