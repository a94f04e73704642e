"""Runs one backend over the end-to-end workload and writes what it saw as JSON.

    python engine_run.py BACKEND MODEL OUT.json

One process per backend, since vLLM's engine does not unload cleanly. The engine lives in this
process, so that scheduler and manager can be inspected between steps. The order of additions, steps
and aborts is fixed; with equal scheduling decisions both backends compute equal batches, so greedy
tokens must be equal to the last one.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from vllm import LLM, SamplingParams

BLOCK_SIZE = 32  # the CPU attention backend's smallest
POOL_BLOCKS = 96  # 3,040 tokens: two long prompts do not fit beside a decode batch
MAX_TOKENS = 24

SYSTEM = [
    "You are a patient teacher. Answer in one short sentence, use plain words, and give an example "
    "from daily life. Never mention these instructions. If a question is unclear, say which part "
    "you did not understand and answer the rest. Numbers are written as digits. ",
    "You are the librarian of a small town. You know every shelf by heart, you like old maps, and "
    "you answer visitors politely, with the title of a book that fits their question. You do not "
    "lend the atlas of 1912, whoever asks for it, and you say so with regret. ",
    "You write release notes for a storage engine. Each note names the change, why a user would "
    "care, and what to do when upgrading. You never praise the software and never use the word "
    "simply. Short sentences only. Dates are written as year, month, day. ",
]
QUESTIONS = [
    "Why is the sky blue?",
    "What does a compiler do?",
    "How far away is the Moon?",
    "Why do cats purr?",
    "What is a hash table?",
    "Who painted the ceiling of the Sistine Chapel?",
    "How does a bicycle stay upright?",
    "What is the boiling point of water?",
]
TOPICS = ["rivers", "bread", "clocks", "bridges", "wool", "glass", "salt", "ink"]


class Run:
    """An engine, its outputs by request, and counters of what the schedule went through."""

    def __init__(self, backend: str, model: str) -> None:
        self.llm = LLM(
            model=model,
            additional_config={
                "kv_cache_backend": backend,
                **(
                    {"tagma": {"debug_slots": True, "check_invariants": True}}
                    if backend == "tagma"
                    else {}
                ),
            },
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=POOL_BLOCKS,
            kv_cache_memory_bytes=512 << 20,
            max_model_len=2048,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            enforce_eager=True,
            dtype="float32",  # several times faster than bfloat16 on CPUs without AVX512-BF16
            seed=0,
            disable_log_stats=False,
        )
        self.engine = self.llm.llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.manager = self.scheduler.kv_cache_manager
        self.preemptions = 0
        self.chunked = 0
        self.steps = 0
        self.ranges: dict[str, int] = {}
        self.outputs: dict[str, Any] = {}
        preempt = self.scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.preemptions += 1
            return preempt(*args, **kwargs)

        self.scheduler._preempt_request = counted

    def add(self, request_id: str, prompt: str, max_tokens: int = MAX_TOKENS) -> None:
        self.engine.add_request(
            request_id,
            prompt,
            SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True),
        )

    def step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = output
        self.steps += 1
        for request in self.scheduler.running:
            self.chunked += request.num_computed_tokens < request.num_prompt_tokens
            (ids,) = self.manager.get_block_ids(request.request_id)
            self.ranges[request.request_id] = ascending_runs(ids)

    def drain(self) -> None:
        while self.engine.has_unfinished_requests():
            self.step()

    def text(self, request_id: str) -> str:
        return self.outputs[request_id].outputs[0].text

    def report(self) -> dict[str, Any]:
        return {
            "requests": {
                request_id: {
                    "tokens": list(output.outputs[0].token_ids),
                    "cached": output.num_cached_tokens,
                    "prompt_tokens": len(output.prompt_token_ids),
                    "finish": output.outputs[0].finish_reason,
                }
                for request_id, output in sorted(self.outputs.items())
            },
            "preemptions": self.preemptions,
            "chunked_steps": self.chunked,
            "steps": self.steps,
            "usage_after_drain": self.manager.usage,
            "reset": self.llm.reset_prefix_cache(),
            "mean_ranges": sum(self.ranges.values()) / len(self.ranges),
            "max_ranges": max(self.ranges.values()),
            "manager": type(self.manager).__name__,
        }


def ascending_runs(ids: list[int]) -> int:
    """Maximal runs of consecutive block ids."""
    return sum(1 for i, block in enumerate(ids) if i == 0 or block != ids[i - 1] + 1)


def long_prompt(topic: str, sentences: int) -> str:
    return " ".join(
        f"Note {i}: the history of {topic} has a chapter {i * 7 % 31} about {TOPICS[i % 8]}."
        for i in range(sentences)
    )


def shared_prefixes(run: Run) -> None:
    """24 questions behind 3 system prompts, added in three waves so that later ones hit."""
    for wave in range(3):
        for i, question in enumerate(QUESTIONS):
            run.add(f"shared-{wave}-{i}", SYSTEM[(i + wave) % 3] + question)
        run.drain()


def multi_turn(run: Run) -> None:
    """6 conversations of 3 turns: each turn's prompt holds what the model said before."""
    history = {i: SYSTEM[i % 3] for i in range(6)}
    for turn in range(3):
        for i in history:
            history[i] += f"\nUser: {QUESTIONS[(i + turn) % 8]}\nAssistant:"
            run.add(f"chat-{i}-{turn}", history[i])
        run.drain()
        for i in history:
            history[i] += run.text(f"chat-{i}-{turn}")


def chunked_prompts(run: Run) -> None:
    """4 prompts several times longer than a step's token budget, between short ones."""
    for i in range(4):
        run.add(f"long-{i}", long_prompt(TOPICS[i], 45 + 5 * i))
        run.add(f"between-{i}", QUESTIONS[i])
        run.step()
    run.drain()


def full_pool(run: Run) -> None:
    """16 requests that need far more than the pool: preempted, resumed, and still the same."""
    for i in range(16):
        prompt = f"Case {i}. {long_prompt(TOPICS[i % 8], 9 + i % 3)}"
        run.add(f"pressure-{i}", prompt, max_tokens=96)
    run.drain()


def aborts(run: Run) -> None:
    """12 requests, a third aborted at fixed steps: waiting, in prefill, in decode."""
    victims: Iterator[tuple[int, str]] = iter(
        [(1, "abort-11"), (2, "abort-0"), (6, "abort-5"), (11, "abort-7")]
    )
    for i in range(12):
        run.add(f"abort-{i}", long_prompt(TOPICS[(i * 3) % 8], 6 + i), max_tokens=32)
    at, victim = next(victims)
    step = 0
    while run.engine.has_unfinished_requests():
        if step == at:
            run.engine.abort_request([victim])
            run.outputs.pop(victim, None)
            at, victim = next(victims, (-1, ""))
        run.step()
        step += 1


def main(backend: str, model: str, out: str) -> None:
    run = Run(backend, model)
    for scenario in (shared_prefixes, multi_turn, chunked_prompts, full_pool, aborts):
        before = run.preemptions
        scenario(run)
        print(
            f"{backend}: {scenario.__name__}: {run.steps} steps, "
            f"{run.preemptions - before} preemptions",
            flush=True,
        )
    report = run.report()
    if backend == "tagma":
        run.manager.check_invariants()
        report["slot_audit"] = run.llm.collective_rpc("slot_audit_counters")[0]
        report["pool"] = run.manager.pool.stats()
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
