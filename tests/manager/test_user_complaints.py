"""Complaints of vLLM's users about KV-cache management, each as a test that names its issue.

Numbers are issues of vllm-project/vllm unless a project is named. Where the cause is in the
manager, the test drives it by hand; where it takes a scheduler to show, vLLM's own scheduler runs.
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from built_schedulers import build_scheduler
from canary_trace import CanaryTrace
from kv_requests import (
    ResidentSet,
    admit,
    decode,
    event_keys,
    ids_of,
    make_manager,
    make_request,
    make_stock,
    row_of,
)
from manager_solo import Solo
from scheduler_trace import SchedulerTrace, Side
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from vllm_tagma._native import BlockRanges, Pool
from vllm_tagma.integration.scheduler import TagmaScheduler

BLOCK = 4
TOKENS = list(range(1_000, 1_400))


def ask(name: str, tokens: list[int], **options: Any) -> Any:
    return make_request(name, tokens, block_size=BLOCK, **options)


def other_tokens(seed: int, count: int) -> list[int]:
    return [10_000 + 1_000 * seed + i for i in range(count)]


def run_step(side: Side) -> int:
    """One synchronous step; returns the number of scheduled requests."""
    decided = side.step(0)
    side.process()
    return len(decided["tokens"])


def tagma_side(engine_configs: Any, **options: Any) -> Side:
    options = {"block_size": BLOCK, "async_scheduling": False, **options}
    return Side(build_scheduler(TagmaScheduler, engine_configs["tagma_config"], **options))


# --- corruption -----------------------------------------------------------------------------------


@pytest.mark.parametrize("overlapped", [False, True], ids=["in-step", "in-flight"])
@pytest.mark.parametrize("seed", range(15))
def test_no_kv_is_corrupted_under_a_full_pool(seed: int, overlapped: bool) -> None:
    """#37076, #39146, #50702: outputs change under churn at 100 % pool usage, as if a block had two
    owners. #45357: freed blocks are reused while a step that writes them is in flight (overlapped).
    A canary per slot, written through the slot mapping, is intact whenever a request reads it.
    With the default options; others in ``test_kv_content.py``."""
    trace = CanaryTrace(seed, overlapped=overlapped, pair=Solo, mode="default")
    trace.run()
    assert trace.reads > 0


def test_two_live_requests_never_own_a_block() -> None:
    """#37076: the pool is pinned at 100 % while requests come, grow and go."""
    rng = random.Random(0)
    manager = make_manager(num_blocks=65, block_size=BLOCK)
    live: list[Any] = []
    for i in range(1_500):
        request = ask(f"r{i}", other_tokens(i, rng.randint(1, 60)))
        while admit(manager, request)[0] is None:
            manager.free(live.pop(rng.randrange(len(live))))
        live.append(request)
        for grown in list(live):
            if decode(manager, grown, i) is None:
                live.remove(grown)
                manager.free(grown)
        rows = [block for request in live for block in row_of(manager, request)]
        assert len(rows) == len(set(rows))
        assert 0 not in rows
        assert len(rows) + manager.block_pool.get_num_free_blocks() == 64
    manager.check_invariants()


def test_a_refused_admission_changes_nothing() -> None:
    """#11565, #11562: touching the hit before the capacity check counts computed blocks twice."""
    manager = make_manager(num_blocks=9, block_size=BLOCK)
    for name, tokens in (("a", TOKENS[:16]), ("b", other_tokens(1, 4))):
        request = ask(name, tokens)
        admit(manager, request)
        manager.free(request)
    holder = ask("holder", [*TOKENS[:4], 1, 2, 3, 4])  # shares a block, the rest of the hit is idle
    admit(manager, holder)

    def state() -> Any:
        pool = manager.pool
        return pool.stats(), [pool.request_refs(b) for b in range(1, 9)], pool.holes()

    before = state()
    for i in range(5):
        new, hit = admit(manager, ask(f"big{i}", TOKENS[:33]))
        assert (new, hit) == (None, 16)
        assert state() == before
    assert decode(manager, holder, 5) is not None
    before = state()
    holder.append_output_token_ids(list(range(40)))
    assert manager.allocate_slots(holder, 40) is None
    assert state() == before
    assert manager.get_computed_blocks(ask("probe", TOKENS[:17]))[1] == 16  # still cached


