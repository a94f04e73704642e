"""One engine with a file-based KV connector, as JSON.

``python connector_engine_run.py BACKEND MODEL OUT save|load STORE``. ``save`` writes each prompt's
KV to STORE with vLLM's ``ExampleConnector``; ``load`` finds it there through a ``MultiConnector``
whose first part knows another, empty folder. On the tagma backend parts of running requests' rows
move before each step, far more than compaction moves them.

MODEL holds a configuration alone: the weights are random, the same in each process.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

from kv_digest import kv_digest
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

BLOCK_SIZE = 32
OUTPUT = 24


def _example(folder: Path) -> dict[str, Any]:
    folder.mkdir(exist_ok=True)
    return {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(folder)},
    }


def _transfer(mode: str, store: Path) -> KVTransferConfig:
    if mode == "save":
        return KVTransferConfig(**_example(store))
    parts = [_example(store.with_name(f"{store.name}-empty")), _example(store)]
    return KVTransferConfig(
        kv_connector="MultiConnector",
        kv_role="kv_both",
        kv_connector_extra_config={"connectors": parts},
    )


class Engine:
    """The engine and what it saw."""

    def __init__(self, backend: str, model: str, transfer: KVTransferConfig) -> None:
        tagma = {"debug_slots": True, "check_invariants": True, "compaction": "live"}
        self.llm = LLM(
            model=model,
            additional_config={
                "kv_cache_backend": backend,
                **({"tagma": tagma} if backend == "tagma" else {}),
            },
            kv_transfer_config=transfer,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=64,
            kv_cache_memory_bytes=64 << 20,
            max_model_len=384,
            max_num_seqs=4,
            max_num_batched_tokens=2048,  # the connector saves a prompt in its first step
            enforce_eager=True,
            dtype="float32",
            load_format="dummy",
            skip_tokenizer_init=True,
            seed=0,
        )
        self.engine = self.llm.llm_engine
        self.scheduler: Any = self.engine.engine_core.engine_core.scheduler
        self.runner = self.engine.model_executor.driver_worker.worker.model_runner
        self.outputs: dict[str, Any] = {}
        self.digests: dict[str, str] = {}
        self.copies = self.loaded = 0
        self._random = random.Random(5)
        schedule = self.scheduler.schedule

        def observed(*args: Any, **kwargs: Any) -> Any:
            output = schedule(*args, **kwargs)
            self.copies += len(output.kv_cache_block_copies or ())
            self.loaded += bool(output.has_sync_kv_loads)
            return output

        self.scheduler.schedule = observed
        if backend == "tagma":
            self._relocate_in_steps()

    def _relocate_in_steps(self) -> None:
        manager = self.scheduler.kv_cache_manager
        begin = manager.new_step_starts

        def begin_and_move() -> None:
            begin()
            for row in manager._rows.values():
                first = self._random.randrange(row.held_blocks)
                last = self._random.randint(first + 1, row.held_blocks)
                manager.pool.relocate(row.handle, first, last)

        manager.new_step_starts = begin_and_move

    def run(self) -> None:
        """Prompts of all lengths, some behind a shared prefix, three in turn."""
        rng = random.Random(1)
        shared = [rng.randrange(3, 256) for _ in range(70)]
        for i in range(12):
            own = [rng.randrange(3, 256) for _ in range(rng.randint(70, 200))]
            prompt = (shared if i % 3 == 0 else []) + own
            prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE + 7]
            self.engine.add_request(
                f"r{i}",
                {"prompt_token_ids": prompt},
                SamplingParams(
                    temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, detokenize=False
                ),
            )
            if i % 3 == 2:
                while self.engine.has_unfinished_requests():
                    self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            self.outputs[output.request_id] = list(output.outputs[0].token_ids)
        for request in self.scheduler.running:
            self.digests[request.request_id.rpartition("-")[0]] = self._digest(request)

    def _digest(self, request: Any) -> str:
        """Of the KV of the prompt's full blocks, in each layer."""
        (ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return kv_digest(self.runner.kv_caches, ids[: request.num_prompt_tokens // BLOCK_SIZE])


def main(backend: str, model: str, out: str, mode: str, store: str) -> None:
    engine = Engine(backend, model, _transfer(mode, Path(store)))
    engine.run()
    manager = engine.scheduler.kv_cache_manager
    report = {
        "manager": type(manager).__name__,
        "connector": type(engine.scheduler.connector).__name__,
        "outputs": engine.outputs,
        "digests": engine.digests,
        "copies": engine.copies,
        "steps_that_load": engine.loaded,
        "usage": manager.usage,
        "reset": engine.llm.reset_prefix_cache(),
    }
    Path(out).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(*sys.argv[1:])
