"""The seams themselves. How to read an entry: ``seam.py``.

A release that changes one of these stops start-up and fails ``tests/plugin/test_seams.py``. To
admit it: read what changed, adapt the code named under ``why``, then write the new form down here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_tagma.integration.seams.seam import Seam
from vllm_tagma.integration.seams.seam_table_attention import ATTENTION_SEAMS
from vllm_tagma.integration.seams.seam_table_manager import MANAGER_SEAMS
from vllm_tagma.integration.seams.seam_table_metrics import METRICS_SEAMS
from vllm_tagma.integration.seams.seam_table_rows import ROW_SEAMS
from vllm_tagma.integration.seams.seam_table_transfer import TRANSFER_SEAMS
from vllm_tagma.integration.seams.seam_table_v2 import V2_SEAMS

_MANAGER = "vllm.v1.core.kv_cache_manager:KVCacheManager"
_SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
_BLOCK_TABLE = "vllm.v1.worker.block_table:BlockTable"
_RUNNER = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
_OFFICIAL_FLAG = "vLLM lets a plugin declare engine arguments and adjust the finished config"
_FACTORY = "vLLM gets a factory or a config field for the KV-cache manager"
_SLOT_HOOK = "vLLM gets a hook for slot mapping on Model Runner V1, or drops V1"

REFUSED_MEMBERS: Final[Mapping[str, str]] = {
    "record_blocks_for_zeroing": "zeroing",
}
"""Manager members that the scheduler reads only in configurations that are refused, with the rule
of ``support/`` that refuses them. The manager may leave them out."""

ALWAYS_READ: Final[tuple[str, ...]] = (
    "allocate_slots",
    "block_pool",
    "cache_blocks",
    "coordinator",
    "empty_kv_cache_blocks",
    "estimate_cached_tokens",
    "evict_blocks",
    "finalize_partial_tail_offloads",
    "free",
    "get_block_ids",
    "get_block_ids_for_computed_tokens",
    "get_blocks",
    "get_computed_blocks",
    "get_computed_blocks_for_connector",
    "make_prefix_cache_stats",
    "mamba_shared_prefix_checkpoint",
    "new_step_starts",
    "pop_blocks_for_free",
    "record_prefix_cache_stats",
    "remove_skipped_blocks",
    "reset_prefix_cache",
    "take_boundary_state_offloads",
    "take_events",
    "take_kv_cache_block_copies",
    "take_new_block_ids",
    "truncate_computed_blocks",
    "usage",
)
"""Manager members that the scheduler reads in configurations that are served."""

_SCHEDULER_READS = ", ".join(sorted({*ALWAYS_READ, *REFUSED_MEMBERS, "<itself>"}))

_CONSTRUCTOR = (
    "(self, kv_cache_config, max_model_len, scheduler_block_size, hash_block_size, "
    "max_in_flight_tokens=None, enable_caching=True, use_eagle=False, {new}"
    "num_prefill_lookahead=0, log_stats=False, enable_kv_cache_events=False, dcp_world_size=1, "
    "pcp_world_size=1, metrics_collector=None, watermark=0.0, "
    "enable_mamba_shared_prefix_checkpoint=False) -> None"
)
_CONSTRUCTION = (
    "(kv_cache_config=, max_model_len=, max_in_flight_tokens=, enable_caching=, use_eagle=, {new}"
    "num_prefill_lookahead=, log_stats=, enable_kv_cache_events=, dcp_world_size=, "
    "pcp_world_size=, scheduler_block_size=, hash_block_size=, metrics_collector=, watermark=, "
    "enable_mamba_shared_prefix_checkpoint=)"
)

_MANAGER_METHODS: Final[Mapping[str, str]] = {
    "usage": "@property (self) -> float",
    "make_prefix_cache_stats": "(self) -> PrefixCacheStats | None",
    "record_prefix_cache_stats": "(self, request, num_hits) -> None",
    "get_computed_blocks": "(self, request) -> tuple[KVCacheBlocks, int, int]",
    "allocate_slots": (
        "(self, request, num_new_tokens, num_new_computed_tokens=0, new_computed_blocks=None, "
        "num_lookahead_tokens=0, num_external_computed_tokens=0, delay_cache_blocks=False, "
        "num_encoder_tokens=0, full_sequence_must_fit=False, reserved_blocks=0, "
        "has_scheduled_reqs=True, skip_zeroing_group_ids=()) -> KVCacheBlocks | None"
    ),
    "free": "(self, request) -> None",
    "reset_prefix_cache": "(self) -> bool",
    "take_events": "(self) -> list[KVCacheEvent]",
    "get_blocks": "(self, request_id) -> KVCacheBlocks",
    "get_block_ids": "(self, request_id) -> tuple[list[int], ...]",
    "estimate_cached_tokens": "(self, request) -> int",
    "cache_blocks": "(self, request, num_computed_tokens) -> None",
    "take_new_block_ids": "(self) -> list[int]",
    "take_kv_cache_block_copies": "(self) -> tuple[list[KVCacheBlockCopy], list[KVCacheBlock]]",
    "take_boundary_state_offloads": "(self) -> dict[str, list[tuple[int, int, int]]]",
    "new_step_starts": "(self) -> None",
    "get_computed_blocks_for_connector": (
        "(self, request) -> tuple[KVCacheBlocks, int, int, bool]"
    ),
    "get_block_ids_for_computed_tokens": (
        "(self, request_id, num_computed_tokens) -> tuple[list[int], ...]"
    ),
    "remove_skipped_blocks": (
        "(self, request_id, processed_computed_tokens, num_prompt_tokens=None) -> None"
    ),
    "truncate_computed_blocks": "(self, blocks, num_computed_tokens) -> KVCacheBlocks",
    "finalize_partial_tail_offloads": "(self, request) -> list[tuple[int, int, int]]",
    "pop_blocks_for_free": "(self, request) -> list[KVCacheBlock]",
    "evict_blocks": "(self, block_ids) -> None",
}

_MANAGER_CHANGES: Final[Mapping[str, Mapping[str, str]]] = {
    "get_computed_blocks": {
        "0.33": ("(self, request, max_cache_hit_length=None) -> tuple[KVCacheBlocks, int, int]"),
    },
    "get_computed_blocks_for_connector": {
        "0.33": (
            "(self, request, max_cache_hit_length=None) -> tuple[KVCacheBlocks, int, int, bool]"
        ),
    },
}

_BLOCK_TABLE_METHODS: Final[Mapping[str, str]] = {
    "__init__": (
        "(self, block_size, max_num_reqs, max_num_blocks_per_req, max_num_batched_tokens, "
        "pin_memory, device, cp_kv_cache_interleave_size, "
        "slot_mapping_mode=SlotMappingMode.TOKEN_TO_KV_SLOT)"
    ),
    "append_row": "(self, block_ids, row_idx) -> None",
    "add_row": "(self, block_ids, row_idx) -> None",
    "clear_row": "(self, row_idx) -> None",
    "move_row": "(self, src, tgt) -> None",
    "swap_row": "(self, src, tgt) -> None",
    "compute_slot_mapping": "(self, num_reqs, query_start_loc, positions) -> None",
    "commit_block_table": "(self, num_reqs) -> None",
    "clear": "(self) -> None",
}

_CONFIG_SEAMS = (
    Seam(
        target="vllm.engine.arg_utils:EngineArgs.add_cli_args",
        kind="patch",
        room="config",
        why="declares --kv-cache-backend and folds it into additional_config (engine_args.py)",
        expected="@staticmethod (parser) -> FlexibleArgumentParser",
        remove_when=_OFFICIAL_FLAG,
    ),
    Seam(
        target="vllm.engine.arg_utils:AsyncEngineArgs.add_cli_args",
        callee="EngineArgs.add_cli_args",
        kind="contract",
        room="config",
        why="`vllm serve` must reach the patched method through the class's global name",
        expected="(*1)",
        remove_when=_OFFICIAL_FLAG,
    ),
    Seam(
        target="vllm.engine.arg_utils:AsyncEngineArgs",
        bases=True,
        kind="contract",
        room="config",
        why="one patched create_engine_config serves both classes by inheritance",
        expected="(EngineArgs)",
        remove_when=_OFFICIAL_FLAG,
    ),
    Seam(
        target="vllm.engine.arg_utils:EngineArgs.create_engine_config",
        kind="patch",
        room="config",
        why="refuses what is not served, then chooses scheduler and worker classes "
        "(engine_args.py); also wraps __init__, for LLM(kv_cache_backend=...)",
        expected="(self, usage_context=None, headless=False) -> VllmConfig",
        remove_when=_OFFICIAL_FLAG,
    ),
    Seam(
        target="vllm.engine.arg_utils:EngineArgs.from_cli_args",
        kind="contract",
        room="config",
        why="copies only dataclass fields, so the flag must already be in additional_config",
        expected="@classmethod (cls, args)",
        remove_when=_OFFICIAL_FLAG,
    ),
    Seam(
        target="vllm.config.scheduler:SchedulerConfig.get_scheduler_cls",
        kind="contract",
        room="config",
        why="resolves the class name that finalisation stores; without the package it fails",
        expected="(self) -> type['SchedulerInterface']",
        remove_when=_FACTORY,
    ),
)

_SCHEDULER_SEAMS = (
    Seam(
        target=f"{_SCHEDULER}.__init__",
        kind="subclass",
        room="scheduler",
        why="TagmaScheduler extends it (scheduler.py)",
        expected=(
            "(self, vllm_config, kv_cache_config, structured_output_manager, block_size, "
            "hash_block_size=None, mm_registry=MULTIMODAL_REGISTRY, include_finished_set=False, "
            "log_stats=False) -> None"
        ),
        remove_when=_FACTORY,
    ),
    Seam(
        target="vllm.v1.core.sched.async_scheduler:AsyncScheduler",
        bases=True,
        kind="subclass",
        room="scheduler",
        why="TagmaAsyncScheduler extends it and reaches Scheduler.__init__ through it",
        expected="(Scheduler)",
        remove_when=_FACTORY,
    ),
    Seam(
        target="vllm.v1.core.sched.async_scheduler:AsyncScheduler.__init__",
        kind="subclass",
        room="scheduler",
        why="hands on what TagmaAsyncScheduler was given, whatever it is (scheduler.py)",
        expected="(self, *args, **kwargs) -> None",
        remove_when=_FACTORY,
    ),
    Seam(
        target="vllm.v1.engine.core:EngineCore.__init__",
        callee="Scheduler",
        kind="contract",
        room="scheduler",
        why="the engine core builds the scheduler with these arguments",
        expected=(
            "(vllm_config=, kv_cache_config=, structured_output_manager=, include_finished_set=, "
            "log_stats=, block_size=, hash_block_size=)"
        ),
        remove_when=_FACTORY,
    ),
    Seam(
        target=f"{_SCHEDULER}.__init__",
        callee="KVCacheManager",
        kind="swap",
        room="scheduler",
        why="the name is replaced while this call runs, so that our manager is built with "
        "vLLM's own arguments (scheduler.py)",
        expected=_CONSTRUCTION.format(new=""),
        changed={"0.33": _CONSTRUCTION.format(new="num_hash_lookahead_tokens=, ")},
        remove_when=_FACTORY,
    ),
    Seam(
        target=f"{_MANAGER}.__init__",
        kind="contract",
        room="scheduler",
        why="TagmaKVCacheManager takes the same arguments",
        expected=_CONSTRUCTOR.format(new=""),
        changed={"0.33": _CONSTRUCTOR.format(new="num_hash_lookahead_tokens=0, ")},
        remove_when=_FACTORY,
    ),
    *(
        Seam(
            target=f"{_MANAGER}.{name}",
            kind="contract",
            room="scheduler",
            why="TagmaKVCacheManager answers it",
            expected=expected,
            changed=_MANAGER_CHANGES.get(name, {}),
            remove_when=_FACTORY,
        )
        for name, expected in _MANAGER_METHODS.items()
    ),
    Seam(
        target="vllm.v1.core.sched.scheduler",
        owner="self.kv_cache_manager",
        kind="contract",
        room="scheduler",
        why="a member read here and unknown to us would only fail in the middle of serving",
        expected=_SCHEDULER_READS,
        remove_when=_FACTORY,
    ),
    Seam(
        target="vllm.v1.core.sched.async_scheduler",
        owner="self.kv_cache_manager",
        kind="contract",
        room="scheduler",
        why="the same, for async scheduling",
        expected="cache_blocks",
        changed={"0.33": ""},
        remove_when=_FACTORY,
    ),
    Seam(
        target=f"{_SCHEDULER}._connector_finished",
        kind="subclass",
        room="scheduler",
        why="a connector that keeps the blocks of a finished request has them pinned "
        "(scheduler.py)",
        expected="(self, request) -> tuple[bool, dict[str, Any] | None]",
        remove_when="the KV-cache manager learns that a request's blocks are kept",
    ),
    Seam(
        target=f"{_SCHEDULER}._request_remaining_blocks",
        callee="self.kv_cache_manager.coordinator.get_num_blocks_to_allocate",
        kind="contract",
        room="scheduler",
        why="what requests in flight still lack is reserved before a prompt is pulled "
        "(stand_ins.py)",
        expected=(
            "(request_id=, num_tokens=, new_computed_blocks=, num_encoder_tokens=, "
            "total_computed_tokens=, num_local_computed_tokens=, num_tokens_main_model=, "
            "apply_admission_cap=, prefill_end=)"
        ),
        remove_when=_FACTORY,
    ),
    Seam(
        target=f"{_SCHEDULER}._drain_deferred_frees",
        callee="self.kv_cache_manager.block_pool.free_blocks",
        kind="contract",
        room="scheduler",
        why="takes back what pop_blocks_for_free gave (transfer_contract.py)",
        expected="(*1)",
        remove_when=_FACTORY,
    ),
)

_WORKER_SEAMS = (
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        kind="subclass",
        room="worker_v1",
        why="TagmaCPUWorker extends it to get a runner with range tables (worker_v1.py)",
        expected="(self)",
        remove_when=_SLOT_HOOK,
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        callee="CPUModelRunner",
        kind="swap",
        room="worker_v1",
        why="builds the V1 runner that worker_v1.py extends",
        expected="(*2)",
        remove_when=_SLOT_HOOK,
    ),
    Seam(
        target="vllm.v1.worker.cpu_model_runner:CPUModelRunner",
        bases=True,
        kind="contract",
        room="worker_v1",
        why="the CPU runner inherits the input-batch life cycle of the GPU runner",
        expected="(GPUModelRunner)",
        remove_when=_SLOT_HOOK,
    ),
    Seam(
        target=f"{_RUNNER}.may_reinitialize_input_batch",
        kind="subclass",
        room="worker_v1",
        why="the final block tables exist after it; worker_v1.py gives them ranges there",
        expected="(self, kv_cache_config) -> None",
        remove_when=_SLOT_HOOK,
    ),
    Seam(
        target=f"{_RUNNER}.preserve_serving_state",
        kind="subclass",
        room="worker_v1",
        why="puts tables of ids back behind their methods; ranges are derived from them again",
        expected="(self)",
        remove_when=_SLOT_HOOK,
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.execute_model",
        kind="subclass",
        room="worker_v1",
        why="a broken law ends a rank that the mp executor does not listen to (worker_v1.py)",
        expected=("(self, scheduler_output) -> ModelRunnerOutput | AsyncModelRunnerOutput | None"),
        remove_when="the executor hears of an error on any rank",
    ),
    Seam(
        target="vllm.v1.worker.gpu_worker:Worker.shutdown",
        kind="subclass",
        room="worker",
        why="logs what debug_slots has checked; of V2's workers too (worker_v1.py, worker_v2.py)",
        expected="(self) -> None",
        remove_when="a worker can report in another way when an engine ends",
    ),
    Seam(
        target=f"{_RUNNER}.initialize_kv_cache",
        callee="self.may_reinitialize_input_batch",
        kind="contract",
        room="worker_v1",
        why="every KV-cache initialisation must pass through the method above",
        expected="(*1)",
        remove_when=_SLOT_HOOK,
    ),
    *(
        Seam(
            target=f"{_BLOCK_TABLE}.{name}",
            kind="subclass",
            room="worker_v1",
            why="TagmaBlockTable keeps its range table in step with this method",
            expected=expected,
            remove_when=_SLOT_HOOK,
        )
        for name, expected in _BLOCK_TABLE_METHODS.items()
    ),
)

SEAMS: Final[tuple[Seam, ...]] = (
    *_CONFIG_SEAMS,
    *_SCHEDULER_SEAMS,
    *MANAGER_SEAMS,
    *METRICS_SEAMS,
    *_WORKER_SEAMS,
    *V2_SEAMS,
    *ROW_SEAMS,
    *TRANSFER_SEAMS,
    *ATTENTION_SEAMS,
)
