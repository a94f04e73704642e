"""What vLLM's scheduler knows of a row is what Model Runner V2 knows of it, after every step.

vLLM's own ``finish_requests``, ``add_requests`` and ``update_requests`` over its own request
states; the same runs as those of Model Runner V1 (``tests/worker/test_scheduler_to_worker.py``).
"""

from __future__ import annotations

import collections
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("vllm")

if os.environ["TAGMA_KERNEL_DEVICE"] == "cpu":
    # What vLLM's CPU worker imports first: V2's buffers without pinned memory.
    import vllm.v1.worker.cpu.shm  # noqa: F401

from built_schedulers import engine_config
from scheduler_steps import MAX_BLOCKS, ROWS, SchedulerSteps
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.worker.gpu.states import RequestState

from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.integration.block_tables_v2 import TagmaBlockTables
from vllm_tagma.integration.worker_v2 import TagmaV2CPUModelRunner
from vllm_tagma.ranges import encode
from vllm_tagma.worker.slot_audit import SlotAudit

NOTHING = SimpleNamespace(
    add_request=lambda *_: None, remove_request=lambda *_: None, apply_staged_writes=lambda: None
)


class V2Worker:
    """vLLM's V2 runner as far as it keeps rows."""

    def __init__(self, device: str) -> None:
        place = torch.device(device)
        self.runner: Any = object.__new__(TagmaV2CPUModelRunner)
        self.tables = TagmaBlockTables(
            block_sizes=[16],
            max_num_reqs=2 * ROWS,
            max_num_batched_tokens=256,
            max_num_blocks_per_group=[MAX_BLOCKS],
            device=place,
            keep_id_rows=False,
            audit=SlotAudit(),
            request_of=self.runner._request_of,
        )
        states = RequestState(2 * ROWS, 256, 256, 0, 256, place)
        self.runner.__dict__.update(
            req_states=states,
            block_copies=BlockCopies(interpreted=True),
            block_tables=self.tables,
            model_state=NOTHING,
            lora_state=NOTHING,
            is_last_pp_rank=False,
            kv_cache_config=SimpleNamespace(num_blocks=0),
            kv_caches=[],
            pooling_runner=None,
            pp_handler=None,
            encoder_cache=None,
            prompt_logprobs_worker=None,
            sampler=None,
            adaptive_verification=None,
        )
        self.batch: set[str] = set()
        self.steps = 0

    def execute(self, output: SchedulerOutput) -> None:
        output.kv_cache_block_copies = None  # there is no memory here
        self.runner.finish_requests(output)
        self.runner.add_requests(output)
        self.runner.update_requests(output)
        assert self.tables.updates == [{}]
        self.batch = set(output.num_scheduled_tokens)
        self.steps += 1
        if self.steps % 16 == 0:  # the interpreter is slow
            self.tables.apply_staged_writes()
            self._check_device()

    def _check_device(self) -> None:
        tables = self.tables.ranges.tables.on_host()
        for name, row in self.runner.req_states.req_id_to_index.items():
            ranges = self.tables.ranges.ranges(group=0, row=row)
            count = int(tables.num_ranges[0, row])
            assert count == len(ranges), name
            assert tables.range_start[0, row, :count].tolist() == [start for start, _ in ranges]
            ids = self.rows()[name]
            assert self.tables.block_tables[0].gpu[row, : len(ids)].tolist() == ids

    def rows(self) -> dict[str, list[int]]:
        found = {}
        for name, row in self.runner.req_states.req_id_to_index.items():
            ranges = self.tables.ranges.ranges(group=0, row=row)
            ids = [start + i if start else 0 for start, count in ranges for i in range(count)]
            assert list(encode(ids)) == ranges
            assert int(self.tables.num_blocks.np[0, row]) == len(ids)
            found[name] = ids
        return found

    def scheduled(self) -> set[str]:
        return self.batch & set(self.runner.req_states.req_id_to_index)


def check_rows_after_every_step(
    device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The configuration of a machine without the interpreter; the steps are those for V2.
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    config = engine_config(tmp_path, "tagma")
    totals: collections.Counter[str] = collections.Counter()
    for seed in range(6):
        mode = ("default", "live/65536/0.0")[seed % 2]
        steps = SchedulerSteps(seed, config, V2Worker(device), v2=True, mode=mode)
        totals.update(steps.run(100))
    for name in ("preempted", "moved", "idle", "continued", "again", "resets", "empty"):
        assert totals[name] > 3, (name, totals)
