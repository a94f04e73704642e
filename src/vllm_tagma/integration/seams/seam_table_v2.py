"""The seams of Model Runner V2. How to read an entry: ``seam.py``.

vLLM 0.33 masks what lies below a sliding window while it gathers block tables; that is the one
difference, and ``block_tables_v2.py`` serves both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vllm_tagma.integration.seams.seam import Seam

_TABLES = "vllm.v1.worker.gpu.block_table:BlockTables"
_RUNNER = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
_WORKER = "vllm.v1.worker.gpu_worker:Worker"
_RUNNER_HOOK = "vLLM lets a V2 runner name its block table class"

_CONSTRUCTOR = (
    "(self, block_sizes, max_num_reqs, max_num_batched_tokens, max_num_blocks_per_group, device, "
    "cp_size=1, cp_rank=0, cp_interleave=1, slot_mapping_enabled=None, dcp_sharded=None{new})"
)
_CONSTRUCTION = (
    "(block_sizes=, max_num_reqs=, max_num_batched_tokens=, max_num_blocks_per_group=, device=, "
    "slot_mapping_enabled=, dcp_sharded=, {new}cp_size=, cp_rank=, cp_interleave=)"
)
_GATHER = (
    "(self, idx_mapping, num_reqs_padded, out=None, out_ptrs=None{new}) -> tuple[torch.Tensor, ...]"
)

_METHODS: Final[Mapping[str, tuple[str, Mapping[str, str]]]] = {
    "__init__": (
        _CONSTRUCTOR.format(new=""),
        {"0.33": _CONSTRUCTOR.format(new=", sliding_window_reach=None")},
    ),
    "init_block_table_layout_tensors": ("(self) -> None", {}),
    "append_block_ids": ("(self, req_index, new_block_ids, overwrite) -> None", {}),
    "apply_staged_writes": ("(self) -> None", {}),
    "gather_block_tables": (
        _GATHER.format(new=""),
        {"0.33": _GATHER.format(new=", num_computed_tokens=None")},
    ),
    "get_dummy_block_tables": ("(self, num_reqs) -> tuple[torch.Tensor, ...]", {}),
    "compute_slot_mappings": (
        "(self, idx_mapping, query_start_loc, positions, num_tokens_padded, out=None) "
        "-> torch.Tensor",
        {},
    ),
    "get_dummy_slot_mappings": ("(self, num_tokens) -> torch.Tensor", {}),
}

V2_SEAMS: Final[tuple[Seam, ...]] = (
    Seam(
        target=f"{_WORKER}._make_model_runner",
        kind="subclass",
        room="worker_v2",
        why="TagmaWorker returns its own runner (worker_v2.py)",
        expected="(self) -> 'GPUModelRunner'",
        remove_when="never: vLLM made it for subclasses",
    ),
    Seam(
        target=f"{_WORKER}._init_workspace_and_model_runner",
        callee="self._make_model_runner",
        kind="contract",
        room="worker_v2",
        why="the CUDA worker must build its runner through the method above",
        expected="()",
        remove_when="never: vLLM made it for subclasses",
    ),
    Seam(
        target="vllm.v1.worker.cpu_worker:CPUWorker.init_device",
        callee="CPUModelRunnerV2",
        kind="swap",
        room="worker_v2",
        why="builds the V2 runner that TagmaV2CPUWorker extends",
        expected="(*2)",
        remove_when="vLLM's CPU worker calls _make_model_runner",
    ),
    Seam(
        target="vllm.v1.worker.cpu.model_runner:CPUModelRunner",
        bases=True,
        kind="contract",
        room="worker_v2",
        why="the CPU runner initialises its KV cache as the GPU runner does",
        expected="(GPUModelRunner)",
        remove_when=_RUNNER_HOOK,
    ),
    Seam(
        target=f"{_RUNNER}.initialize_kv_cache",
        kind="subclass",
        room="worker_v2",
        why="block tables are built inside it; worker_v2.py wraps it",
        expected="(self, kv_cache_config, is_profiling=False, kv_cache_allocation_context=None) "
        "-> None",
        remove_when=_RUNNER_HOOK,
    ),
    Seam(
        target=f"{_RUNNER}.initialize_kv_cache",
        callee="BlockTables",
        kind="swap",
        room="worker_v2",
        why="the name is replaced while this call runs, so that our tables are built with vLLM's "
        "own arguments",
        expected=_CONSTRUCTION.format(new=""),
        changed={"0.33": _CONSTRUCTION.format(new="sliding_window_reach=, ")},
        remove_when=_RUNNER_HOOK,
    ),
    *(
        Seam(
            target=f"{_RUNNER}.prepare_attn",
            callee=f"self.block_tables.{name}",
            kind="contract",
            room="worker_v2",
            why="TagmaBlockTables takes these arguments",
            expected=expected,
            changed=changed,
            remove_when=_RUNNER_HOOK,
        )
        for name, expected, changed in (
            (
                "gather_block_tables",
                "(*1, num_reqs_padded=)",
                {"0.33": "(*1, num_reqs_padded=, num_computed_tokens=)"},
            ),
            ("compute_slot_mappings", "(*3, num_tokens_padded=)", {}),
        )
    ),
    *(
        Seam(
            target=f"{_TABLES}.{name}",
            kind="subclass",
            room="worker_v2",
            why="TagmaBlockTables replaces or relies on this method (block_tables_v2.py)",
            expected=expected,
            changed=changed,
            remove_when=_RUNNER_HOOK,
        )
        for name, (expected, changed) in _METHODS.items()
    ),
)
