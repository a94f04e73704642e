"""The seams of block moves: how copies and rewritten rows reach a runner.

How to read an entry: ``seam.py``. Where these calls stand inside a step is read from vLLM's
sources as well, by ``tests/plugin/test_step_order.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_COPY = "copy_kv_cache_blocks_inplace"
_ROW_CHANGES = "vLLM's scheduler output can say that the blocks of a running request have changed"
_COPIES = "vLLM documents that block copies of a step read all sources first"

MOVE_SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        kind="subclass",
        room="scheduler",
        why="its output gets the row moves of the same step (scheduler.py, row_moves.py)",
        expected="(self, throttle_prefills=False) -> SchedulerOutput",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        bases=True,
        kind="subclass",
        room="scheduler",
        why="TagmaSchedulerOutput adds a field to this dataclass (row_moves.py)",
        expected="()",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.core.kv_cache_utils:KVCacheBlockCopy",
        bases=True,
        kind="contract",
        room="scheduler",
        why="the manager hands out plain (source, destination) tuples in its place",
        expected="(NamedTuple)",
        remove_when=_COPIES,
    ),
    Seam(
        target=f"{_RUNNER_V1}._update_states",
        callee=_COPY,
        kind="contract",
        room="worker",
        why="executes the copies of a step before anything of it is computed",
        expected="(*3)",
        remove_when=_COPIES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.update_requests",
        callee=_COPY,
        kind="contract",
        room="worker_v2",
        why="executes the copies of a step before anything of it is computed",
        expected="(*3)",
        remove_when=_COPIES,
    ),
    Seam(
        target=f"vllm.v1.worker.utils:{_COPY}",
        kind="contract",
        room="worker",
        why="reads all sources before it writes: chains, swaps and cycles of moves rely on it "
        "(tests/worker/test_block_copies.py)",
        expected="(kv_caches, num_blocks, kv_cache_block_copies) -> None",
        remove_when=_COPIES,
    ),
    Seam(
        target=f"{_RUNNER_V1}._update_states",
        kind="subclass",
        room="worker",
        why="moved rows are rewritten before it (worker_v1.py)",
        expected="(self, scheduler_output) -> Callable | None",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V1}.execute_model",
        callee="self._update_states",
        kind="contract",
        room="worker",
        why="every step, also one without tokens, must pass through the method above",
        expected="(*1)",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.add_requests",
        kind="subclass",
        room="worker_v2",
        why="moved rows are rewritten before it (worker_v2.py)",
        expected="(self, scheduler_output) -> None",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.execute_model",
        callee="self.add_requests",
        kind="contract",
        room="worker_v2",
        why="every step, also one without tokens, must pass through the method above",
        expected="(*1)",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
        kind="contract",
        room="worker_v2",
        why="rewrites the row of ids of a moved request, which debug_slots compares with",
        expected="(self, index, start, x) -> None",
        remove_when=_ROW_CHANGES,
    ),
)