def _priority_preemption(manager: Any) -> int:
    """A decode step publishes a block and is preempted before it runs; returns what then hits."""
    request = ask("a", TOKENS[:7])
    manager.new_step_starts()
    admit(manager, request)
    manager.take_new_block_ids()  # the step runs: block 0 is written
    manager.new_step_starts()
    assert decode(manager, request, TOKENS[7]) is not None  # fills and publishes block 1
    manager.free(request)  # a more urgent request needs the space
    manager.take_new_block_ids()
    return manager.get_computed_blocks(ask("b", TOKENS[:9]))[1]


def test_what_a_preempted_step_published_is_not_hit() -> None:
    """#57580, #56525: blocks published in the step that preempts their request were never written.
    Stock vLLM leaves them hittable; if it stops doing so, the difference can go from the docs."""
    assert _priority_preemption(make_manager(block_size=BLOCK)) == 4
    assert _priority_preemption(make_stock(block_size=BLOCK)) == 8


def test_preemption_in_a_later_step_keeps_the_cache() -> None:
    """#57580, the other side: what was written stays hittable, also another request's copy."""
    manager = make_manager(block_size=BLOCK)
    request, twin = (ask(name, TOKENS[:8], skip_reading=True) for name in "at")
    manager.new_step_starts()
    admit(manager, twin)
    manager.take_new_block_ids()
    manager.new_step_starts()
    admit(manager, request)
    manager.free(request)
    manager.take_new_block_ids()
    assert manager.get_computed_blocks(ask("b", TOKENS[:9]))[1] == 8
    manager.new_step_starts()
    manager.free(twin)
    manager.take_new_block_ids()
    assert manager.get_computed_blocks(ask("b", TOKENS[:9]))[1] == 8


def test_keys_are_compared_in_full() -> None:
    """#44701, #51899: identities that share a key share a block. Hashes that differ only in their
    last byte, so that they collide in the index, are different prefixes."""
    pool = Pool(300)
    keys = [bytes(31) + bytes([i]) for i in range(200)]
    rows = {}
    for key in keys:
        rows[key] = pool.admit(0, 0, BlockRanges(), 1, 0, 1, 1, 0, 1, [key])
    for key in keys:
        (added,) = rows[key][1]
        assert pool.lookup([key], 1).ids() == added.ids()
    assert len(pool.lookup([bytes(31) + bytes([250])], 1)) == 0
    for key in keys[::2]:
        pool.evict(rows[key][1][0].ids())
    for i, key in enumerate(keys):
        assert len(pool.lookup([key], 1)) == i % 2
    pool.check_invariants()


def test_an_adapter_name_is_not_a_salt() -> None:
    """#44701, #44706: LoRA "x" and cache salt "x" must not share blocks."""
    manager = make_manager(block_size=BLOCK)
    admit(manager, ask("lora", TOKENS[:12], lora="x"))
    admit(manager, ask("image", TOKENS[:12], images=(("x", 0, 4),)))
    assert manager.get_computed_blocks(ask("salt", TOKENS[:12], salt="x"))[1] == 0
    assert manager.get_computed_blocks(ask("plain", TOKENS[:12]))[1] == 0
    assert manager.get_computed_blocks(ask("again", TOKENS[:12], lora="x"))[1] == 8


# --- capacity -------------------------------------------------------------------------------------


