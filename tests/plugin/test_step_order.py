"""What row updates and block moves rely on inside a step of vLLM, read from each release's sources.

A step's ``SchedulerOutput`` carries copies, which vLLM executes, and row updates, which our runners
apply where vLLM writes rows. Both must happen in every step, and before anything of it is computed.
"""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from vllm_tagma import versions
from vllm_tagma.integration.seams import signatures

V1 = "vllm.v1.worker.gpu_model_runner:GPUModelRunner"
V2 = "vllm.v1.worker.gpu.model_runner:GPUModelRunner"
SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
COPY = "copy_kv_cache_blocks_inplace"


@pytest.fixture(params=["installed", "0.33"])
def root(request: pytest.FixtureRequest) -> Path:
    """The ``vllm`` package of each release at hand."""
    if request.param == "installed":
        found = versions.vllm_root()
        assert found is not None
        return found
    default = Path(__file__).parents[2] / "build" / "vllm-0.33"
    folder = Path(os.environ.get("TAGMA_VLLM033", default)) / "vllm"
    assert folder.is_dir(), f"{folder} is missing: run `make test`"
    return folder


def _order(root: Path, target: str, *wanted: str) -> list[str]:
    """The wanted expressions of a method in the order in which they first stand in its source."""
    node = signatures._find(root, target)
    assert node is not None, target
    places: dict[str, tuple[int, int]] = {}
    for child in ast.walk(node):
        if isinstance(child, ast.expr):
            text = ast.unparse(child)
            if text in wanted:
                place = (child.lineno, child.col_offset)
                places[text] = min(place, places.get(text, place))
    return sorted(places, key=places.__getitem__)


def _holds(root: Path, target: str, *order: str) -> None:
    assert _order(root, target, *order) == list(order)


def test_v1_updates_its_rows_in_steps_without_tokens_too(root: Path) -> None:
    _holds(root, f"{V1}.execute_model", "self._update_states", "not num_scheduled_tokens")


def test_v1_copies_after_zeroing_and_before_rows_grow(root: Path) -> None:
    _holds(
        root,
        f"{V1}._update_states",
        "scheduler_output.finished_req_ids",
        "self._zero_block_ids",
        COPY,
        "block_ids.extend",
        "self.input_batch.block_table.append_row",
        "self.input_batch.add_request",
    )


def test_v1_knows_whose_row_it_adds(root: Path) -> None:
    _holds(
        root,
        "vllm.v1.worker.gpu_input_batch:InputBatch.add_request",
        "self._req_ids.append",
        "self._req_ids[req_index]",
        "self.block_table.add_row",
    )


def test_v1_sends_the_tokens_of_a_request_that_sat_out_a_step(root: Path) -> None:
    """By these it is known whose whole row the worker writes again."""
    _holds(
        root,
        f"{SCHEDULER}._make_cached_request_data",
        "resumed_req_ids.add",
        "req_id not in self.prev_step_scheduled_req_ids",
        "all_token_ids[req_id]",
    )


def test_v2_knows_whose_row_it_adds(root: Path) -> None:
    _holds(
        root,
        f"{V2}.add_requests",
        "self.req_states.add_request",
        "self.block_tables.append_block_ids",
    )
    _holds(
        root,
        "vllm.v1.worker.gpu.states:RequestState.add_request",
        "self.free_indices.pop",
        "self.index_to_req_id[req_idx]",
    )


def test_v2_updates_its_rows_in_steps_without_tokens_too(root: Path) -> None:
    _holds(
        root,
        f"{V2}.execute_model",
        "self.finish_requests",
        "self.add_requests",
        "self.update_requests",
        "self.block_tables.apply_staged_writes",
        "scheduler_output.total_num_scheduled_tokens == 0",
        "self.prepare_attn",
    )


def test_v2_copies_after_zeroing(root: Path) -> None:
    _holds(
        root,
        f"{V2}.update_requests",
        "self.block_tables.append_block_ids",
        "self.kv_block_zeroer.zero_block_ids",
        COPY,
    )


def test_v1_transfers_begin_behind_the_copies(root: Path) -> None:
    """What a block held is copied away before a transfer writes into it."""
    _holds(
        root,
        f"{V1}.execute_model",
        "get_kv_transfer_group().handle_preemptions",
        "self._update_states",
        "self.kv_connector_no_forward",
        "self.maybe_get_kv_connector_output",
    )


def test_v2_transfers_begin_behind_the_copies(root: Path) -> None:
    _holds(
        root,
        f"{V2}.execute_model",
        "self.update_requests",
        "self.kv_connector.no_forward",
        "self.kv_connector.pre_forward",
    )


def test_a_connector_is_asked_behind_the_pin(root: Path) -> None:
    """It is told the blocks of a prompt to pull once ``allocate_slots`` has pinned them, and what a
    step does once the copies of the step are known."""
    _holds(
        root,
        f"{SCHEDULER}.schedule",
        "self.kv_cache_manager.allocate_slots",
        "self.connector.update_state_after_alloc",
        "self.kv_cache_manager.take_kv_cache_block_copies",
        "self._build_kv_connector_meta",
    )


def test_a_step_says_what_failed_before_it_ends_a_request(root: Path) -> None:
    _holds(
        root,
        f"{SCHEDULER}.update_from_output",
        "self._handle_invalid_blocks",
        "self._handle_stopped_request",
        "self._free_request",
        "self._update_from_kv_xfer_finished",
    )


def test_preempted_requests_leave_v2_before_rows_are_written(root: Path) -> None:
    _holds(
        root,
        f"{V2}.finish_requests",
        "scheduler_output.preempted_req_ids",
        "self._remove_request",
    )


def test_copies_are_taken_after_the_last_decision_of_a_step(root: Path) -> None:
    _holds(
        root,
        f"{SCHEDULER}.schedule",
        "self.kv_cache_manager.new_step_starts",
        "self.kv_cache_manager.allocate_slots",
        "self.kv_cache_manager.take_kv_cache_block_copies",
        "self._get_new_block_ids_to_zero",
    )


def test_each_output_is_executed(root: Path) -> None:
    """No path from ``schedule`` to the next one goes around the executor."""
    core = "vllm.v1.engine.core:EngineCore"
    for method in ("step", "step_with_batch_queue"):
        _holds(
            root, f"{core}.{method}", "self.scheduler.schedule", "self.model_executor.execute_model"
        )


def test_v1_knows_no_other_caller_that_updates_rows(root: Path) -> None:
    text = signatures.module_path(root, V1.partition(":")[0]).read_text(encoding="utf-8")
    assert text.count("self._update_states(") == 1


def test_the_copy_function_is_the_one_that_is_run_by_the_tests(root: Path) -> None:
    """``tests/worker/test_block_copies.py`` runs the installed one; 0.33 cannot be run here."""
    installed = versions.vllm_root()
    assert installed is not None
    target = f"vllm.v1.worker.utils:{COPY}"
    found, running = (signatures._find(r, target) for r in (root, installed))
    assert found is not None
    assert running is not None
    assert ast.dump(found) == ast.dump(running)
