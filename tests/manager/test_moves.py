"""What the manager tells of moves: rows for the worker, samples for vLLM's residency metrics."""

from __future__ import annotations

from typing import Any

import pytest
from canary_trace import CanaryTrace
from kv_requests import admit, decode, ids_of, make_manager, make_request, mode_options, row_of
from manager_solo import Solo
from vllm.v1.core.kv_cache_metrics import KVCacheMetricsCollector
from vllm.v1.request import RequestStatus

from vllm_tagma._native import BlockRanges
from vllm_tagma.config import TagmaConfig
from vllm_tagma.observers import Observers
from vllm_tagma.row_update import RowUpdate
from vllm_tagma.stand_ins import BlockId

BLOCK = 4


def ask(name: str, blocks: int, seed: int = 1) -> Any:
    tokens = [1_000 * seed + i for i in range(blocks * BLOCK)]
    return make_request(name, tokens, block_size=BLOCK)


def manager_with(*requests: Any, **options: Any) -> Any:
    """A manager whose worker knows these requests; a step has begun."""
    manager = make_manager(num_blocks=65, block_size=BLOCK, **mode_options("moving"), **options)
    manager.new_step_starts()
    for request in requests:
        assert admit(manager, request)[0] is not None
    end_step(manager)
    manager.new_step_starts()
    return manager


def end_step(
    manager: Any, whole: tuple[str, ...] = ()
) -> tuple[list[tuple[int, int]], dict[str, RowUpdate]]:
    """Copies, and the row updates by request. ``whole``: requests that a worker does not know."""
    manager.take_new_block_ids()
    updates = manager.take_row_updates(whole)
    copies, kept = manager.take_kv_cache_block_copies()  # in any order
    assert kept == []
    by_request = {update.request_id: update for update in updates}
    assert len(by_request) == len(updates)
    return copies, by_request


def move(manager: Any, name: str, first: int, last: int) -> bool:
    """Moves blocks of a request, as live compaction would."""
    return manager.pool.relocate(manager._rows[name].handle, first, last)


# --- rows -----------------------------------------------------------------------------------------


def test_a_moved_row_is_told_once() -> None:
    a, b = ask("a", 6), ask("b", 3, seed=2)
    manager = manager_with(a, b)
    before, other = row_of(manager, a), row_of(manager, b)
    assert move(manager, "a", 2, 5)
    after = row_of(manager, a)
    copies, updates = end_step(manager)
    assert after[:2] + after[5:] == before[:2] + before[5:]
    assert sorted(copies) == sorted(zip(before[2:5], after[2:5], strict=True))
    assert updates.keys() == {"a"}
    assert updates["a"].first_block == 2
    assert updates["a"].ranges.ids() == after[2:]
    assert row_of(manager, b) == other
    assert manager.take_row_updates(()) == []
    manager.new_step_starts()
    assert end_step(manager) == ([], {})
    manager.check_invariants()


def test_a_row_that_moved_and_grew_is_told_once() -> None:
    a = ask("a", 4)
    manager = manager_with(a)
    assert move(manager, "a", 1, 4)
    new = decode(manager, a, 7)
    assert len(ids_of(new)) == 1
    _, updates = end_step(manager)
    assert updates["a"].first_block == 1
    assert updates["a"].ranges.ids() == row_of(manager, a)[1:]
    assert updates["a"].num_blocks == 5


def test_admission_and_growth_are_told_like_moves() -> None:
    a, b = ask("a", 4), ask("b", 3, seed=2)
    manager = manager_with(a)
    admit(manager, b)
    new = ids_of(decode(manager, a, 7))
    _, updates = end_step(manager, whole=("b",))
    assert updates["a"] == RowUpdate("a", 0, 4, BlockRanges([(new[0], 1)]))
    assert updates["b"].first_block == 0
    assert updates["b"].ranges.ids() == row_of(manager, b)


def test_a_whole_row_is_told_even_if_nothing_changed() -> None:
    """A session whose next input fits its last block: the worker has dropped it meanwhile."""
    a = ask("a", 4)
    manager = manager_with(a)
    _, updates = end_step(manager, whole=("a", "unknown"))
    assert updates.keys() == {"a"}
    assert updates["a"].first_block == 0
    assert updates["a"].ranges.ids() == row_of(manager, a)
    manager.new_step_starts()
    assert move(manager, "a", 1, 4)
    _, updates = end_step(manager, whole=("a",))
    assert updates["a"].first_block == 0
    assert updates["a"].ranges.ids() == row_of(manager, a)


def test_a_row_that_is_on_its_way_does_not_move() -> None:
    """Its ids were read when it was scheduled."""
    a = ask("a", 4)
    manager = manager_with(a)
    fresh = ask("fresh", 4, seed=2)
    admit(manager, fresh)
    decode(manager, a, 7)
    assert not move(manager, "fresh", 0, 4)
    assert not move(manager, "a", 0, 4)
    assert end_step(manager)[0] == []
    manager.new_step_starts()
    assert move(manager, "fresh", 0, 4)
    assert move(manager, "a", 0, 4)
    assert end_step(manager)[1].keys() == {"a", "fresh"}