def _fragmented(num_blocks: int) -> tuple[Any, list[Any]]:
    """A pool without a cache in which every second block is free."""
    manager = make_manager(num_blocks=num_blocks, block_size=BLOCK, enable_caching=False)
    requests = [ask(f"r{i}", other_tokens(i, BLOCK)) for i in range(num_blocks - 1)]
    for request in requests:
        assert admit(manager, request)[0] is not None
    by_block = sorted(requests, key=lambda request: row_of(manager, request))
    for request in by_block[::2]:
        manager.free(request)
    assert manager.pool.stats()["largest_hole_blocks"] == 1
    return manager, by_block[1::2]


def test_only_too_few_blocks_is_a_reason_to_refuse() -> None:
    """#41282: "cannot get N free blocks" after the check said they fit. What fits is given,
    whatever the holes look like; one block more is refused, and refusing raises nothing."""
    manager, _ = _fragmented(101)
    free = manager.block_pool.get_num_free_blocks()
    assert free == 50
    for blocks in range(1, free + 2):
        request = ask(f"b{blocks}", other_tokens(500 + blocks, blocks * BLOCK))
        new, _ = admit(manager, request)
        assert (new is None) == (blocks > free)
        if new is not None:
            assert len(ids_of(new)) == blocks
            manager.free(request)
    manager.check_invariants()


def test_larger_than_the_largest_hole_is_admitted() -> None:
    """#39734: a request that cannot be placed hangs the engine. Here it takes many ranges."""
    manager, _ = _fragmented(101)
    request = ask("big", other_tokens(500, 50 * BLOCK))
    assert admit(manager, request)[0] is not None
    assert manager.num_ranges("big") == (50,)
    assert manager.usage == 1.0


@pytest.mark.parametrize("gate", [True, False])
def test_larger_than_the_pool_is_refused_and_changes_nothing(gate: bool) -> None:
    """#39734, #35570: a request that no pool state can hold is never admitted whole, and asking for
    it costs nobody else anything. It is refused at the size where stock refuses it."""
    for build in (make_manager, make_stock):
        manager = build(num_blocks=9, block_size=BLOCK)
        cached = ask("cached", TOKENS[:16])
        admit(manager, cached)
        manager.free(cached)
        for count, fits in ((8 * BLOCK + 1, False), (8 * BLOCK, True)):
            request = ask(f"r{count}", other_tokens(1, count))
            new, _ = admit(manager, request, full_sequence_must_fit=gate)
            assert (new is not None) == fits
            if not fits:
                assert manager.block_pool.get_num_free_blocks() == 8
                assert manager.get_computed_blocks(ask("probe", TOKENS[:17]))[1] == 16


def test_a_request_as_large_as_the_pool_finishes(engine_configs: Any) -> None:
    """#39734, #35570: it waits for the pool, gets all of it, and does not hang, also when the pool
    was fragmented before. (Larger ones vLLM refuses: its model length must fit the pool.)"""
    side = tagma_side(engine_configs, num_blocks=33, max_num_batched_tokens=16)
    rng = random.Random(1)
    for i in range(12):
        tokens = other_tokens(i, rng.randint(1, 20))
        side.scheduler.add_request(ask(f"s{i}", tokens, max_tokens=rng.randint(1, 12)))
    for _ in range(4):
        run_step(side)
    length = side.scheduler.max_model_len
    assert length == 32 * BLOCK
    side.scheduler.add_request(ask("pool", TOKENS[: length - 20]))
    for _ in range(400):
        run_step(side)
    assert not side.scheduler.has_unfinished_requests()
    assert side.scheduler.kv_cache_manager.usage == 0.0


