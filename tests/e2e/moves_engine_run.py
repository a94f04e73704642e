"""One engine, one workload twice: at rest and with moving blocks, as JSON.

``python moves_engine_run.py MODEL OUT [core]``. The runner is the one that the environment chooses:
V1, or V2 with ``triton_interpreter`` first on PYTHONPATH, which is slow and so gets a model of two
layers with random weights (MODEL then holds a configuration alone). Scheduler and manager are
vLLM's own, so that both passes make the same decisions; the worker is ours. With ``core`` all three
are ours, with compaction ``live``, and there is one pass, in which the pool moves blocks.

After each step the KV of all full blocks is digested by request: it must not depend on where the
blocks are.
"""

from __future__ import annotations

import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from block_shuffle import BlockShuffle, CoreRelocation
from kv_digest import kv_digest
from vllm import LLM, SamplingParams

V2 = os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1"
WORKER = "worker_v2.TagmaV2CPUWorker" if V2 else "worker_v1.TagmaCPUWorker"
BLOCK_SIZE = 32
POOL_BLOCKS = 15  # six requests that grow to three blocks each do not fit
OUTPUT = 40
SYSTEM = (
    "You are the librarian of a small town. You know every shelf by heart, you like old maps, and "
    "you answer visitors politely, with the title of a book that fits their question."
)
QUESTIONS = ["Why is the sky blue?", "How far is the Moon?", "Why do cats purr?"]
LONG = " ".join(f"Note {i}: chapter {i * 7 % 31} is about rivers." for i in range(12))


class Engine:
    """The engine and what a pass saw."""

    def __init__(self, model: str, *, core: bool) -> None:
        options: dict[str, Any] = {"debug_slots": True, "v2_interpreter": V2}
        if core:
            options.update(check_invariants=True, compaction="live", copy_budget=64)
        self.llm = LLM(
            model=model,
            additional_config={
                "kv_cache_backend": "tagma" if core else "paged",
                "tagma": options,
            },
            **({} if core else {"worker_cls": f"vllm_tagma.integration.{WORKER}"}),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=POOL_BLOCKS,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=384,
            max_num_seqs=6,
            max_num_batched_tokens=96,
            enforce_eager=True,
            dtype="bfloat16" if V2 else "float32",
            seed=0,
            **({"load_format": "dummy", "skip_tokenizer_init": True} if V2 else {}),
        )
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.shuffle = (CoreRelocation if core else BlockShuffle)(self.scheduler, seed=3)
        self.preemptions = 0
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def add(self, name: str, prompt: str, max_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=not V2
        )
        words = [3 + zlib.crc32(word.encode()) % 250 for word in prompt.split()]
        self.engine.add_request(
            name, {"prompt_token_ids": words} if V2 else {"prompt": prompt}, sampling
        )

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
            }
        # vLLM ends a request id with a random suffix.
        running = self.scheduler.running
        self.digests.append({r.request_id.rpartition("-")[0]: self.digest(r) for r in running})

    def digest(self, request: Any) -> str:
        """Of the KV of the request's full blocks, in the first and the last layer."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        caches = (self.runner.kv_caches[0], self.runner.kv_caches[-1])
        return kv_digest(caches, ids[: request.num_computed_tokens // BLOCK_SIZE])

    def drain(self, *, abort: str = "") -> None:
        while self.engine.has_unfinished_requests():
            if abort and len(self.digests) % 9 == 0:
                self.engine.abort_request([abort])
                abort = ""
            self.step()

    def workload(self) -> dict[str, Any]:
        """A prompt in chunks, shared prefixes, an abort, a full pool with preemptions."""
        self.outputs: dict[str, Any] = {}
        self.digests: list[dict[str, str]] = []
        self.preemptions = 0
        self.shuffle.restart()
        self.add("long", LONG, 3)
        self.step()
        for i, question in enumerate(QUESTIONS):
            self.add(f"shared-{i}", f"{SYSTEM} {question}", 5)
        self.drain(abort="shared-1")
        for i in range(6):
            self.add(f"pressure-{i}", f"{i}. {SYSTEM} {QUESTIONS[i % 3]}", OUTPUT)
        self.drain()
        assert self.llm.reset_prefix_cache()
        return {
            "outputs": self.outputs,
            "digests": self.digests,
            "preemptions": self.preemptions,
        }


def main(model: str, out: str, *mode: str) -> None:
    core = mode == ("core",)
    engine = Engine(model, core=core)
    at_rest = None if core else engine.workload()
    engine.shuffle.enabled = True
    moving = engine.workload()
    counts = ("steps", "copies", "cycles", "rows", "unscheduled")
    report = {
        "at_rest": at_rest,
        "moving": moving,
        "moves": {name: getattr(engine.shuffle, name) for name in counts},
        "runner": f"{type(engine.runner).__module__}.{type(engine.runner).__name__}",
        "slot_audit": engine.llm.collective_rpc("slot_audit_counters")[0],
    }
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
