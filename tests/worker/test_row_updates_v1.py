"""Row updates on Model Runner V1, through vLLM's own ``_update_states``, with two cache groups."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from v1_runner import GROUPS, ROWS, WIDTH, PlainScheduler, make_runner, table_row, update_of

from vllm_tagma._native import BlockRanges
from vllm_tagma.errors import InvariantError, RangeCapError
from vllm_tagma.integration.row_updates import TagmaSchedulerOutput, row_updates_of
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.worker.range_table import RangeTable


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    return make_runner(monkeypatch, audited=True)


def tables(runner: Any) -> list[Any]:
    return list(runner.input_batch.block_table.block_tables)


def execute(runner: Any, scheduler: PlainScheduler, **changes: Any) -> None:
    runner._update_states(scheduler.step(**changes))
    scheduler.check(runner)


def no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on no row may be derived from ids."""

    def refuse(*_: object) -> None:
        raise AssertionError("a row was derived from ids")

    monkeypatch.setattr(RangeTable, "append", refuse)


def test_admission_growth_moves_and_resumption(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that a step can say; no row is derived from ids on the way."""
    no_ids(monkeypatch)
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6, 9], [0, 0, 0, 1, 2]), "b": ([40], [41])})
    assert tables(runner)[1].ranges.ranges(0) == [(0, 3), (1, 2)]
    execute(runner, scheduler, grown={"a": ([10, 11], [3])})
    assert tables(runner)[0].ranges.ranges(0) == [(5, 2), (9, 3)]
    execute(runner, scheduler, grown={"b": ([], [42])})  # one group alone
    execute(runner, scheduler, moved={"a": (0, 1, [20, 21])})  # and nothing appended
    execute(runner, scheduler, moved={"a": (1, 3, [30, 31])}, grown={"a": ([12], [])})
    assert tables(runner)[1].ranges.ranges(0) == [(0, 3), (30, 2), (3, 1)]
    execute(runner, scheduler, grown={"a": ([13], [4])}, moved={"a": (0, 0, [50, 51, 52])})
    execute(runner, scheduler, preempted=("a",))
    execute(runner, scheduler, resumed={"a": ([7, 8, 60], [0, 9, 61])})
    execute(runner, scheduler, new={"a": ([7, 8], [62, 63])})  # streamed: known, and sent whole
    execute(runner, scheduler, finished=("b",))
    execute(runner, scheduler, finished=("a",), new={"a": ([70], [71])})  # the name is used again


def test_a_request_that_sits_out_is_moved_and_comes_back(
    runner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM drops it from the batch and adds it again from its own list, which has to follow."""
    no_ids(monkeypatch)
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6, 9], [1, 2]), "b": ([40], [41])})
    execute(runner, scheduler, idle=("a",), moved={"a": (0, 0, [20, 21])})
    execute(runner, scheduler, idle=("a",), moved={"a": (1, 1, [30])})
    execute(runner, scheduler, grown={"a": ([10], [])}, moved={"a": (0, 2, [25])})
    execute(runner, scheduler, grown={"a": ([26], [31])})


