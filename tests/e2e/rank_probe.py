"""What each rank of an engine saw, written down by the rank itself.

``install`` runs in a worker process (``LLM.collective_rpc``) and wraps its ``execute_model``: after
each step the rank notes the block ids that its table holds for each request of the batch and a
digest of the KV of their full blocks, and when it began and ended. Nothing is asked of a rank while
steps run, since an answer from every rank would bring them together. A rank can be made slow:
before some steps it sleeps, so that it gets its input late, and after others, so that the next
step is planned and sent while it is not done with the last.
"""

from __future__ import annotations

import random
import time
from typing import Any

import psutil
from kv_digest import kv_digest

from vllm_tagma.errors import InvariantError


def name_of(request_id: str) -> str:
    """vLLM ends a request id with a random suffix."""
    return request_id.rpartition("-")[0]


class RankProbe:
    """The notes of one rank. ``steps``: one entry for each step that scheduled tokens."""

    def __init__(self, worker: Any, slow_rank: int, longest: float, seed: int) -> None:
        self._worker = worker
        self._execute = worker.execute_model
        self._longest = longest if worker.rank == slow_rank else 0.0
        self._random = random.Random(seed)
        self.steps: list[dict[str, Any]] = []
        worker.execute_model = self._execute_and_note

    def _sleep(self) -> None:
        if self._longest and self._random.random() < 0.3:
            time.sleep(self._random.random() * self._longest)

    def _execute_and_note(self, scheduler_output: Any) -> Any:
        self._sleep()
        began = time.monotonic()
        out = self._execute(scheduler_output)
        self._sleep()
        if scheduler_output.total_num_scheduled_tokens:
            self.steps.append({"began": began, **self._rows(scheduler_output)})
            self.steps[-1]["ended"] = time.monotonic()
        return out

    def _rows(self, scheduler_output: Any) -> dict[str, Any]:
        runner = self._worker.model_runner
        batch = runner.input_batch
        (table,) = batch.block_table.block_tables
        ids, digests = {}, {}
        for request_id, row in batch.req_id_to_index.items():
            held = table.block_table.np[row, : table.num_blocks_per_row[row]].tolist()
            new = scheduler_output.num_scheduled_tokens[request_id]
            computed = int(batch.num_computed_tokens_cpu[row]) + new
            ids[name_of(request_id)] = held
            full = held[: computed // table.block_size]
            digests[name_of(request_id)] = kv_digest(runner.kv_caches, full)
        return {"ids": ids, "digests": digests}


def install(worker: Any, slow_rank: int, longest: float, seed: int) -> int:
    """Begin to take notes; the rank ``slow_rank`` sleeps up to ``longest`` seconds at a time."""
    worker = worker.worker  # vLLM's wrapper
    worker.rank_probe = RankProbe(worker, slow_rank, longest, seed)
    return int(worker.rank)


def break_a_law(worker: Any, rank: int) -> None:
    """The next step of that rank finds a row that does not fit."""
    worker = worker.worker

    def refuse(scheduler_output: Any) -> None:
        raise InvariantError("law W2 (row updates): raised by a test")

    if worker.rank == rank:
        worker.model_runner._update_states = refuse


def collect(worker: Any) -> dict[str, Any]:
    """End the notes and hand them over, with the memory of the process in bytes."""
    worker = worker.worker
    probe = worker.rank_probe
    del worker.rank_probe, worker.execute_model  # the method of the class again
    audit = getattr(worker, "slot_audit_counters", lambda: None)()
    tables = worker.model_runner.input_batch.block_table.block_tables
    return {
        "rank": worker.rank,
        "steps": probe.steps,
        "worker": f"{type(worker).__module__}.{type(worker).__name__}",
        "table": type(tables[0]).__name__,
        "slot_audit": audit,
        "rss": psutil.Process().memory_info().rss,
    }
