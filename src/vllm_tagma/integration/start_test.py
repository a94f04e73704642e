"""The self-test of a runner, run once its KV caches are there (``worker/self_test.py``).

vLLM makes the caches before it captures graphs and before it hears of a request; on CUDA it makes
them once more, small ones, while memory is profiled. The test runs each time.
"""

from __future__ import annotations

from typing import Any

from vllm_tagma.config import TagmaConfig
from vllm_tagma.integration.block_copies import BlockCopies
from vllm_tagma.worker.self_test import Check, Subject, run_checks
from vllm_tagma.worker.self_test_host import HOST_CHECKS


def self_test_steps(options: TagmaConfig) -> int | None:
    """Steps whose slots are compared; None for all."""
    if options.self_test == "always":
        return None
    return options.self_test_steps if options.self_test == "start" else 0


def check_v1(runner: Any, options: TagmaConfig, copies: BlockCopies) -> None:
    """Model Runner V1 on a CPU. Raises ``SelfTestError``."""
    if options.self_test == "off":
        return
    tables = runner.input_batch.block_table.block_tables
    subject = Subject(
        device=runner.device,
        block_sizes=[table.block_size for table in tables],
        widths=[table.max_num_blocks_per_req for table in tables],
        rows=runner.max_num_reqs,
        max_tokens=runner.max_num_tokens,
        kv_caches=runner.kv_caches,
        num_blocks=runner.kv_cache_config.num_blocks,
        mover=copies.mover(runner.kv_caches, runner.kv_cache_config.num_blocks),
    )
    run_checks(HOST_CHECKS, subject)


def check_v2(
    runner: Any, options: TagmaConfig, copies: BlockCopies, more: tuple[Check, ...] = ()
) -> None:
    """Model Runner V2. ``more``: checks of what was chosen. Raises ``SelfTestError``."""
    # Triton is not everywhere where V1 is.
    from vllm_tagma.worker.self_test_device import DEVICE_CHECKS, GRAPH_CHECKS

    if options.self_test == "off":
        return
    tables = runner.block_tables
    subject = Subject(
        device=runner.device,
        block_sizes=tables.block_sizes,
        widths=[table.shape[1] for table in tables.input_block_tables],
        rows=tables.max_num_reqs,
        max_tokens=tables.max_num_batched_tokens,
        kv_caches=runner.kv_caches,
        num_blocks=runner.kv_cache_config.num_blocks,
        mover=copies.mover(runner.kv_caches, runner.kv_cache_config.num_blocks),
    )
    graphs = GRAPH_CHECKS if runner.device.type == "cuda" else ()
    run_checks((*DEVICE_CHECKS, *graphs, *more), subject)
