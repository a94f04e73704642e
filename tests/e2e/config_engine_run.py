"""Runs one backend in several configurations over a workload of token ids; writes what it saw.

    python config_engine_run.py SETTINGS.json OUT.json

``config_case.py`` makes the settings and compares the reports of both backends. The engine core,
and so scheduler, manager and worker, live in the process. Each engine has a fork of this process,
which has imported vLLM (``forked.py``). The workload runs from an empty prefix cache with blocks at
rest, and on tagma once more with rows that are relocated before each step (``block_shuffle.py``).
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from block_shuffle import BlockShuffle, CoreRelocation
from forked import ForkFailure, in_a_fork
from vllm import LLM, SamplingParams
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

_SPEC_METRICS = {
    "vllm:spec_decode_num_drafts": "drafts",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted_tokens",
}


class Engine:
    """The engine, and what a pass over the workload saw."""

    def __init__(self, backend: str, settings: dict[str, Any]) -> None:
        self.tagma = backend == "tagma"
        config: dict[str, Any] = {"kv_cache_backend": backend}
        if self.tagma:
            config["tagma"] = {"debug_slots": True, "check_invariants": True, **settings["tagma"]}
        self.llm = LLM(additional_config=config, **settings["engine"])
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.workload = settings["workload"]
        # On stock nothing is shuffled; the steps of small token budgets are the same.
        self.moves = (CoreRelocation if self.tagma else BlockShuffle)(self.scheduler, seed=3)
        self.moves.stutters = self.workload["stutter"]
        self.moves.spares_cached = self.workload["spares_cached"]
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted
        self.events: list[list[Any]] = []
        if "kv_events_config" in settings["engine"]:
            self.scheduler.kv_event_publisher.publish = self._note_events

    def _note_events(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored):
                kind = [event.kv_cache_spec_kind, event.kv_cache_spec_sliding_window]
                hashes = [str(block) for block in event.block_hashes]
                of = [event.group_idx, str(event.parent_block_hash), hashes]
                self.events.append([self.steps, *of, event.token_ids, *kind])

    # --- steps ------------------------------------------------------------------------------------

    def add(self, name: str, tokens: list[int], max_tokens: int, **request: Any) -> None:
        sampling: dict[str, Any] = {
            "temperature": 0.0,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "detokenize": False,
            **self.workload["sampling"],
        }
        if grammar := self.workload["structured_outputs"]:
            sampling["structured_outputs"] = StructuredOutputsParams(**grammar)
            sampling["ignore_eos"] = False
        self.engine.add_request(
            name, {"prompt_token_ids": tokens}, SamplingParams(**sampling), **request
        )

    def step(self) -> None:
        for output in self.engine.step():
            self.requests[output.request_id] = {
                "tokens": [list(one.token_ids) for one in output.outputs],
                "finish": [one.finish_reason for one in output.outputs],
                "cached": output.num_cached_tokens,
            }
        self.steps += 1
        for request in self.scheduler.running:
            self.chunked += request.num_computed_tokens < request.num_prompt_tokens

    def drain(self, *, aborts: dict[int, str] | None = None) -> None:
        """Until nothing is left; ``aborts`` names requests by the step before which they go."""
        step = 0
        while self.engine.has_unfinished_requests():
            if aborts and step in aborts:
                self.engine.abort_request([aborts[step]])
                self.requests.pop(aborts[step], None)
            self.step()
            step += 1
            assert step < 5_000, "requests wait, nothing runs"

    # --- the workload -----------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """One pass: a prompt in chunks, prefixes shared in time and within a step, aborts, and more
        requests than the pool can hold."""
        self.requests: dict[str, Any] = {}
        self.steps = self.chunked = self.preemptions = 0
        self.moves.restart()
        self.events.clear()
        spec = self._spec_counts()
        work = self.workload
        draw = random.Random(work["seed"])

        def text(length: int) -> list[int]:
            return [draw.randrange(3, work["vocab"]) for _ in range(length)]

        shared, end = text(work["prefix"]), text(8)
        self.add("long", text(work["long"]), 3)
        self.step()
        self.add("first", shared + text(16) + end, 4, **self._more(0))
        self.drain()
        for i in range(4):
            self.add(f"shared-{i}", shared + text(16) + end, work["output"], **self._more(i))
        self.drain(aborts={4: "shared-1"})
        for i in range(work["pressure"]):
            tokens = shared + text(24) + end if i % 2 else text(work["prefix"] // 2)
            self.add(f"pressure-{i}", tokens, work["output"], **self._more(i))
        self.drain(aborts={1: f"pressure-{work['pressure'] - 1}", 7: "pressure-0"})
        turn = self.requests["shared-0"]["tokens"][0]
        self.add("turn", shared + turn, work["output"])
        self.drain()
        seen = {
            "requests": self.requests,
            "steps": self.steps,
            "chunked_steps": self.chunked,
            "preemptions": self.preemptions,
            "usage_after_drain": self.manager.usage,
            "reset": self.llm.reset_prefix_cache(),
            "stored": list(self.events),
            "spec": {name: n - spec[name] for name, n in self._spec_counts().items()},
        }
        if self.tagma:
            self.manager.check_invariants()
            seen["pool"] = self.manager.pool.stats()
        return seen

    def _more(self, i: int) -> dict[str, Any]:
        """What a case adds to its requests, by turns."""
        more: dict[str, Any] = {}
        if adapters := self.workload["adapters"]:
            name, path = adapters[i % len(adapters)]
            if path:
                more["lora_request"] = LoRARequest(name, 1 + i % len(adapters), path)
        if self.workload["priorities"]:
            more["priority"] = -i  # the urgent come last
        return more

    def _spec_counts(self) -> dict[str, int]:
        counts = dict.fromkeys(_SPEC_METRICS.values(), 0)
        for metric in self.llm.get_metrics():
            if name := _SPEC_METRICS.get(metric.name):
                counts[name] += int(metric.value)
        return counts


def run_case(backend: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The report of one engine, which ends with the process."""
    engine = Engine(backend, settings)
    passes = {"rest": engine.run()}
    if settings["moves"]:
        engine.moves.enabled = True
        passes["moving"] = engine.run()
    counts = ("steps", "copies", "rows", "unscheduled")
    report: dict[str, Any] = {
        **passes,
        "manager": type(engine.manager).__name__,
        "moves": {name: getattr(engine.moves, name) for name in counts},
        "groups": [
            [type(group.kv_cache_spec).__name__, len(group.layer_names)]
            for group in engine.scheduler.kv_cache_config.kv_cache_groups
        ],
    }
    if engine.tagma:
        report["slot_audits"] = engine.llm.collective_rpc("slot_audit_counters")
    return report


def main(settings_path: str, out: str) -> None:
    settings = json.loads(Path(settings_path).read_text())
    reports = {}
    for name, case in settings["cases"].items():
        try:
            reports[name] = in_a_fork(run_case, settings["backend"], case)
        except ForkFailure as failure:
            reports[name] = {"error": str(failure)}
    Path(out).write_text(json.dumps(reports, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
