"""Run a small workload through vLLM's Model Runner V2 under the Triton interpreter, as JSON.

``python v2_engine_run.py BACKEND MODEL OUT``, with ``triton_interpreter`` first on PYTHONPATH. Each
Triton kernel runs as Python, so the workload is as small as it can be and still share prefixes,
send a prompt in chunks, preempt and resume. The engine lives in this process.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

BLOCK_SIZE = 32
POOL_BLOCKS = 13  # 12 usable: six requests that grow to three blocks do not fit
TOKEN_BUDGET = 96  # a step's tokens: the long prompt takes three
SYSTEM = (
    "You are the librarian of a small town. You know every shelf by heart, you like old maps, and "
    "you answer visitors politely, with the title of a book that fits their question."
)
QUESTIONS = ["Why is the sky blue?", "How far is the Moon?", "Why do cats purr?"]
LONG = " ".join(f"Note {i}: chapter {i * 7 % 31} is about rivers." for i in range(16))


def main(backend: str, model: str, out: str) -> None:
    tagma = {"debug_slots": True, "check_invariants": True, "v2_interpreter": True}
    llm = LLM(
        model=model,
        additional_config={
            "kv_cache_backend": backend,
            **({"tagma": tagma} if backend == "tagma" else {}),
        },
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=POOL_BLOCKS,
        kv_cache_memory_bytes=64 << 20,
        max_model_len=384,
        max_num_seqs=6,
        max_num_batched_tokens=TOKEN_BUDGET,
        enforce_eager=True,
        dtype="bfloat16",
        seed=0,
        disable_log_stats=False,
    )
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    runner = engine.model_executor.driver_worker.worker.model_runner
    counts = {"preemptions": 0, "chunked": 0, "steps": 0, "max_ranges": 0}
    outputs: dict[str, Any] = {}
    preempt = scheduler._preempt_request

    def counted(*args: Any, **kwargs: Any) -> Any:
        counts["preemptions"] += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted

    def add(request_id: str, prompt: str, max_tokens: int) -> None:
        parameters = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        engine.add_request(request_id, prompt, parameters)

    def drain() -> None:
        while engine.has_unfinished_requests():
            for output in engine.step():
                outputs[output.request_id] = output
            counts["steps"] += 1
            for request in scheduler.running:
                counts["chunked"] += request.num_computed_tokens < request.num_prompt_tokens
            if backend == "tagma":
                tables = runner.block_tables.ranges
                ranges = [tables.num_ranges(group=0, row=row) for row in range(6)]
                counts["max_ranges"] = max(counts["max_ranges"], *ranges)

    def keep_ids(audit: Any) -> None:
        """Without an audit the rows of ids are not written, as when serving without debug_slots."""
        if backend == "tagma":
            tables = runner.block_tables
            tables.audit, tables.keep_id_rows = audit, audit is not None
            tables.block_tables[0].gpu.zero_()

    audit = getattr(runner.block_tables, "audit", None)
    keep_ids(None)
    add("long", LONG, 3)
    drain()
    for i, question in enumerate(QUESTIONS):
        add(f"shared-{i}", f"{SYSTEM} {question}", 5)
    drain()
    if backend == "tagma":
        assert int(runner.block_tables.block_tables[0].gpu.abs().sum()) == 0
    keep_ids(audit)
    # Six that start with two blocks each and need three: the pool runs dry in decode.
    for i in range(6):
        add(f"pressure-{i}", f"{i}. {SYSTEM} {QUESTIONS[i % 3]}", 22)
    drain()

    report: dict[str, Any] = {
        "requests": {
            name: {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "prompt_tokens": len(output.prompt_token_ids),
            }
            for name, output in sorted(outputs.items())
        },
        **counts,
        "runner": [f"{c.__module__}.{c.__name__}" for c in type(runner).__mro__],
        "block_tables": type(runner.block_tables).__name__,
        "usage_after_drain": scheduler.kv_cache_manager.usage,
    }
    if backend == "tagma":
        scheduler.kv_cache_manager.check_invariants()
        runner.block_tables.ranges.check_invariants()
        report["slot_audit"] = llm.collective_rpc("slot_audit_counters")[0]
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
