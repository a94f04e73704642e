"""Two ranks, one workload on stock and then on tagma with moving blocks and a slow rank, as JSON.

``python ranks_engine_run.py KIND MODEL OUT.json``, KIND ``tensor`` or ``pipeline``. The scheduler
lives in this process and the two workers in their own, behind vLLM's ``mp`` executor. With two
pipeline stages two steps are in flight: the second is planned, and moves blocks, while stages still
run the first.

Stock runs the workload with blocks at rest. Tagma runs it twice, each time with compaction ``live``
in a pool that is too small and a row relocated before every step; in each run another rank is slow.
What each rank did is noted by itself (rank_probe.py).
"""

from __future__ import annotations

import gc
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import rank_probe
from block_shuffle import CoreRelocation
from rank_probe import name_of
from vllm import LLM, SamplingParams

BLOCK_SIZE = 32
POOL_BLOCKS = 18
VOCABULARY = 512
LONGEST_SLEEP = 0.03
PARALLEL: dict[str, dict[str, Any]] = {
    "tensor": {"tensor_parallel_size": 2, "enforce_eager": True},
    # Under enforce_eager vLLM's CPU worker has no buffers for what the second stage receives.
    "pipeline": {
        "pipeline_parallel_size": 2,
        "compilation_config": {"mode": 2, "backend": "eager"},
    },
}


