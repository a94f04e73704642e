"""With a KV connector vLLM's schedulers decide the same on both managers, and no transfer is hurt.

Compared as in ``test_scheduler_traces``, while prompts arrive from elsewhere, in the step or later,
in part or not at all, requests are aborted under way, finished ones are kept while they are
fetched, consumers free late (asynchronous scheduling), and both answers to a failed load are given.
Every transfer goes by the block ids that it was told at its start (``connector_trace.py``).
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from connector_trace import ConnectorTrace
from rerun import seed_is_told

SEEDS = {"exact": 72, "idle": 48}
_totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


@pytest.mark.parametrize(
    ("mode", "seed"), [(mode, seed) for mode, count in SEEDS.items() for seed in range(count)]
)
def test_trace(mode: str, seed: int, engine_configs: Any) -> None:
    with seed_is_told("test_connector_traces.py::test_trace", f"{mode}-{seed}"):
        _totals[mode].update(ConnectorTrace(seed, mode=mode, **engine_configs).run())


@pytest.mark.parametrize("mode", ["default", "live/65536/0.0", "live/8/0.05"])
@pytest.mark.parametrize("seed", range(200, 216))
def test_live_moves_hurt_no_transfer(mode: str, seed: int, engine_configs: Any) -> None:
    with seed_is_told(
        "test_connector_traces.py::test_live_moves_hurt_no_transfer", f"{seed}-{mode}"
    ):
        counts = ConnectorTrace(seed, mode=mode, alone=True, **engine_configs).run()
        _totals["live"].update(counts)


@pytest.mark.parametrize("mode", [*SEEDS, "live"])
def test_traces_reach_what_they_claim(mode: str, engine_configs: Any) -> None:
    totals = _totals[mode]
    if not totals:
        chosen = {"mode": "live/65536/0.0", "alone": True} if mode == "live" else {"mode": mode}
        for seed in range(200, 204):
            totals.update(ConnectorTrace(seed, **chosen, **engine_configs).run())
    assert min(totals[name] for name in ("receives", "sends", "finished", "reads", "pinned")) > 0
    if totals["finished"] > 1_000:
        assert min(totals[name] for name in ("loads", "failed", "preempted", "resets")) > 20
        assert (totals["copies"] > 200) == (mode != "exact")
        assert (totals["rows_moved"] > 20) == (mode == "live")
