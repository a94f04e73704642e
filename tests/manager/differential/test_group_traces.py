"""vLLM's coordinators and ours make the same decisions where a model has windows or several groups.

The traces of ``manager_trace`` on layouts of cache groups: the comparisons are those of
``test_manager_traces``, in each group, and which blocks of hits, new blocks and rows are null.
Sizes of windows, the retention interval and the tokens in flight that the admission gate assumes
change from trace to trace.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from manager_trace import Layout, run_manager_trace
from rerun import seed_is_told
from scheduler_trace import SchedulerTrace

FULL = None
LAYOUTS = {
    "window": Layout((0,)),
    "full+window": Layout((FULL, 0)),
    "full+2-windows": Layout((FULL, 0, 1)),
    "gpt-oss": Layout((0, FULL)),
    "llama-4": Layout((-1, FULL)),
    "full+chunk+window": Layout((FULL, -1, 0)),
    "gemma-3": Layout((FULL, 0, 0, 0, 0, 0)),
}
SEEDS = {"exact": 200, "idle": 20}
OPERATIONS = 40
"""Manager calls of a trace at least: there are many traces."""


@pytest.mark.parametrize("mode", SEEDS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_traces(layout: str, mode: str) -> None:
    """All seeds of a layout in one test: each takes a few milliseconds."""
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(SEEDS[mode]):
        with seed_is_told("test_group_traces.py::test_traces", f"{mode}-{layout}", seed=seed):
            totals.update(run_manager_trace(seed, mode, LAYOUTS[layout], operations=OPERATIONS))
    least = {"hit": 20, "skipped": 300, "preempt": 10, "refused": 50}
    least["copies"] = 100 if mode == "idle" else 0
    # One group has nothing to lag behind, and chunks lag seldom.
    least["boundary"] = 10 if len(LAYOUTS[layout].windows) > 1 and layout != "llama-4" else 0
    share = SEEDS[mode] / SEEDS["exact"]
    assert {name: totals[name] for name in least if totals[name] < least[name] * share} == {}


SCHEDULED = [
    (layout, mode, seed)
    for layout in LAYOUTS
    for mode, seeds in (("exact", range(3)), ("idle", range(20, 21)))
    for seed in seeds
]
_totals: collections.Counter[str] = collections.Counter()


@pytest.mark.parametrize(("layout", "mode", "seed"), SCHEDULED)
def test_schedulers(layout: str, mode: str, seed: int, engine_configs: Any) -> None:
    """vLLM's own schedulers on both managers, and a worker that reads every window: see
    ``test_scheduler_traces``."""
    with seed_is_told("test_group_traces.py::test_schedulers", f"{layout}-{mode}-{seed}"):
        _totals.update(
            SchedulerTrace(seed, mode=mode, layout=LAYOUTS[layout], **engine_configs).run()
        )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_live_moves_lose_nothing(layout: str, engine_configs: Any) -> None:
    """Ours alone: running rows move in each group, and every window is read as it was written."""
    counts: collections.Counter[str] = collections.Counter()
    for seed, mode in enumerate(("live/65536/0.0", "default", "live/8/0.05"), start=100):
        with seed_is_told("test_group_traces.py::test_live_moves_lose_nothing", layout, seed=seed):
            counts.update(
                SchedulerTrace(
                    seed, mode=mode, alone=True, layout=LAYOUTS[layout], **engine_configs
                ).run()
            )
    assert counts["finished"] > 0
    _totals["rows_moved"] += counts["rows_moved"]


def test_scheduler_traces_reach_what_they_claim(engine_configs: Any) -> None:
    """Behind the traces above; alone it runs one of them."""
    if not _totals:
        layout = LAYOUTS["full+window"]
        counts = SchedulerTrace(3, mode="exact", layout=layout, **engine_configs).run()
        assert min(counts["finished"], counts["cached_tokens"], counts["reads"]) > 0
        return
    for name, least in {"preempted": 30, "cached_tokens": 10_000, "rows_moved": 10}.items():
        assert _totals[name] > least, name