def test_long_prompts_do_not_preempt_each_other_in_a_loop(engine_configs: Any) -> None:
    """#21793, #37307: a long prompt is admitted in chunks, preempted, and starts over for ever. The
    full-sequence gate counts blocks, so it holds here as in stock."""
    side = tagma_side(engine_configs, num_blocks=33, max_num_batched_tokens=16)
    for i in range(2):
        side.scheduler.add_request(ask(f"long{i}", other_tokens(i, 80), max_tokens=4))
    steps = 0
    while side.scheduler.has_unfinished_requests():
        assert all(r.num_preemptions == 0 for r in side.scheduler.requests.values())
        run_step(side)
        steps += 1
        assert steps < 60


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_small_request_behind_a_large_one(engine_configs: Any, policy: str) -> None:
    """#31731, #35852: one KV-heavy request blocks all others. The order is the scheduler's, not the
    manager's, and the same on both: FCFS lets the small one wait, priority lets it overtake."""
    admitted = []
    for kind, config in ((TagmaScheduler, "tagma_config"), (Scheduler, "stock_config")):
        options = {"block_size": BLOCK, "num_blocks": 33, "async_scheduling": False}
        side = Side(build_scheduler(kind, engine_configs[config], policy=policy, **options))
        side.scheduler.add_request(ask("holder", other_tokens(0, 60), max_tokens=8))
        run_step(side)
        side.scheduler.add_request(ask("large", other_tokens(1, 100), max_tokens=2, priority=2))
        side.scheduler.add_request(ask("small", other_tokens(2, 8), max_tokens=2, priority=1))
        order: list[str] = []
        for _ in range(30):
            decided = side.step(0)
            order += [name for name, _, _ in decided["new"]]
            side.process()
        assert not side.scheduler.has_unfinished_requests()
        admitted.append(order)
    assert admitted[0] == admitted[1]
    assert admitted[0] == (["large", "small"] if policy == "fcfs" else ["small", "large"])


class _Watchdog(SchedulerTrace):
    """A free pool and waiting requests must lead to an admission."""

    starved = 0

    def _step(self) -> None:
        scheduler = self.tagma.scheduler
        idle = not scheduler.running and not self.tagma.steps
        waiting = bool(scheduler.waiting)
        super()._step()
        if idle and waiting:
            self.starved += 1
            assert self.decided["tokens"], "the pool is free, requests wait, and none was admitted"


@pytest.mark.parametrize("seed", range(900, 904))
def test_waiting_requests_are_admitted_to_a_free_pool(seed: int, engine_configs: Any) -> None:
    """#45414, #53130: running 0, usage 0 %, waiting > 0, and nothing happens any more."""
    trace = _Watchdog(seed, **engine_configs)
    trace.run()
    assert trace.starved > 0


# --- leaks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", itertools.permutations("wcrps"), ids="".join)
def test_aborts_in_any_order_leak_nothing(order: tuple[str, ...]) -> None:
    """#46283, #27073: usage creeps up after aborts. One request each that waits, is computed in
    part, runs, was preempted, and shares a prefix, aborted in every order; twice, as clients do."""
    manager = make_manager(num_blocks=65, block_size=BLOCK)
    requests = {
        name: ask(name, [*TOKENS[:12], *other_tokens(i, 20)]) for i, name in enumerate("wcrps")
    }
    manager.new_step_starts()
    admit(manager, requests["c"], num_tokens=9)
    admit(manager, requests["r"])
    admit(manager, requests["p"])
    manager.take_new_block_ids()
    manager.new_step_starts()
    decode(manager, requests["r"], 7)
    manager.free(requests["p"])
    requests["p"].status = RequestStatus.PREEMPTED
    admit(manager, requests["s"])
    manager.take_new_block_ids()
    for name in order:
        manager.free(requests[name])
        manager.free(requests[name])
        manager.check_invariants()
    assert manager.usage == 0.0
    assert manager.reset_prefix_cache()
    assert manager.pool.holes() == [(1, 64)]


def test_no_block_is_lost_in_a_soak() -> None:
    """kekzl/imp #1115: one block leaks per request, seen only after 2,000 of them."""
    manager = make_manager(num_blocks=33, block_size=BLOCK)
    rng = random.Random(3)
    for i in range(2_500):
        request = ask(f"r{i}", TOKENS[rng.randrange(300) :][: rng.randint(1, 90)])
        assert admit(manager, request)[0] is not None
        decode(manager, request, i)
        manager.free(request)
        assert manager.block_pool.get_num_free_blocks() == 32
    manager.check_invariants()
    assert manager.reset_prefix_cache()
    assert manager.pool.holes() == [(1, 32)]


