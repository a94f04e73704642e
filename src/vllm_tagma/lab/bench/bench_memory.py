"""Bytes of host memory a block, when every block is in use and published.

Ours: the native pool reports its own arrays; what its Python side holds is traced. vLLM's: traced
by ``tracemalloc``, which sees every Python object. Requests and their hashes exist before tracing
starts and are counted for neither.
"""

from __future__ import annotations

import functools
import gc
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

from vllm_tagma.lab.bench.bench_plan import Effort, Planned
from vllm_tagma.lab.bench.bench_timing import Measure, Sample
from vllm_tagma.lab.bench.schema import OURS

STOCK = "vllm"
NUM_BLOCKS = 65_537  # 65,536 to use, and the null block
REQUESTS = 64


def memory_scenarios(effort: Effort) -> list[Planned]:
    """One scenario; its rounds agree to the byte, so there are two."""
    return [
        Planned(
            name="manager/memory",
            group="manager",
            title="host memory of manager, pool and prefix index, a block",
            unit="bytes/block",
            iterations=1,
            baseline=STOCK,
            target=96.0,
            target_is_limit=True,
            rounds=2,
            note="65,536 blocks, all held by 64 requests and published.",
            open=_open,
        )
    ]


@contextmanager
def _open() -> Iterator[dict[str, Measure]]:
    yield {variant: functools.partial(_measure, variant) for variant in (OURS, STOCK)}


def _measure(variant: str) -> Sample:
    from vllm_tagma.lab.bench import bench_requests

    tokens = (NUM_BLOCKS - 1) // REQUESTS * bench_requests.BLOCK_SIZE
    batch = [
        bench_requests.make_request(f"r{i}", bench_requests.random_tokens(tokens, seed=i))
        for i in range(REQUESTS)
    ]
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        manager = bench_requests.make_manager(variant, NUM_BLOCKS)
        for request in batch:
            bench_requests.admit(manager, request)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    native = manager.pool.stats()["memory_bytes"] if variant == OURS else 0
    return Sample(
        value=(traced + native) / (NUM_BLOCKS - 1),
        counters={"python_bytes": float(traced), "native_bytes": float(native)},
    )
