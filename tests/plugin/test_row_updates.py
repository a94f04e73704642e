"""Row updates on their way to a worker: the field, pickling, vLLM's broadcast queue, the laws."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import threading
from typing import TYPE_CHECKING, Any

import pytest
from test_scheduler import _build
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.request import Request

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import InvariantError, SeamError
from vllm_tagma.integration.row_updates import (
    TagmaSchedulerOutput,
    by_group,
    require_fits,
    require_same_ids,
    row_updates_of,
    sent_whole,
    with_row_updates,
)
from vllm_tagma.integration.scheduler import TagmaScheduler
from vllm_tagma.row_update import RowUpdate

if TYPE_CHECKING:
    from conftest import ConfigFactory

UPDATES = [
    RowUpdate("request-1", 0, 2, BlockRanges([(40, 3), (7, 1)])),
    RowUpdate("request-1", 1, 0, BlockRanges([(0, 3), (1, 2)])),
    RowUpdate("request-2", 0, 0, BlockRanges()),
]


def _stock() -> SchedulerOutput:
    output = SchedulerOutput.make_empty()
    output.finished_req_ids = {"request-0"}
    output.kv_cache_block_copies = [(5, 40), (40, 5)]
    output.num_scheduled_tokens = {"request-1": 4}
    output.total_num_scheduled_tokens = 4
    return output


def test_a_step_without_updates_is_vllms_own_object() -> None:
    stock = _stock()
    assert with_row_updates(stock, []) is stock
    assert type(stock) is SchedulerOutput
    assert list(row_updates_of(stock)) == []


def test_the_same_object_carries_them() -> None:
    """No field is copied: the step is in the scheduler's hot path."""
    stock = _stock()
    before = dict(vars(stock))
    output = with_row_updates(stock, UPDATES)
    assert output is stock
    assert type(output) is TagmaSchedulerOutput
    assert row_updates_of(output) == UPDATES
    assert {k: v for k, v in vars(output).items() if k != "row_updates"} == before
    assert {f.name for f in dataclasses.fields(output)} == {*before, "row_updates"}


def test_an_output_of_another_class_is_refused() -> None:
    @dataclasses.dataclass
    class Foreign(SchedulerOutput):  # type: ignore[misc]
        extra: int = 0

    output = Foreign(**vars(_stock()))
    assert with_row_updates(output, []) is output
    with pytest.raises(SeamError, match=r"SchedulerOutput, found .*Foreign.*paged"):
        with_row_updates(output, UPDATES)


def test_copies_and_replaced_outputs_keep_them() -> None:
    """V1 replaces with some speculators; an attribute set on vLLM's object would be lost."""
    output = with_row_updates(_stock(), UPDATES)
    replaced = dataclasses.replace(output, num_scheduled_tokens={})
    for other in (replaced, copy.copy(output), copy.deepcopy(output)):
        assert type(other) is TagmaSchedulerOutput
        assert row_updates_of(other) == UPDATES
    assert replaced.num_scheduled_tokens == {}


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
def test_they_survive_pickling(protocol: int) -> None:
    output = with_row_updates(_stock(), UPDATES)
    found = pickle.loads(pickle.dumps(output, protocol=protocol))
    assert found == output
    assert [type(update) for update in found.row_updates] == [RowUpdate] * 3
    assert [update.ranges.ranges() for update in found.row_updates] == [
        [(40, 3), (7, 1)],
        [(0, 3), (1, 2)],
        [],
    ]


@pytest.mark.parametrize("requests", [2, 3000])
def test_they_cross_the_queue_of_the_multiprocess_executor(requests: int) -> None:
    """As ``MultiprocExecutor`` sends a step: through shared memory, or past it when it is long."""
    updates = [
        RowUpdate(f"request-{i}", 0, i, BlockRanges([(i + 1, 2), (3 * i + 9, 5)]))
        for i in range(requests)
    ]
    output = with_row_updates(_stock(), updates)
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
    assert row_updates_of(found) == updates


def test_whose_whole_row_is_sent() -> None:
    output = _stock()
    output.scheduled_new_reqs = [type("New", (), {"req_id": "new"})()]
    output.scheduled_cached_reqs = CachedRequestData(
        req_ids=["running", "resumed", "sat-out"],
        resumed_req_ids={"resumed"},
        new_token_ids=[],
        all_token_ids={"resumed": [1], "sat-out": [1]},
        new_block_ids=[None, None, None],
        num_computed_tokens=[0, 0, 0],
        num_output_tokens=[0, 0, 0],
    )
    assert sent_whole(output) == {"new", "resumed", "sat-out"}