def test_a_session_that_was_scheduled_without_growing_does_not_move() -> None:
    """A streaming session's next input may fit its last block. It waited, so its whole row is sent
    as it was when it was admitted: a later move in the step would be lost."""
    a = make_request("a", list(range(14)), block_size=BLOCK)
    manager = manager_with(a)
    a.status = RequestStatus.WAITING
    a.append_output_token_ids(7)
    new = manager.allocate_slots(
        a, 1, 0, manager.empty_kv_cache_blocks, full_sequence_must_fit=True
    )
    assert ids_of(new) == []
    assert not move(manager, "a", 0, 3)
    assert end_step(manager) == ([], {})


def test_a_freed_row_is_not_told() -> None:
    a, b = ask("a", 4), ask("b", 4, seed=2)
    manager = manager_with(a, b)
    assert move(manager, "a", 0, 4)
    assert move(manager, "b", 0, 2)
    manager.free(a)  # preempted by a more urgent request
    again = ask("again", 4, seed=3)  # may take the row's slot in the core
    assert admit(manager, again)[0] is not None
    updates = end_step(manager)[1]
    assert updates.keys() == {"b", "again"}
    assert updates["again"].ranges.ids() == row_of(manager, again)
    manager.check_invariants()


# --- samples of vLLM's metrics --------------------------------------------------------------------


def sampled(*blocks: int) -> KVCacheMetricsCollector:
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    for block in blocks:
        collector.on_block_allocated(BlockId(block))
    return collector


def test_a_sample_follows_its_block() -> None:
    collector = sampled(1, 2)
    one, two = collector.block_metrics[1], collector.block_metrics[2]
    Observers._follow(collector, [(1, 5), (2, 1), (5, 6)])
    assert collector.block_metrics == {6: one, 1: two}
    assert collector.drain_events() == []
    assert list(one.access_history) == []


def test_a_move_ends_the_sample_of_what_was_there() -> None:
    """Blocks that were never cached leave a sample in their hole; stock ends it when the id is used
    again. It must not become the sample of a block that is not sampled."""
    collector = sampled(3)
    Observers._follow(collector, [(1, 3)])
    assert collector.block_metrics == {}
    assert len(collector.drain_events()) == 1


def test_a_sample_follows_a_move_before_its_block_is_evicted() -> None:
    """A call that gives nobody blocks (a refusal at the range cap) may move some all the same."""
    collector = KVCacheMetricsCollector(sample_rate=1.0)
    a = ask("a", 4)
    manager = manager_with(a, metrics_collector=collector)
    assert move(manager, "a", 0, 4)
    moved = set(row_of(manager, a))
    manager.free(a)
    assert set(collector.block_metrics) == moved
    manager.evict_blocks(moved)
    assert collector.block_metrics == {}
    assert len(collector.drain_events()) == 4


class _Sampled(CanaryTrace):
    """A trace with vLLM's collector, which samples each block."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(seed, overlapped=False, pair=Solo, **options)
        self.evict_rate = 0.0  # a withdrawn live block has no sample
        self.collector = KVCacheMetricsCollector(1.0)
        observers = self.pair.tagma._observers
        observers._collector, observers.watching = self.collector, True
        self.samples: dict[tuple[str, int], tuple[int, Any]] = {}
        self.followed = 0

    def _maintain(self) -> None:
        super()._maintain()
        before, self.samples = self.samples, {}
        manager = self.pair.tagma
        held = self.collector.block_metrics
        for name in self.pair.live:
            for position, block in enumerate(ids_of(manager.get_blocks(name))):
                assert block in held, f"block {block} of {name} lost its sample"
                was, sample = before.get((name, position), (block, held[block]))
                assert held[block] is sample, f"block {block} of {name} has a foreign sample"
                self.followed += was != block
                self.samples[name, position] = (block, sample)
        for block in range(1, self.pair.num_blocks):
            assert block in held or not manager.pool.is_cached(block)

    def _preempt(self, request: Any) -> None:
        super()._preempt(request)
        for key in [key for key in self.samples if key[0] == request.request_id]:
            del self.samples[key]


@pytest.mark.parametrize("mode", ["live/65536/0.0", "live/16/0.3", "idle/3/0.1"])
def test_samples_of_a_trace_stay_with_their_blocks(mode: str) -> None:
    followed = 0
    seeds = (seed for seed in range(3_000, 3_100))
    done = 0
    while done < 5:
        trace = _Sampled(next(seeds), mode=mode)
        if trace.pair.caching:
            trace.run(250)
            followed += trace.followed
            done += 1
    assert followed > 20 or mode.startswith("idle")


@pytest.mark.parametrize(("num_blocks", "grows"), [(99, False), (400, True)])
def test_slack_grows_in_a_pool_that_can_afford_it(num_blocks: int, grows: bool) -> None:
    """Where a hundredth of the pool is not a block there is none: eviction is by age alone."""
    manager = make_manager(
        num_blocks=num_blocks, block_size=BLOCK, tagma_config=TagmaConfig(compaction="live")
    )
    for wave in range(10 * num_blocks // 20):
        request = ask(f"{wave}", 20, seed=wave)
        manager.new_step_starts()
        assert admit(manager, request)[0] is not None
        end_step(manager)
        manager.free(request)
    slack = manager.pool.stats()["slack_blocks"]
    assert slack > num_blocks // 100 if grows else slack == 0
