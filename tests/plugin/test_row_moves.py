"""Row moves on their way to a worker: the field, pickling, and vLLM's own broadcast queue."""

from __future__ import annotations

import dataclasses
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from test_scheduler import _build
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from vllm_tagma.errors import InvariantError
from vllm_tagma.integration.row_moves import (
    TagmaSchedulerOutput,
    moved_block_ids,
    require_within,
    row_moves_of,
    with_row_moves,
)
from vllm_tagma.integration.scheduler import TagmaScheduler

if TYPE_CHECKING:
    from conftest import ConfigFactory

MOVES = {"request-1": [(40, 3), (7, 1)], "request-2": [(1, 2)]}


def _stock() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"request-0"}
    output.kv_cache_block_copies = [(5, 40), (40, 5)]
    output.num_scheduled_tokens = {"request-1": 4}
    output.total_num_scheduled_tokens = 4
    return output


def test_a_step_without_moves_is_vllms_own_object() -> None:
    stock = _stock()
    assert with_row_moves(stock, {}) is stock
    assert row_moves_of(stock) == {}


def test_all_of_vllms_fields_are_kept() -> None:
    stock = _stock()
    output = with_row_moves(stock, MOVES)
    assert isinstance(output, SchedulerOutput)
    assert row_moves_of(output) == MOVES
    for field in dataclasses.fields(SchedulerOutput):
        assert getattr(output, field.name) is getattr(stock, field.name), field.name


def test_a_replaced_output_keeps_its_moves() -> None:
    """V1 does so with some speculators; an attribute set on vLLM's object would be lost."""
    output = dataclasses.replace(with_row_moves(_stock(), MOVES), num_scheduled_tokens={})
    assert type(output) is TagmaSchedulerOutput
    assert row_moves_of(output) == MOVES


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_moves_survive_pickling(protocol: int) -> None:
    output = with_row_moves(_stock(), MOVES)
    assert pickle.loads(pickle.dumps(output, protocol=protocol)) == output


@pytest.mark.parametrize("requests", [2, 3000])
def test_moves_cross_the_queue_of_the_multiprocess_executor(requests: int) -> None:
    """As ``MultiprocExecutor`` sends a step: through shared memory, or past it when it is long."""
    moves = {f"request-{i}": [(i + 1, 2), (3 * i + 9, 5)] for i in range(requests)}
    output = with_row_moves(_stock(), moves)
    assert (len(pickle.dumps(output)) > 1 << 14) == (requests > 2)
    sender = MessageQueue(1, 1, max_chunk_bytes=1 << 14, max_chunks=2)
    received: list[Any] = []

    def receive() -> None:
        queue = MessageQueue.create_from_handle(sender.export_handle(), 0)
        queue.wait_until_ready()
        received.append(queue.dequeue(timeout=20))

    reader = threading.Thread(target=receive)
    reader.start()
    sender.wait_until_ready()
    sender.enqueue(("execute_model", (output,), {}, None))
    reader.join(timeout=30)
    (_, (found,), _, _) = received[0]
    assert type(found) is TagmaSchedulerOutput
    assert found == output
    assert row_moves_of(found) == moves


def test_ranges_are_expanded_in_order() -> None:
    assert moved_block_ids(MOVES["request-1"]) == [40, 41, 42, 7]
    assert moved_block_ids([]) == []


def test_a_move_beyond_the_row_names_request_and_way_out() -> None:
    require_within(request="request a", moved=3, held=3)
    with pytest.raises(InvariantError) as error:
        require_within(request="request a", moved=4, held=3)
    message = str(error.value)
    assert "law W2 (row moves): 4 moved blocks for request a, whose row on the worker has 3" in (
        message
    )
    assert "--tagma-compaction idle" in message


def test_the_scheduler_sends_what_moved_in_a_step(vllm_config: ConfigFactory) -> None:
    """With the copies of the same step, whether or not the request is scheduled in it."""
    options = {"compaction": "live", "copy_budget": 8}
    config = vllm_config(additional_config={"kv_cache_backend": "tagma", "tagma": options})
    scheduler = _build(TagmaScheduler, config)
    manager = scheduler.kv_cache_manager
    sampling = SamplingParams(max_tokens=50)
    sampling.update_from_generation_config({}, eos_token_id=2)
    scheduler.add_request(Request("request-a", list(range(70)), sampling, None))
    first = scheduler.schedule()
    assert type(first) is SchedulerOutput
    (before,) = first.scheduled_new_reqs[0].block_ids
    begin = manager.new_step_starts

    def begin_and_move() -> None:
        begin()
        assert manager.pool.relocate(manager._rows["request-a"].handle, 0, len(before))

    manager.new_step_starts = begin_and_move
    second = scheduler.schedule()
    manager.new_step_starts = begin
    assert second.num_scheduled_tokens == {}
    ranges = row_moves_of(second)["request-a"]
    after = moved_block_ids(ranges)
    assert ([after],) == (list(manager.get_block_ids("request-a")),)
    assert set(after).isdisjoint(before)
    assert sorted(second.kv_cache_block_copies) == sorted(zip(before, after, strict=True))
    third = scheduler.schedule()
    assert (row_moves_of(third), third.kv_cache_block_copies) == ({}, None)