# --- laws -----------------------------------------------------------------------------------------


def test_updates_by_group_and_request() -> None:
    assert by_group(UPDATES, 2) == [
        {"request-1": UPDATES[0], "request-2": UPDATES[2]},
        {"request-1": UPDATES[1]},
    ]
    assert by_group([], 1) == [{}]
    for wrong, groups in ((UPDATES, 1), ([UPDATES[0]] * 2, 2)):
        with pytest.raises(InvariantError, match=r"law W2 .* a second update of a row, or one"):
            by_group(wrong, groups)


@pytest.mark.parametrize(
    ("first", "length", "held", "brought", "fits"),
    [
        (0, 5, 0, 5, True),  # admission
        (3, 1, 3, 1, True),  # growth
        (1, 2, 3, 0, True),  # a move
        (1, 4, 3, 2, True),  # both
        (3, 0, 3, 0, True),
        (4, 1, 3, 2, False),  # a hole
        (1, 1, 3, 0, False),  # a row that would shrink
        (1, 4, 3, 1, False),  # more than was brought
        (0, 3, 0, 5, False),
    ],
)
def test_an_update_fits_or_names_request_and_counts(
    first: int, length: int, held: int, brought: int, fits: bool
) -> None:
    ranges = BlockRanges([(9, length)] if length else [])
    update = RowUpdate("a", 0, first, ranges)
    if fits:
        require_fits(update, held=held, brought=brought)
        return
    with pytest.raises(InvariantError) as error:
        require_fits(update, held=held, brought=brought)
    message = str(error.value)
    assert f"request a names blocks {first} to {first + length} of group 0" in message
    assert f"row has {held} blocks and the step brings {brought} more" in message
    assert "--kv-cache-backend paged" in message


def test_ids_are_compared_from_the_end_of_the_update() -> None:
    update = RowUpdate("a", 0, 2, BlockRanges([(5, 2), (0, 2), (1, 1)]))
    for ids in ([], [1], [0, 1], [6, 0, 0, 1], [5, 6, 0, 0, 1]):
        require_same_ids(update, ids)
    with pytest.raises(
        InvariantError, match=r"law W1 .*block 4 of request a, group 0, is 0 in .* 7 in"
    ):
        require_same_ids(update, [7, 0, 1])


# --- the scheduler --------------------------------------------------------------------------------


def test_the_scheduler_sends_what_changed_in_a_step(vllm_config: ConfigFactory) -> None:
    """Admission whole; a move with the copies of the same step, whether scheduled or not."""
    options = {"compaction": "live", "copy_budget": 8}
    config = vllm_config(additional_config={"kv_cache_backend": "tagma", "tagma": options})
    scheduler = _build(TagmaScheduler, config)
    manager = scheduler.kv_cache_manager
    sampling = SamplingParams(max_tokens=50)
    sampling.update_from_generation_config({}, eos_token_id=2)
    scheduler.add_request(Request("request-a", list(range(70)), sampling, None))
    first = scheduler.schedule()
    (before,) = first.scheduled_new_reqs[0].block_ids
    (admitted,) = row_updates_of(first)
    assert (admitted.request_id, admitted.group, admitted.first_block) == ("request-a", 0, 0)
    assert admitted.ranges.ids() == before
    begin = manager.new_step_starts

    def begin_and_move() -> None:
        begin()
        assert manager.pool.relocate(manager._rows["request-a"].handle, 1, len(before))

    manager.new_step_starts = begin_and_move
    second = scheduler.schedule()
    manager.new_step_starts = begin
    assert second.num_scheduled_tokens == {}
    (moved,) = row_updates_of(second)
    assert (moved.request_id, moved.first_block) == ("request-a", 1)
    after = before[:1] + moved.ranges.ids()
    assert ([after],) == (list(manager.get_block_ids("request-a")),)
    assert set(after[1:]).isdisjoint(before)
    assert sorted(second.kv_cache_block_copies) == sorted(zip(before[1:], after[1:], strict=True))
    third = scheduler.schedule()
    assert type(third) is SchedulerOutput
    assert (list(row_updates_of(third)), third.kv_cache_block_copies) == ([], None)