class Engine:
    """One backend, and what its scheduler did."""

    def __init__(self, kind: str, model: str, backend: str) -> None:
        options = {"debug_slots": True, "check_invariants": True, "copy_budget": 64}
        self.llm = LLM(
            model=model,
            additional_config={
                "kv_cache_backend": backend,
                **({"tagma": options} if backend == "tagma" else {}),
            },
            distributed_executor_backend="mp",
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=POOL_BLOCKS,
            kv_cache_memory_bytes=16 << 20,
            max_model_len=512,
            max_num_seqs=6,
            max_num_batched_tokens=96,
            dtype="float32",
            seed=0,
            skip_tokenizer_init=True,
            **PARALLEL[kind],
        )
        self.engine = self.llm.llm_engine
        self.core = self.engine.engine_core.engine_core
        self.scheduler: Any = self.core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.relocation = CoreRelocation(self.scheduler, seed=3)
        self.relocation.enabled = backend == "tagma"
        self.watch = Watch(self.scheduler)

    def add(self, name: str, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        self.engine.add_request(name, {"prompt_token_ids": prompt}, sampling)

    def drain(self, *, abort: dict[int, str]) -> None:
        """To the end; ``abort``: calls of the engine after which a request is aborted."""
        calls = 0
        while self.engine.has_unfinished_requests():
            if calls in abort:
                self.watch.note_freed(abort[calls])
                self.engine.abort_request([abort[calls]])
                self.outputs.pop(abort[calls], None)
            for output in self.engine.step():
                self.outputs[output.request_id] = {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                }
            calls += 1

    def workload(self, *, slow_rank: int) -> dict[str, Any]:
        """Prompts in chunks, shared prefixes, aborts, a pool with too little room."""
        draw = random.Random(7)

        def words(count: int) -> list[int]:
            return [draw.randrange(3, VOCABULARY) for _ in range(count)]

        self.outputs: dict[str, Any] = {}
        self.relocation.restart()
        self.relocation.steps = self.relocation.copies = self.relocation.rows = 0
        self.watch.restart()
        self.llm.collective_rpc(rank_probe.install, args=(slow_rank, LONGEST_SLEEP, 5))
        shared = words(70)
        for i in range(2):
            self.add(f"long-{i}", words(230 + 30 * i), 4)
            self.add(f"first-{i}", shared + words(9), 6)
        self.drain(abort={4: "long-1"})
        for i in range(7):
            self.add(f"pressure-{i}", shared[: 35 * (i % 3)] + words(40 + 11 * i), 30 + 5 * (i % 2))
        self.drain(abort={9: "pressure-2", 14: "pressure-5"})
        for i in range(2):
            self.add(f"again-{i}", shared + words(9), 5)
        self.drain(abort={})
        usage = self.manager.usage
        assert self.llm.reset_prefix_cache()
        return {
            "outputs": self.outputs,
            "ranks": self.llm.collective_rpc(rank_probe.collect),
            "scheduler": self.watch.report(),
            "moves": {n: getattr(self.relocation, n) for n in ("steps", "copies", "rows")},
            "usage": usage,
        }

    def break_a_law(self, rank: int) -> dict[str, Any]:
        """A rank of which vLLM does not hear exceptions meets a bug: how the engine takes it."""
        self.llm.collective_rpc(rank_probe.break_a_law, args=(rank,))
        self.add("last", [5, 6, 7], 4)
        began = time.monotonic()
        try:
            self.drain(abort={})
        except Exception as error:
            return {"error": type(error).__name__, "seconds": time.monotonic() - began}
        return {"error": "", "seconds": time.monotonic() - began}


class Watch:
    """The scheduler's side: rows as they were sent, times, and blocks that changed in flight."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._schedule, scheduler.schedule = scheduler.schedule, self._watched
        self._preempt, scheduler._preempt_request = scheduler._preempt_request, self._preempted
        self.restart()

    def restart(self) -> None:
        self.steps: list[dict[str, Any]] = []
        self.preemptions = self.moved_in_flight = self.reused_in_flight = self.overlaps = 0
        self._freed: set[int] = set()

    def _row(self, request_id: str) -> list[int]:
        (ids,) = self._scheduler.kv_cache_manager.get_block_ids(request_id)
        return list(ids)

    def note_freed(self, name: str) -> None:
        """A request is about to go while a step that writes its blocks may still run."""
        for request in self._scheduler.requests.values():
            if name_of(request.request_id) == name and request.num_in_flight_tokens:
                self._freed.update(self._row(request.request_id))

    def _preempted(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.preemptions += 1
        self.note_freed(name_of(request.request_id))
        return self._preempt(request, *args, **kwargs)

    def _watched(self, *args: Any, **kwargs: Any) -> Any:
        in_flight = {
            r.request_id: self._row(r.request_id)
            for r in self._scheduler.running
            if r.num_in_flight_tokens
        }
        output = self._schedule(*args, **kwargs)
        rows = {name: self._row(name) for name in self._scheduler.requests}
        self.overlaps += bool(in_flight and output.total_num_scheduled_tokens)
        self.moved_in_flight += sum(
            bool(rows[name]) and rows[name][: len(before)] != before
            for name, before in in_flight.items()
        )
        new = {block for name in output.num_scheduled_tokens for block in rows[name]}
        self.reused_in_flight += len(new & self._freed)
        self._freed = set() if not in_flight else self._freed - new
        if output.total_num_scheduled_tokens:
            ids = {name_of(name): rows[name] for name in output.num_scheduled_tokens}
            self.steps.append({"sent": time.monotonic(), "ids": ids})
        return output

    def report(self) -> dict[str, Any]:
        counts = ("preemptions", "moved_in_flight", "reused_in_flight", "overlaps")
        return {"steps": list(self.steps), **{name: getattr(self, name) for name in counts}}


def main(kind: str, model: str, out: str) -> None:
    report: dict[str, Any] = {}
    for backend, slow_ranks in (("paged", (-1,)), ("tagma", (1, 0))):
        engine = Engine(kind, model, backend)
        report[backend] = [engine.workload(slow_rank=rank) for rank in slow_ranks]
        report[f"{backend}_in_flight"] = engine.core.batch_queue_size
        if backend == "tagma":
            report["pool"] = engine.manager.pool.stats()
            if kind == "tensor":  # it takes vLLM ten seconds to give up
                report["broken"] = engine.break_a_law(1)
        engine.core.shutdown()
        del engine
        gc.collect()
    Path(out).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
