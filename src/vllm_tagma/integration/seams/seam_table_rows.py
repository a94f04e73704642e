"""The seams of row updates and block copies: how changed rows and moved blocks reach a runner.

How to read an entry: ``seam.py``. Where these calls stand inside a step is read from vLLM's
sources as well, by ``tests/plugin/test_step_order.py``.
"""

from __future__ import annotations

from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_RUNNER_V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_RUNNER_V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_COPY = "copy_kv_cache_blocks_inplace"
_ROW_CHANGES = "vLLM's scheduler output can carry ranges and say that a running row has changed"
_MOVER = "vLLM lets a runner name the function that copies blocks"
_COPIES = "vLLM documents that block copies of a step read all sources first"

ROW_SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        target="vllm.v1.core.sched.scheduler:Scheduler.schedule",
        kind="subclass",
        room="scheduler",
        why="its output gets the row updates of the same step (scheduler.py, row_updates.py)",
        expected="(self, throttle_prefills=False) -> SchedulerOutput",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.core.sched.scheduler:Scheduler._make_cached_request_data",
        callee="CachedRequestData",
        kind="contract",
        room="scheduler",
        why="names the requests that were resumed or, on V1, sat out a step: their whole row is "
        "sent (row_updates.py)",
        expected="(req_ids=, resumed_req_ids=, new_token_ids=, all_token_ids=, new_block_ids=, "
        "num_computed_tokens=, num_output_tokens=)",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.core.sched.output:SchedulerOutput",
        bases=True,
        kind="subclass",
        room="scheduler",
        why="its instances become TagmaSchedulerOutput, which adds a field (row_updates.py)",
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
        kind="swap",
        room="worker_v1",
        why="makes the copies of a step before anything of it is computed; our mover stands for "
        "the name meanwhile (block_copies.py)",
        expected="(*3)",
        remove_when=_MOVER,
    ),
    Seam(
        target=f"{_RUNNER_V2}.update_requests",
        callee=_COPY,
        kind="swap",
        room="worker_v2",
        why="makes the copies of a step before anything of it is computed; our mover stands for "
        "the name meanwhile (block_copies.py)",
        expected="(*3)",
        remove_when=_MOVER,
    ),
    Seam(
        target=f"vllm.v1.worker.utils:{_COPY}",
        kind="contract",
        room="worker",
        why="our mover takes its arguments and leaves what it leaves, which is as if all sources "
        "were read first (tests/worker/test_block_mover.py)",
        expected="(kv_caches, num_blocks, kv_cache_block_copies) -> None",
        remove_when=_MOVER,
    ),
    Seam(
        target=f"{_RUNNER_V1}._update_states",
        kind="subclass",
        room="worker_v1",
        why="while it runs, the block tables know the step's row updates (worker_v1.py)",
        expected="(self, scheduler_output) -> Callable | None",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.worker.cpu_model_runner:CPUModelRunner.initialize_kv_cache",
        kind="subclass",
        room="worker_v1",
        why="behind it, when the caches are there, the self-test runs (start_test.py)",
        expected="(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None) "
        "-> None",
        remove_when="never: it runs where vLLM has made the caches",
    ),
    Seam(
        target=f"{_RUNNER_V1}.execute_model",
        callee="self._update_states",
        kind="contract",
        room="worker_v1",
        why="every step, also one without tokens, must pass through it",
        expected="(*1)",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.worker.gpu_input_batch:InputBatch.req_ids",
        kind="contract",
        room="worker_v1",
        why="says which request a table row belongs to when it is written (worker_v1.py)",
        expected="@property (self) -> list[str]",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.worker.gpu_input_batch:CachedRequestState.block_ids",
        kind="contract",
        room="worker_v1",
        why="a request's own ids, which vLLM extends and adds rows from: they follow the moves",
        expected="tuple[list[int], ...]",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.add_requests",
        kind="subclass",
        room="worker_v2",
        why="from here on the block tables know the step's row updates (worker_v2.py)",
        expected="(self, scheduler_output) -> None",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.update_requests",
        kind="subclass",
        room="worker_v2",
        why="behind it rows that moved and got no block are written (worker_v2.py)",
        expected="(self, scheduler_output) -> None",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target=f"{_RUNNER_V2}.execute_model",
        callee="self.add_requests",
        kind="contract",
        room="worker_v2",
        why="every step, also one without tokens, must pass through it",
        expected="(*1)",
        remove_when=_ROW_CHANGES,
    ),
    Seam(
        target="vllm.v1.worker.gpu.buffer_utils:StagedWriteTensor.stage_write",
        kind="contract",
        room="worker_v2",
        why="writes the rows of ids, which debug_slots compares with",
        expected="(self, index, start, x) -> None",
        remove_when=_ROW_CHANGES,
    ),
)
