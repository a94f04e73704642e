"""vLLM's V1 runner as far as ``_update_states`` goes, and a scheduler that is plain lists of ids.

The runner has a real input batch with two cache groups and runs vLLM's own ``_update_states``; what
has nothing to do with rows (models, samplers, encoders) is left out. ``PlainScheduler`` makes the
steps: it knows each request's row as a list of ids per group and says what a step did to it, as
vLLM's output and as row updates.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.gpu_input_batch import InputBatch

from vllm_tagma._native import BlockRanges
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.integration.block_table_v1 import TagmaBlockTable, adopt_block_table
from vllm_tagma.integration.row_updates import with_row_updates
from vllm_tagma.integration.worker_v1 import TagmaCPUModelRunner, _requests_of
from vllm_tagma.ranges import encode
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.worker.slot_audit import SlotAudit

GROUPS, ROWS, BLOCK_SIZE, WIDTH = 2, 6, 32, 640


def update_of(name: str, group: int, first: int, row: list[int]) -> RowUpdate:
    """The update that makes a worker's row equal ``row``, from block ``first`` on."""
    return RowUpdate(name, group, first, BlockRanges.from_ids(row[first:]))


def make_runner(
    monkeypatch: pytest.MonkeyPatch,
    *,
    audited: bool,
    groups: int = GROUPS,
    rows: int = ROWS,
    max_model_len: int = 64,
) -> Any:
    """A runner with an empty batch."""
    group = SimpleNamespace(is_last_rank=True)
    monkeypatch.setattr(gpu_model_runner, "get_pp_group", lambda: group)
    runner: Any = object.__new__(TagmaCPUModelRunner)
    batch = InputBatch(
        max_num_reqs=rows,
        max_model_len=max_model_len,
        max_num_batched_tokens=64,
        device=torch.device("cpu"),
        vocab_size=8,
        block_sizes=[BLOCK_SIZE] * groups,
        max_num_blocks_per_req=[WIDTH] * groups,
    )
    runner.__dict__.update(
        block_copies=BlockCopies(),
        requests={},
        input_batch=batch,
        num_prompt_logprobs={},
        encoder_cache={},
        late_interaction_runner=SimpleNamespace(
            on_requests_finished=lambda _: None, register_request=lambda *_: None
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[], num_blocks=0),
        kv_caches=[],
        speculative_config=None,
        is_pooling_model=False,
        uses_mrope=False,
        use_async_spec_decode=False,
        use_async_scheduling=False,
    )
    audit = SlotAudit() if audited else None
    for table in batch.block_table.block_tables:
        adopt_block_table(table, request_of=_requests_of(batch), audit=audit)
    return runner


def table_row(table: TagmaBlockTable, row: int) -> list[int]:
    """The ids of a row in the table; its ranges must say the same."""
    ids = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
    assert table.ranges.ranges(row) == encode(ids), "ids and ranges differ"
    return list(ids)


class PlainScheduler:
    """Requests' rows as lists of ids, and the outputs of steps that change them.

    ``sends``: the row updates that a step carries: ``whole`` (of new, resumed and streamed requests
    and those that sat out), ``grown``, ``moved``.
    """

    def __init__(self, *, sends: frozenset[str] = frozenset({"whole", "grown", "moved"})) -> None:
        self.sends = sends
        self.rows: dict[str, tuple[list[int], ...]] = {}
        self.preempted: set[str] = set()
        self.last_scheduled: set[str] = set()

    def step(
        self,
        *,
        new: dict[str, tuple[list[int], ...]] | None = None,
        resumed: dict[str, tuple[list[int], ...]] | None = None,
        grown: dict[str, tuple[list[int], ...]] | None = None,
        moved: dict[str, tuple[int, int, list[int]]] | None = None,
        idle: tuple[str, ...] = (),
        preempted: tuple[str, ...] = (),
        finished: tuple[str, ...] = (),
    ) -> Any:
        """One output. ``new`` and ``resumed``: whole rows (a known new one is streamed); ``grown``:
        ids to append; ``moved``: (group, first block, ids that take their places); ``idle``: not
        scheduled in this step."""
        new, resumed, grown, moved = new or {}, resumed or {}, grown or {}, moved or {}
        first = {}  # (name, group) -> first block that changed
        for name in finished:
            del self.rows[name]
        for name, (group, at, ids) in moved.items():
            self.rows[name][group][at : at + len(ids)] = ids
            if "moved" in self.sends:
                first[name, group] = at
        for name, more in grown.items():
            for group, ids in enumerate(more):
                # Ids alone cannot extend a row whose move was sent from within.
                if ids and ("grown" in self.sends or (name, group) in first):
                    first.setdefault((name, group), len(self.rows[name][group]))
                self.rows[name][group].extend(ids)
        self.preempted |= set(preempted)
        self.preempted -= set(resumed)
        for name, row in {**new, **resumed}.items():
            self.rows[name] = tuple(list(ids) for ids in row)
        scheduled = [name for name in self.rows if name not in self.preempted and name not in idle]
        cached = [name for name in scheduled if name not in new]
        again = [n for n in cached if n not in self.last_scheduled and n not in resumed]
        if "whole" in self.sends:
            first |= {(n, g): 0 for n in (*new, *resumed, *again) for g in range(GROUPS)}
        output = SchedulerOutput.make_empty()
        output.finished_req_ids = set(finished)
        output.num_scheduled_tokens = dict.fromkeys(scheduled, 1)
        output.total_num_scheduled_tokens = len(scheduled)
        output.scheduled_new_reqs = [
            NewRequestData(
                name, [1], [], SamplingParams(temperature=0), None, self._copy(name), 0, None
            )
            for name in new
        ]
        output.scheduled_cached_reqs = CachedRequestData(
            req_ids=cached,
            resumed_req_ids=set(resumed),
            new_token_ids=[],
            all_token_ids={name: [1] for name in again},
            new_block_ids=[
                self._copy(n)
                if n in resumed
                else tuple(list(ids) for ids in grown[n])
                if n in grown
                else None
                for n in cached
            ],
            num_computed_tokens=[0] * len(cached),
            num_output_tokens=[0] * len(cached),
        )
        self.last_scheduled = set(scheduled)
        updates = [update_of(n, g, at, self.rows[n][g]) for (n, g), at in first.items()]
        return with_row_updates(output, updates)

    def _copy(self, name: str) -> tuple[list[int], ...]:
        return tuple(list(ids) for ids in self.rows[name])

    def check(self, runner: Any) -> None:
        """The worker knows each row as it is: in its own list and, if scheduled, in the tables."""
        batch = runner.input_batch
        assert set(batch.req_id_to_index) == self.last_scheduled
        for name, row in self.rows.items():
            if name in self.preempted:
                continue
            assert runner.requests[name].block_ids == row, name
            for group, table in enumerate(batch.block_table.block_tables):
                assert table.updates == {}
                if name in self.last_scheduled:
                    assert table_row(table, batch.req_id_to_index[name]) == row[group], name
