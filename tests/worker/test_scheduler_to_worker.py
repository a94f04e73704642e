"""What the scheduler knows of a row is what Model Runner V1 knows of it, after every step.

vLLM's own scheduler and its own ``_update_states``; V2 is in ``tests/kernels``.
"""

from __future__ import annotations

import collections
from typing import Any

import pytest
from scheduler_steps import ROWS, SchedulerSteps
from v1_runner import make_runner, table_row
from vllm.v1.core.sched.output import SchedulerOutput

_totals: collections.Counter[str] = collections.Counter()


class V1Worker:
    """vLLM's V1 runner as far as it keeps rows."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.runner = make_runner(monkeypatch, audited=True, groups=1, rows=ROWS, max_model_len=256)
        self.runner._may_reorder_batch = self._reorder
        self.runner.encoder_cache = {}
        self.held: set[str] = set()

    def execute(self, output: SchedulerOutput) -> None:
        self.runner.kv_cache_config.num_blocks = 0
        output.kv_cache_block_copies = None  # there is no memory here
        self.runner._update_states(output)
        batch = self.runner.input_batch
        assert set(batch.req_id_to_index) == set(output.num_scheduled_tokens)
        self.held -= output.finished_req_ids | (output.preempted_req_ids or set())
        self.held |= self.scheduled()

    def _reorder(self, output: SchedulerOutput) -> None:
        """An attention backend may want the rows in another order."""
        batch = self.runner.input_batch
        if batch.num_reqs > 1:
            batch.swap_states(0, batch.num_reqs - 1)

    def rows(self) -> dict[str, list[int]]:
        batch = self.runner.input_batch
        (table,) = batch.block_table.block_tables
        found = {}
        for name in self.held:
            (ids,) = self.runner.requests[name].block_ids
            if name in batch.req_id_to_index:
                assert table_row(table, batch.req_id_to_index[name]) == ids
            found[name] = ids
        return found

    def scheduled(self) -> set[str]:
        return set(self.runner.input_batch.req_id_to_index)


@pytest.mark.parametrize("mode", ["default", "live/65536/0.0", "live/8/0.05", "off/0/0.1"])
@pytest.mark.parametrize("seed", range(6))
def test_rows_after_every_step(
    monkeypatch: pytest.MonkeyPatch, tagma_config: Any, seed: int, mode: str
) -> None:
    worker = V1Worker(monkeypatch)
    steps = SchedulerSteps(seed, tagma_config, worker, v2=False, mode=mode)
    worker.runner.use_async_scheduling = steps.overlapped
    _totals.update(steps.run(150))


def test_the_runs_reach_what_they_claim(monkeypatch: pytest.MonkeyPatch, tagma_config: Any) -> None:
    if not _totals:
        test_rows_after_every_step(monkeypatch, tagma_config, 0, "live/65536/0.0")
    for name in ("preempted", "moved", "idle", "continued", "again", "resets", "empty"):
        assert _totals[name] > 3, (name, _totals)
