"""The scheduler scenarios: vLLM's own ``schedule()`` and ``update_from_output()``, whole.

The model's outputs are made up: one token for every running request, none of them the last. No
model is loaded and no GPU is needed; what is timed is everything the engine's core does between two
model steps, with our manager and with vLLM's.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter_ns
from typing import Any

from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import BenchError, Measure, Sample
from vllm_tagma.lab.bench.schema import OURS
from vllm_tagma.lab.bench.tiny_model import write_tiny_model

STOCK = "vllm"
GROUP = "scheduler"

RUNNING = (256, 512)
MAX_MODEL_LEN = 8_192
PROMPT_TOKENS = 512
# The CPU platform takes multiples of 32 only; on a GPU the default is 16, which both managers
# reach twice as often the end of a block with.
BLOCK_SIZE = 32
_BACKEND = {OURS: "tagma", STOCK: "paged"}


def scheduler_scenarios(effort: Effort) -> list[Planned]:
    """A decode step at each batch size."""
    return [
        Planned(
            name=f"{GROUP}/step/{running}",
            group=GROUP,
            title=f"schedule() + update_from_output(), {running} running",
            unit="ns/step",
            iterations=effort.calls(64),
            baseline=STOCK,
            target=1.2 if running == 512 else None,
            note=f"Prompts of {PROMPT_TOKENS} tokens, decoding, blocks of {BLOCK_SIZE}.",
            open=functools.partial(_open, running, effort.calls(64)),
        )
        for running in RUNNING
    ]


@contextmanager
def _open(running: int, iterations: int) -> Iterator[dict[str, Measure]]:
    with tempfile.TemporaryDirectory(prefix="tagma-bench-") as folder:
        write_tiny_model(Path(folder))
        engines = {
            variant: _Engine(build_scheduler(variant, Path(folder), running), running)
            for variant in (OURS, STOCK)
        }
        yield {
            variant: functools.partial(engine.measure, iterations)
            for variant, engine in engines.items()
        }


def build_scheduler(variant: str, model: Path, running: int) -> Any:
    """A scheduler as vLLM's engine core builds it for ``--kv-cache-backend``."""
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.structured_output import StructuredOutputManager

    from vllm_tagma.integration.scheduler import TagmaScheduler
    from vllm_tagma.lab.bench.bench_requests import cache_config

    config = EngineArgs(
        model=str(model),
        skip_tokenizer_init=True,
        block_size=BLOCK_SIZE,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=running,
        max_num_batched_tokens=MAX_MODEL_LEN,
        async_scheduling=False,
        additional_config={"kv_cache_backend": _BACKEND[variant]},
    ).create_engine_config()
    num_blocks = running * MAX_MODEL_LEN // BLOCK_SIZE + 1
    config.cache_config.num_gpu_blocks = num_blocks
    kind = TagmaScheduler if variant == OURS else Scheduler
    return kind(
        vllm_config=config,
        kv_cache_config=cache_config(num_blocks, BLOCK_SIZE),
        structured_output_manager=StructuredOutputManager(config),
        include_finished_set=False,
        log_stats=True,
        block_size=BLOCK_SIZE,
        hash_block_size=BLOCK_SIZE,
    )


class _Engine:
    """A scheduler whose model answers at once, filled with a decoding batch."""

    def __init__(self, scheduler: Any, running: int) -> None:
        self.scheduler = scheduler
        self.running = running
        self.generation = 0
        self._fill()

    def measure(self, iterations: int) -> Sample:
        """Nanoseconds a step, over ``iterations`` steps and one to warm up."""
        self._step()
        total = sum(self._step() for _ in range(iterations))
        first = self.scheduler.running[0]
        if first.num_tokens + 2 * iterations > MAX_MODEL_LEN:
            self._refill()
        return Sample(value=total / iterations)

    def _fill(self) -> None:
        """Admits the batch; its prompts are chunked through as many steps as they take."""
        from vllm.sampling_params import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.request import Request

        from vllm_tagma.lab.bench.bench_requests import random_tokens

        init_none_hash(sha256)
        hasher = get_request_block_hasher(BLOCK_SIZE, sha256)
        for number in range(self.running):
            # Lengths differ, so that not all requests need their next block in the same step.
            tokens = random_tokens(PROMPT_TOKENS + number % BLOCK_SIZE, seed=number)
            self.scheduler.add_request(
                Request(
                    request_id=f"{self.generation}-{number}",
                    prompt_token_ids=[token % 256 for token in tokens],
                    sampling_params=SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True),
                    pooling_params=None,
                    block_hasher=hasher,
                )
            )
        while self.scheduler.waiting or self._prefilling():
            self._step()
        if len(self.scheduler.running) != self.running:
            raise BenchError(
                f"{len(self.scheduler.running)} of {self.running} requests run in the benchmark"
            )

    def _prefilling(self) -> bool:
        return any(request.num_output_tokens == 0 for request in self.scheduler.running)

    def _refill(self) -> None:
        from vllm.v1.request import RequestStatus

        names = [request.request_id for request in self.scheduler.running]
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)
        self._step()
        self.scheduler.reset_prefix_cache()
        self.generation += 1
        self._fill()

    def _step(self) -> int:
        from vllm.v1.outputs import ModelRunnerOutput

        scheduler = self.scheduler
        begin = perf_counter_ns()
        output = scheduler.schedule()
        spent = perf_counter_ns() - begin
        names = list(output.num_scheduled_tokens)
        requests = scheduler.requests
        sampled = [[] if requests[name].is_prefill_chunk else [7] for name in names]
        computed = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
        )
        begin = perf_counter_ns()
        scheduler.update_from_output(output, computed)
        return spent + perf_counter_ns() - begin