def test_reset_succeeds_exactly_when_nothing_is_live() -> None:
    """#43302: reset_prefix_cache is refused while something pins a block, and stays refused."""
    manager = make_manager(num_blocks=65, block_size=BLOCK)
    a, b = ask("a", TOKENS[:16]), ask("b", TOKENS[:20])
    assert manager.reset_prefix_cache()
    admit(manager, a)
    assert not manager.reset_prefix_cache()
    admit(manager, b)
    manager.free(a)
    assert not manager.reset_prefix_cache()  # b still reads the shared prefix
    assert manager.get_computed_blocks(ask("probe", TOKENS[:17]))[1] == 16  # and nothing was lost
    manager.free(b)
    assert manager.usage == 0.0
    assert manager.reset_prefix_cache()
    assert manager.get_computed_blocks(ask("probe", TOKENS[:17]))[1] == 0
    assert manager.pool.holes() == [(1, 64)]


# --- events ---------------------------------------------------------------------------------------


def test_the_event_stream_replays_to_what_can_be_hit() -> None:
    """#55092, #48933, #45261: BlockRemoved while a copy is resident; reused blocks not reported. A
    consumer that counts always knows which prefixes hit, with duplicates and preemption."""
    rng = random.Random(5)
    manager = make_manager(num_blocks=25, block_size=BLOCK, enable_kv_cache_events=True)
    seen = ResidentSet()
    documents = [other_tokens(i, 41) for i in range(4)]
    live: list[Any] = []
    for i in range(600):
        manager.new_step_starts()
        tokens = rng.choice(documents)[: rng.randint(1, 40)]
        request = ask(f"r{i}", tokens, skip_reading=True if rng.random() < 0.3 else None)
        if admit(manager, request)[0] is not None:
            live.append(request)
        while live and rng.random() < 0.4:  # preempted, maybe in the step that admitted it
            manager.free(live.pop(rng.randrange(len(live))))
        manager.take_new_block_ids()
        while live and (len(live) > 3 or rng.random() < 0.3):
            manager.free(live.pop(rng.randrange(len(live))))
        if rng.random() < 0.02:
            manager.reset_prefix_cache()
        seen.replay(manager.take_events())
        assert seen.count.total() == manager.pool.stats()["cached_blocks"]
        for document in documents:
            probe = ask("probe", document)
            hit = manager.get_computed_blocks(probe)[1] // BLOCK
            resident = [seen.count[key] > 0 for key in event_keys(probe)]
            assert all(resident[:hit])
            assert not any(resident[hit : hit + 1])


# --- drift ----------------------------------------------------------------------------------------


def test_ranges_per_request_do_not_drift_upwards() -> None:
    """#31371, #40244: the free list is shuffled in long runs, so transfers need ever more
    descriptors. Requests grow token by token in a pool at about 80 %; their ranges are counted when
    they end."""
    rng = random.Random(7)
    manager = make_manager(num_blocks=1025, block_size=BLOCK)
    live: list[tuple[Any, int]] = []
    ranges: list[int] = []
    for i in range(24_000):
        if manager.usage < 0.8:
            request = ask(f"r{i}", other_tokens(i, rng.randint(4, 120)))
            admit(manager, request)
            live.append((request, rng.randint(1, 60)))
        index = rng.randrange(len(live))
        request, left = live[index]
        if left and decode(manager, request, i) is not None:
            live[index] = (request, left - 1)
        else:
            ranges += manager.num_ranges(request.request_id)
            manager.free(request)
            live.pop(index)
    quarter = len(ranges) // 4
    early, late = (
        sum(part) / quarter for part in (ranges[quarter : 2 * quarter], ranges[-quarter:])
    )
    assert quarter > 100
    assert late <= 1.2 * early, f"{early:.2f} ranges per request early, {late:.2f} late"
    manager.check_invariants()
