"""A real engine whose requests are preempted: every slot it writes equals the block table's."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from vllm_tagma.lab.bench.tiny_model import write_tiny_model

pytest.importorskip("vllm")

REQUESTS = 6
PROMPT_TOKENS = 61
OUTPUT_TOKENS = 60


@pytest.mark.engine
def test_every_slot_of_an_engine_equals_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM, SamplingParams

    write_tiny_model(tmp_path, max_position_embeddings=1024, rope_theta=10000.0)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        load_format="dummy",
        dtype="float32",
        max_model_len=256,
        enforce_eager=True,
        block_size=32,
        # 13 usable blocks for 6 requests that grow to 4 blocks each: some are preempted.
        num_gpu_blocks_override=14,
        kv_cache_memory_bytes=64 << 20,
        max_num_seqs=8,
        max_num_batched_tokens=256,
        worker_cls="vllm_tagma.integration.worker_v1.TagmaCPUWorker",
        additional_config={"kv_cache_backend": "paged", "tagma": {"debug_slots": True}},
    )
    core: Any = llm.llm_engine.engine_core
    scheduler = core.engine_core.scheduler
    preempted: list[str] = []
    preempt = scheduler._preempt_request

    def recording_preempt(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.request_id)
        return preempt(request, *args, **kwargs)

    scheduler._preempt_request = recording_preempt
    sampling = SamplingParams(
        max_tokens=OUTPUT_TOKENS, ignore_eos=True, detokenize=False, temperature=0
    )

    def generate() -> list[list[int]]:
        prompts = [
            {"prompt_token_ids": [(i % 50) + 3 for i in range(PROMPT_TOKENS - 1)] + [j + 3]}
            for j in range(REQUESTS)
        ]
        outputs = llm.generate(prompts, sampling, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    first, second = generate(), generate()  # the second run hits the prefix cache
    assert preempted, "the pool is meant to be too small"
    assert all(len(tokens) == OUTPUT_TOKENS for tokens in first)
    assert first == second

    (counters,) = llm.collective_rpc("slot_audit_counters")
    # The last output token is never written, nor are cached prompt tokens, but all others are.
    assert counters["slots"] >= 2 * REQUESTS * (OUTPUT_TOKENS - 1) + REQUESTS
    assert counters["padded"] == 0
    assert counters["batches"] > OUTPUT_TOKENS

    (runner_type, table_types) = llm.collective_rpc(_types)[0]
    assert runner_type == "TagmaCPUModelRunner"
    assert table_types == ["TagmaBlockTable"]

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vllm.tagma.worker")
    logger.addHandler(handler)
    try:
        core.shutdown()
    finally:
        logger.removeHandler(handler)
    (summary,) = records
    assert summary.startswith(f"debug_slots: {counters['slots']} slots in")


def _types(worker: Any) -> tuple[str, list[str]]:
    runner = worker.model_runner
    tables = runner.input_batch.block_table.block_tables
    return type(runner).__name__, [type(table).__name__ for table in tables]
