"""The step loop: arrivals, ends, limits, aborts, and requests that cannot be served."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vllm_tagma.lab.replay.drive import Replay
from vllm_tagma.lab.replay.replay_engine import build_scheduler
from vllm_tagma.lab.replay.replay_run import replay_backend
from vllm_tagma.lab.replay.replay_settings import Settings
from vllm_tagma.lab.replay.trace import Piece, TraceRequest
from vllm_tagma.lab.replay.views import view_of

SETTINGS = Settings(max_num_seqs=4, max_num_batched_tokens=256, watermark=0.0)
BLOCKS = 101


def request(index: int, prompt: int = 100, output: int = 10, **more: Any) -> TraceRequest:
    return TraceRequest(
        place=f"line {index}", prompt=(Piece(f"p{index}", prompt),), output_tokens=output, **more
    )


class Seen:
    """What the scheduler held at each step."""

    def __init__(self) -> None:
        self.max_tokens: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.times: dict[str, float] = {}

    def __call__(self, replay: Replay) -> None:
        for held in replay.scheduler.requests.values():
            self.max_tokens[held.request_id] = held.max_tokens
            self.tokens[held.request_id] = held.num_tokens
            self.computed[held.request_id] = held.num_computed_tokens
            self.times.setdefault(held.request_id, replay.clock)


@pytest.fixture(scope="module")
def varied() -> tuple[Any, Replay, Seen]:
    """Two at once; one with a limit of its own, two that go away, one after another."""
    requests = [
        request(0, output=7),
        request(1, output=9, max_tokens=33),
        request(2, output=50, abort_after=5),
        request(3, prompt=600, output=50, abort_after=0),
        request(4, output=1, after=0),
        request(5, prompt=16 * 99 + 10, output=7),
    ]
    seen = Seen()
    result, replay = replay_backend("paged", requests, SETTINGS, num_blocks=BLOCKS, on_step=seen)
    return result, replay, seen


def test_requests_end_as_the_trace_says(varied: tuple[Any, Replay, Seen]) -> None:
    result, replay, seen = varied
    # The last token's KV is never computed: at the last step a request holds one token less.
    assert seen.tokens["0"] == 100 + 6
    assert seen.tokens["1"] == 100 + 8
    assert seen.tokens["2"] == 100 + 4
    # Gone after the first chunk of its prompt.
    assert 0 < seen.computed["3"] <= SETTINGS.max_num_batched_tokens
    assert seen.tokens["4"] == 100
    assert replay.ended == 6
    assert result.counters.requests == 5
    assert replay.scheduler.requests == {}


def test_what_can_never_fit_is_named_and_left_out(varied: tuple[Any, Replay, Seen]) -> None:
    result, replay, seen = varied
    assert replay.unfit == [5]
    assert result.unfit == ["line 5"]
    assert "5" not in seen.tokens


def test_vllm_is_not_told_the_length(varied: tuple[Any, Replay, Seen]) -> None:
    _, _, seen = varied
    longest = 16 * 99 + 10 + 7
    assert seen.max_tokens["0"] == longest + 1 - 100
    assert seen.max_tokens["1"] == 33
    known = dataclasses.replace(SETTINGS, max_tokens="known")
    told = Seen()
    replay_backend("paged", [request(0, output=7)], known, num_blocks=BLOCKS, on_step=told)
    assert told.max_tokens["0"] == 7


def test_a_closed_loop_keeps_the_system_full_and_a_trace_keeps_its_times() -> None:
    # A step of a decode alone takes about 8 ms: the requests are a second apart.
    requests = [request(index, output=20, arrival=5.0 + index) for index in range(4)]
    closed, _ = replay_backend("paged", requests, SETTINGS, num_blocks=BLOCKS)
    assert closed.counters.concurrency > 2
    timed = dataclasses.replace(SETTINGS, arrivals="trace")
    seen = Seen()
    apart, replay = replay_backend("paged", requests, timed, num_blocks=BLOCKS, on_step=seen)
    assert apart.counters.concurrency == 1.0
    assert apart.counters.steps == 4 * 20
    assert seen.times["3"] == pytest.approx(3.0)
    assert 3.0 < replay.clock < 3.3
    # Ten times as fast they overlap.
    quick = dataclasses.replace(timed, speed=10.0)
    dense, _ = replay_backend("paged", requests, quick, num_blocks=BLOCKS)
    assert dense.counters.concurrency > 1.0


def test_a_request_that_is_never_admitted_is_given_up() -> None:
    scheduler = build_scheduler("tagma", SETTINGS, num_blocks=BLOCKS, max_model_len=1000)
    manager = scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def refuse(held: Any, *args: Any, **kwargs: Any) -> Any:
        return None if held.request_id == "1" else allocate(held, *args, **kwargs)

    manager.allocate_slots = refuse
    requests = [request(index) for index in range(4)]
    replay = Replay(scheduler, view_of(manager), requests, SETTINGS, capacity_blocks=BLOCKS - 1)
    replay.run(lambda ended: None)
    assert replay.stuck == [1]
    assert replay.ended == 4
    assert len(replay.probe.own) == 3


def test_calls_are_timed_in_some_steps_only() -> None:
    requests = [request(0, output=64)]
    result, replay = replay_backend("tagma", requests, SETTINGS, num_blocks=BLOCKS)
    assert result.counters.steps == 64
    calls = result.times.calls
    assert calls["allocate_slots"]["calls"] == 64 // 16
    # The last step ends the request and is a timed one.
    assert calls["free"]["calls"] == 1
    assert calls["free"]["us"] > 0
    assert len(replay.step_ns) == 64 - 64 // 16
    assert min(replay.step_ns) > 0
