"""Two data-parallel engines behind one front end, on stock and then on tagma, as JSON.

``python engines_run.py MODEL OUT.json``. Requests are pinned to an engine. The front end lives in
this process, where its metrics are read by engine; engines and workers have processes of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

BLOCK_SIZE = 32
SHARED_BLOCKS = 4
POOL_BLOCKS = 24  # the five or six requests that run at once need more


def metrics(engine: str) -> dict[str, float]:
    """The figures of tagma of one engine, by name and state."""
    found: dict[str, float] = {}
    for family in REGISTRY.collect():
        for sample in family.samples:
            labels = sample.labels
            if not sample.name.startswith("vllm:tagma_") or labels["engine"] != engine:
                continue
            if "part" not in labels and "le" not in labels:
                name = sample.name.removeprefix("vllm:tagma_")
                found[f"{name}.{labels['state']}" if "state" in labels else name] = sample.value
    return found


async def workload(llm: Any) -> dict[str, Any]:
    """A prefix on each engine in turn, then its continuations on both at the same time."""
    found: dict[str, Any] = {}

    async def ask(name: str, engine: int, prompt: list[int], max_tokens: int) -> None:
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        asked = {"prompt_token_ids": prompt}
        name = f"{name} on {engine}"
        async for output in llm.generate(asked, sampling, name, data_parallel_rank=engine):
            found[name] = [list(output.outputs[0].token_ids), output.num_cached_tokens]

    shared = [3 + at * 37 % 500 for at in range(SHARED_BLOCKS * BLOCK_SIZE)]
    for engine in (0, 1):
        for turn in ("first", "second"):
            await ask(turn, engine, [*shared, 7, 8, 9], 4)
    jobs = [
        ask(f"{number}", engine, [*shared, 50 + number, *range(3, 60)], 70)
        for number in range(6)
        for engine in ((0, 1) if number < 4 else (1,))
    ]
    await asyncio.gather(*jobs)
    return found


async def run(backend: str, model: str) -> dict[str, Any]:
    options = {"check_invariants": True, "debug_slots": True}
    llm = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            additional_config={
                "kv_cache_backend": backend,
                **({"tagma": options} if backend == "tagma" else {}),
            },
            data_parallel_size=2,
            data_parallel_backend="mp",
            skip_tokenizer_init=True,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=POOL_BLOCKS,
            kv_cache_memory_bytes=16 << 20,
            max_model_len=512,
            max_num_seqs=8,
            max_num_batched_tokens=128,
            enforce_eager=True,
            dtype="float32",  # another batch must not change a greedy token
            seed=0,
        )
    )
    try:
        answers = await workload(llm)
        await asyncio.sleep(0.5)
        return {"answers": answers, "engines": [metrics(engine) for engine in ("0", "1")]}
    finally:
        llm.shutdown()


def main(model: str, out: str) -> None:
    report = {backend: asyncio.run(run(backend, model)) for backend in ("paged", "tagma")}
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