@pytest.mark.parametrize(
    "sends",
    [
        frozenset({"whole", "grown", "moved"}),
        frozenset({"moved"}),  # rows from vLLM's ids, apart from what moves
        frozenset({"grown", "moved"}),
        frozenset({"whole", "moved"}),
    ],
    ids=lambda sends: "+".join(sorted(sends)),
)
@pytest.mark.parametrize("seed", range(6))
def test_a_trace_equals_plain_lists(
    monkeypatch: pytest.MonkeyPatch, seed: int, sends: frozenset[str]
) -> None:
    """Requests come, grow, move, sit out, are preempted and end; parts of it are sent as ranges."""
    runner = make_runner(monkeypatch, audited=bool(seed % 2))
    scheduler, rng = PlainScheduler(sends=sends), random.Random(seed)

    def ids(least: int = 0, most: int = 5) -> list[int]:
        start = rng.choice([0, rng.randrange(1, 900)])
        count = rng.randint(least, most)
        return [0] * count if not start else list(range(start, start + count))

    def whole() -> tuple[list[int], ...]:
        return tuple(ids(1) + ids() + ids() for _ in range(GROUPS))

    counts = dict.fromkeys(("grown", "moved", "both", "idle", "preempted", "finished"), 0)
    for step in range(80):
        running = [name for name in scheduler.rows if name not in scheduler.preempted]
        rng.shuffle(running)
        finished = tuple(name for name in running if rng.random() < 0.06)
        preempted = tuple(n for n in running if n not in finished and rng.random() < 0.08)
        gone = {*finished, *preempted}
        left = [name for name in running if name not in gone]
        idle = tuple(name for name in left if rng.random() < 0.25)
        grown = {n: (ids(), ids()) for n in left if n not in idle and rng.random() < 0.4}
        grown = {n: more for n, more in grown.items() if any(more)}
        moved = {}
        for name in left:
            group = rng.randrange(GROUPS)
            held = len(scheduler.rows[name][group])
            if rng.random() < 0.4:
                at = rng.randrange(held)
                places = (ids(1) + ids() + ids())[: held - at]
                moved[name] = (group, at, places)
        room = ROWS - len(left)
        back = [n for n in scheduler.preempted if rng.random() < 0.5][:room]
        resumed = {name: whole() for name in back}
        streamed = [n for n in left if n not in {*idle, *grown, *moved} and rng.random() < 0.1]
        new = {name: whole() for name in streamed}
        if room > len(back) and rng.random() < 0.5:
            new[f"r{step}"] = whole()
        execute(
            runner,
            scheduler,
            new=new,
            resumed=resumed,
            grown=grown,
            moved=moved,
            idle=idle,
            preempted=preempted,
            finished=finished,
        )
        for name, happened in (
            ("grown", grown),
            ("moved", moved),
            ("both", grown.keys() & moved.keys()),
            ("idle", idle),
            ("preempted", preempted),
            ("finished", finished),
        ):
            counts[name] += len(happened)
    assert min(counts.values()) > 3, counts


def test_slots_follow_the_update_and_the_audit_agrees(runner: Any) -> None:
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6, 9], [1, 2, 3])})
    execute(runner, scheduler, moved={"a": (0, 0, [11, 12])})
    batch = runner.input_batch.block_table
    batch.commit_block_table(1)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    batch[0].compute_slot_mapping(1, starts, torch.tensor([0, 33, 64]))
    assert batch[0].slot_mapping.gpu[:3].tolist() == [11 * 32, 12 * 32 + 1, 9 * 32]
    assert batch[0].audit.counters() == {"batches": 1, "slots": 3, "padded": 0}


# --- refusals -------------------------------------------------------------------------------------


def state_of(runner: Any) -> list[Any]:
    """All that a refused update must leave alone."""
    return [
        (table.block_table.np.copy(), table.num_blocks_per_row.copy(), table.ranges.ranges(0))
        for table in tables(runner)
    ]


def assert_same(runner: Any, before: list[Any]) -> None:
    for (ids, counts, ranges), (old, old_counts, old_ranges) in zip(
        state_of(runner), before, strict=True
    ):
        np.testing.assert_array_equal(ids, old)
        np.testing.assert_array_equal(counts, old_counts)
        assert ranges == old_ranges


def with_updates(output: Any, *updates: RowUpdate) -> Any:
    output.__class__ = TagmaSchedulerOutput
    output.row_updates = updates
    return output


@pytest.mark.parametrize("idle", [(), ("a",)], ids=["scheduled", "sits out"])
@pytest.mark.parametrize(
    ("first", "blocks", "words"),
    [
        (0, [8, 9, 10, 11], r"blocks 0 to 4 of group 0; the worker's row has 3 blocks and the "),
        (0, [8, 9], r"blocks 0 to 2 of group 0; the worker's row has 3 blocks and the "),
        (4, [8], r"blocks 4 to 5 of group 0; the worker's row has 3 blocks and the "),
    ],
)
def test_a_move_that_does_not_fit_is_refused(
    runner: Any, first: int, blocks: list[int], words: str, idle: tuple[str, ...]
) -> None:
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6, 7], [1, 2])})
    before = state_of(runner)
    bad = RowUpdate("a", 0, first, BlockRanges.from_ids(blocks))
    output = with_updates(scheduler.step(idle=idle), bad)
    with pytest.raises(InvariantError, match=f"law W2 .*request a names {words}step brings 0 more"):
        runner._update_states(output)
    if not idle:
        assert_same(runner, before)
    assert all(table.updates == {} for table in tables(runner))


