"""What a replay counts, against a recount by other means."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.request import Request, RequestStatus

from vllm_tagma.config import Backend
from vllm_tagma.lab.bench.bench_requests import cache_config
from vllm_tagma.lab.replay import loads
from vllm_tagma.lab.replay.counters import Counters, counters_of
from vllm_tagma.lab.replay.drive import Hasher, Replay
from vllm_tagma.lab.replay.hashes import block_hashes
from vllm_tagma.lab.replay.replay_engine import build_scheduler
from vllm_tagma.lab.replay.replay_run import replay_backend
from vllm_tagma.lab.replay.replay_settings import Settings
from vllm_tagma.lab.replay.trace import Piece, TraceRequest
from vllm_tagma.lab.replay.views import TagmaView, view_of

BACKENDS: tuple[Backend, ...] = ("paged", "tagma")
SETTINGS = Settings(max_num_seqs=12, max_num_batched_tokens=2048, watermark=0.0, regions=10)


def _requests() -> list[TraceRequest]:
    """Turns of conversations, every ninth of them aborted: halfway, or right after admission."""
    requests = loads.generate("chat", requests=110, running=8, seed=5).requests
    for index in range(0, len(requests), 9):
        abort_after = requests[index].output_tokens // 2 if index % 2 else 0
        requests[index] = dataclasses.replace(requests[index], abort_after=abort_after)
    return requests


REQUESTS = _requests()
# Enough for the longest request alone, too little for twelve at once: requests are preempted.
BLOCKS = max(request.num_blocks(16) for request in REQUESTS) + 300


def runs(ids: list[int]) -> int:
    """Maximal runs of consecutive ascending ids, one by one."""
    return sum(1 for i, block in enumerate(ids) if i == 0 or block != ids[i - 1] + 1)


class Recount:
    """Follows every request through the scheduler's own outputs and its rows, block by block."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler
        self.ids: dict[str, list[int]] = {}
        self.hits: dict[str, int] = {}
        self.first_hits: dict[str, int] = {}
        self.running: list[int] = []
        self.live: list[float] = []
        self.preempted: Counter[str] = Counter()
        self._before: set[str] = set()
        self._schedule = scheduler.schedule
        scheduler.schedule = self._scheduled

    def _scheduled(self) -> Any:
        output = self._schedule()
        manager = self.scheduler.kv_cache_manager
        names = {request.request_id for request in self.scheduler.running}
        self.preempted.update(output.preempted_req_ids)
        for request in self.scheduler.running:
            name = request.request_id
            if name not in self._before or name in output.preempted_req_ids:
                hit = request.num_computed_tokens - output.num_scheduled_tokens[name]
                self.hits[name] = hit
                self.first_hits.setdefault(name, hit)
            self.ids[name] = manager.get_block_ids(name)[0]
        held = {block for name in names for block in self.ids[name]}
        self.running.append(len(names))
        self.live.append(len(held) / (BLOCKS - 1))
        self._before = names
        return output

    def ranges(self) -> tuple[list[int], list[int]]:
        """Own and total ranges of all requests, sorted."""
        own = [runs(ids[self.hits[name] // 16 :]) for name, ids in self.ids.items()]
        return sorted(own), sorted(runs(ids) for ids in self.ids.values())


def _run(backend: Backend, *, v2_runner: bool = False) -> tuple[Counters, Recount, Replay]:
    longest = max(r.prompt_tokens + r.output_tokens for r in REQUESTS)
    scheduler = build_scheduler(backend, SETTINGS, num_blocks=BLOCKS, max_model_len=longest + 1)
    if v2_runner:
        scheduler.use_v2_model_runner = True
    recount = Recount(scheduler)
    replay = Replay(
        scheduler,
        view_of(scheduler.kv_cache_manager),
        REQUESTS,
        SETTINGS,
        capacity_blocks=BLOCKS - 1,
    )
    replay.run(lambda ended: None)
    return counters_of(replay, regions=SETTINGS.regions), recount, replay


@pytest.fixture(scope="module", params=BACKENDS)
def recounted(request: pytest.FixtureRequest) -> tuple[Counters, Recount, Replay]:
    return _run(request.param)


def test_ranges(recounted: tuple[Counters, Recount, Replay]) -> None:
    counters, recount, replay = recounted
    own, total = recount.ranges()
    assert sorted(replay.probe.own) == own
    assert sorted(replay.probe.total) == total
    assert counters.requests == len(REQUESTS)
    assert counters.own_ranges.mean == pytest.approx(sum(own) / len(own))
    assert (counters.own_ranges.max, counters.own_ranges.p50) == (own[-1], own[(len(own) - 1) // 2])
    assert counters.total_ranges.p99 == total[-(-len(total) * 99 // 100) - 1]
    assert counters.one_range_share == pytest.approx(own.count(1) / len(own))
    assert counters.descriptors.max == SETTINGS.regions * total[-1]
    # Otherwise own and total are the same thing, and the test shows less than it seems to.
    assert any(hit >= 32 for hit in recount.hits.values())
    assert own != total


def test_hits_preemptions_concurrency_occupancy(
    recounted: tuple[Counters, Recount, Replay],
) -> None:
    counters, recount, _ = recounted
    assert counters.hit_tokens == sum(recount.first_hits.values())
    assert counters.prompt_tokens == sum(request.prompt_tokens for request in REQUESTS)
    assert 0 < counters.hit_rate == counters.hit_tokens / counters.prompt_tokens
    assert counters.preemptions == sum(recount.preempted.values())
    assert counters.preemptions > 0, "the pool of this test is too large"
    assert counters.steps == len(recount.running)
    assert counters.concurrency == pytest.approx(sum(recount.running) / counters.steps)
    edge = counters.steps // 10
    middle = recount.live[edge : counters.steps - edge]
    assert counters.live_occupancy == pytest.approx(sum(middle) / len(middle))


def test_evictions_leave_what_is_cached(recounted: tuple[Counters, Recount, Replay]) -> None:
    """Nothing is held at the end; what was published and is not cached any more was evicted."""
    counters, _, replay = recounted
    assert replay.view.live_share() == 0.0
    assert replay.scheduler.requests == {}
    cached = sum(replay.view.is_cached(block) for block in range(1, BLOCKS))
    assert 0 < cached < BLOCKS
    assert counters.evicted_blocks > BLOCKS
    # Every prompt's full blocks were published, but for those that were hit.
    least = sum(r.prompt_tokens // 16 for r in REQUESTS) - counters.hit_tokens // 16
    assert counters.evicted_blocks + cached >= least - sum(
        r.prompt_tokens // 16 for r in REQUESTS if r.abort_after is not None
    )


def test_the_same_input_gives_the_same_counters(
    recounted: tuple[Counters, Recount, Replay],
) -> None:
    """Also where vLLM schedules for Model Runner V2, which lists resumed requests as new ones."""
    counters, _, replay = recounted
    backend: Backend = "tagma" if isinstance(replay.view, TagmaView) else "paged"
    again, _, _ = _run(backend, v2_runner=True)
    assert dataclasses.asdict(again) == dataclasses.asdict(counters)


def _direct(requests: list[TraceRequest], num_blocks: int) -> tuple[list[int], int, int]:
    """vLLM's manager driven by hand, one request after the other: own ranges, hit tokens,
    evictions by its own events."""
    manager = KVCacheManager(
        cache_config(num_blocks, 16),
        max_model_len=1 << 20,
        scheduler_block_size=16,
        hash_block_size=16,
        enable_caching=True,
        enable_kv_cache_events=True,
    )
    own, hits, evicted = [], 0, 0
    for number, trace in enumerate(requests):
        pieces = (*trace.prompt, Piece(trace.output or f"\0{number}", trace.output_tokens))
        request = Request(
            request_id=str(number),
            prompt_token_ids=[0] * trace.prompt_tokens,
            sampling_params=SamplingParams(max_tokens=trace.output_tokens),
            pooling_params=None,
            block_hasher=Hasher(block_hashes(pieces, 16), 16),
        )
        blocks, hit, _ = manager.get_computed_blocks(request)
        hits += hit
        left = request.num_tokens - hit
        computed = {"num_new_computed_tokens": hit, "new_computed_blocks": blocks}
        while left:
            chunk = min(left, SETTINGS.max_num_batched_tokens)
            assert manager.allocate_slots(request, chunk, **computed) is not None
            request.num_computed_tokens += chunk + computed.get("num_new_computed_tokens", 0)
            request.status = RequestStatus.RUNNING
            left -= chunk
            computed = {}
        for _ in range(trace.output_tokens - 1):
            request.append_output_token_ids(0)
            assert manager.allocate_slots(request, 1) is not None
            request.num_computed_tokens += 1
        own.append(runs(manager.get_block_ids(str(number))[0][hit // 16 :]))
        manager.free(request)
        evicted += sum(
            len(event.block_hashes)
            for event in manager.take_events()
            if type(event).__name__ == "BlockRemoved"
        )
    return own, hits, evicted


def test_paged_equals_vllms_manager_driven_directly() -> None:
    """One request at a time, so that no scheduling is left to repeat."""
    requests = [request for request in REQUESTS if request.abort_after is None][:24]
    requests = [dataclasses.replace(request, after=None) for request in requests]
    num_blocks = max(request.num_blocks(16) for request in requests) + 40
    own, hits, evicted = _direct(requests, num_blocks)
    alone = dataclasses.replace(SETTINGS, max_num_seqs=1)
    result, replay = replay_backend("paged", requests, alone, num_blocks=num_blocks)
    assert list(replay.probe.own) == own
    assert result.counters.hit_tokens == hits > 0
    assert result.counters.evicted_blocks == evicted > 0
    assert result.counters.concurrency == 1.0
