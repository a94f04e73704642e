"""Names of the classes that are chosen by name: ours, and vLLM's that they take the place of.

Strings cross process boundaries, and a process without this package dies on them instead of serving
paged. Which of them are admitted is for ``support/`` to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SCHEDULERS: Final[Mapping[bool, str]] = {
    False: "vllm_tagma.integration.scheduler.TagmaScheduler",
    True: "vllm_tagma.integration.scheduler.TagmaAsyncScheduler",
}
"""Scheduler class by ``scheduler_config.async_scheduling``."""

CPU_WORKER: Final = "vllm.v1.worker.cpu_worker.CPUWorker"
GPU_WORKER: Final = "vllm.v1.worker.gpu_worker.Worker"

WORKERS: Final[Mapping[tuple[str, bool], str]] = {
    (CPU_WORKER, False): "vllm_tagma.integration.worker_v1.TagmaCPUWorker",
    (CPU_WORKER, True): "vllm_tagma.integration.worker_v2.TagmaV2CPUWorker",
    (GPU_WORKER, True): "vllm_tagma.integration.worker_v2.TagmaWorker",
}
"""Our worker class by the worker class that vLLM's platform chose and whether the runner is V2."""
