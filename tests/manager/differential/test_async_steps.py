"""Steps that execute late: up to three are scheduled before the oldest of them runs.

vLLM's asynchronous scheduler decides about step n + 1 while step n runs, so it preempts, aborts,
resets, and gives blocks away under requests whose tokens are not known yet and whose KV is still to
be written. A worker executes the steps in order, so a move that is decided now copies what earlier
steps write first, and whoever gets a freed block writes it after its last owner. The worker here
(``kv_worker.py``) does just that with real copies and reads every context after every step.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from rerun import seed_is_told
from scheduler_trace import Side
from session_trace import SessionTrace
from vllm.v1.core.sched.output import SchedulerOutput

_totals: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(300, 316))
def test_late_steps_decide_as_stock(seed: int, depth: int, engine_configs: Any) -> None:
    with seed_is_told("test_async_steps.py::test_late_steps_decide_as_stock", f"{seed}-{depth}"):
        trace = SessionTrace(seed, mode="idle", depth=depth, **engine_configs)
        _totals["idle"].update(trace.run())


@pytest.mark.parametrize("mode", ["default", "live/65536/0.0", "live/8/0.05"])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("seed", range(400, 406))
def test_late_steps_lose_nothing_to_live_moves(
    seed: int, depth: int, mode: str, engine_configs: Any
) -> None:
    told = f"{seed}-{depth}-{mode}"
    with seed_is_told("test_async_steps.py::test_late_steps_lose_nothing_to_live_moves", told):
        trace = SessionTrace(seed, mode=mode, alone=True, depth=depth, **engine_configs)
        _totals["live"].update(trace.run())


@pytest.mark.parametrize("mode", ["idle", "live"])
def test_traces_reach_what_they_claim(mode: str, engine_configs: Any) -> None:
    if not _totals[mode]:
        test_late_steps_decide_as_stock(300, 2, engine_configs)
        test_late_steps_lose_nothing_to_live_moves(400, 2, "live/65536/0.0", engine_configs)
    totals = _totals[mode]
    for reached in ("finished", "cached_tokens", "reads", "turns", "dropped", "copies"):
        assert totals[reached] > 0, reached
    if mode == "live":
        assert totals["rows_moved"] > 0


def test_copies_that_overtake_a_step_are_noticed(
    engine_configs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What keeps all this right is the order alone: a worker that copies when a step is scheduled,
    not when it runs, loses KV."""
    receive = Side._received

    def too_early(self: Side, output: SchedulerOutput) -> Any:
        step = receive(self, output)
        if self.worker is not None:
            self.worker._copy(step.copies)
            step.copies = []
        return step

    monkeypatch.setattr(Side, "_received", too_early)

    def run() -> None:
        for seed in range(400, 420):
            options = {"mode": "live/65536/0.0", "alone": True, "depth": 1}
            SessionTrace(seed, **options, **engine_configs).run()

    with pytest.raises(AssertionError, match="reads foreign KV"):
        run()