@pytest.mark.parametrize("change", [-1, 1])
def test_growth_by_another_number_of_blocks_is_refused(runner: Any, change: int) -> None:
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6, 7], [1, 2])})
    before = state_of(runner)
    output = scheduler.step(grown={"a": ([8, 9], [])})
    (update,) = row_updates_of(output)
    ids = [8] if change < 0 else [8, 9, 10]
    with pytest.raises(InvariantError, match=r"has 3 blocks and the step brings 2 more"):
        runner._update_states(
            with_updates(output, update._replace(ranges=BlockRanges.from_ids(ids)))
        )
    assert_same(runner, before)


@pytest.mark.parametrize("kind", ["new", "grown"])
def test_debug_slots_catches_an_update_that_contradicts_the_ids(runner: Any, kind: str) -> None:
    scheduler = PlainScheduler()
    if kind == "grown":
        execute(runner, scheduler, new={"a": ([5, 6], [1])})
    before = state_of(runner)
    output = scheduler.step(
        **({"new": {"a": ([5, 6, 9], [1])}} if kind == "new" else {"grown": {"a": ([9], [])}})
    )
    updates = [
        u._replace(ranges=BlockRanges.from_ids([*u.ranges.ids()[:-1], 10]))
        for u in row_updates_of(output)
        if u.group == 0
    ]
    message = r"law W1 .*block 2 of request a, group 0, is 10 in its row update and 9 in the ids"
    with pytest.raises(InvariantError, match=message):
        runner._update_states(with_updates(output, *updates))
    assert_same(runner, before)


def test_without_debug_slots_ids_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = make_runner(monkeypatch, audited=False)
    scheduler = PlainScheduler()
    output = scheduler.step(new={"a": ([5, 6], [1])})
    wrong = [update_of("a", group, 0, ids) for group, ids in enumerate(([5, 7], [1]))]
    runner._update_states(with_updates(output, *wrong))
    assert table_row(tables(runner)[0], 0) == [5, 7], "the ranges count"


@pytest.mark.parametrize("group", [-1, 2])
def test_an_update_of_a_group_that_is_not_there_is_refused(runner: Any, group: int) -> None:
    output = with_updates(PlainScheduler().step(), RowUpdate("a", group, 0, BlockRanges()))
    with pytest.raises(InvariantError, match=r"one of a group beyond the worker's 2"):
        runner._update_states(output)


def test_two_updates_of_one_row_are_refused(runner: Any) -> None:
    twice = [update_of("a", 0, 0, [5]), update_of("a", 0, 0, [5])]
    with pytest.raises(InvariantError, match="a second update of a row"):
        runner._update_states(with_updates(PlainScheduler().step(), *twice))


def test_an_unknown_request_is_passed_over(runner: Any) -> None:
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": ([5, 6], [1])})
    output = with_updates(scheduler.step(), update_of("gone", 0, 0, [7]))
    runner._update_states(output)
    scheduler.check(runner)


def test_too_many_ranges_leave_both_tables(runner: Any) -> None:
    scheduler = PlainScheduler()
    execute(runner, scheduler, new={"a": (list(range(1, 301)), [1])})
    before = state_of(runner)
    output = scheduler.step(moved={"a": (0, 0, [2 * i + 400 for i in range(256)])})
    with pytest.raises(RangeCapError, match=r"request a \(row 0\) form 257 ranges"):
        runner._update_states(output)
    assert_same(runner, before)


def test_a_row_wider_than_the_table_is_refused(runner: Any) -> None:
    (table, _) = tables(runner)
    width = table.max_num_blocks_per_req
    assert width >= WIDTH
    table.add_row([5, 6], 1)
    before = state_of(runner)
    with pytest.raises(InvariantError, match=rf"row 1 would have {width + 1} blocks.* {width} a"):
        table.write(1, 2, BlockRanges([(7, width - 1)]))
    assert_same(runner, before)
    table.write(1, 2, BlockRanges([(7, width - 2)]))
    assert table_row(table, 1) == list(range(5, 5 + width))
