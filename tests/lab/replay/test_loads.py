"""Generated loads: seeded, of the stated shape, and each turn after the one before."""

from __future__ import annotations

from statistics import mean

import pytest

from vllm_tagma.lab.replay import loads
from vllm_tagma.lab.replay.arrivals import Arrivals
from vllm_tagma.lab.replay.trace import Piece, TraceRequest


@pytest.mark.parametrize("kind", ["chat", "agent", "mixed"])
def test_the_seed_decides(kind: str) -> None:
    def make(seed: int) -> list[TraceRequest]:
        return loads.generate(kind, requests=200, running=8, seed=seed).requests

    assert make(1) == make(1)
    assert make(1) != make(2)


@pytest.mark.parametrize("kind", ["chat", "agent", "mixed"])
def test_a_turn_holds_the_turn_before_and_comes_after_it(kind: str) -> None:
    requests = loads.generate(kind, requests=400, running=8, seed=0).requests
    followed = 0
    for index, request in enumerate(requests):
        if request.after is None:
            continue
        followed += 1
        parent = requests[request.after]
        assert request.after < index
        assert parent.output is not None
        said = (*parent.prompt, Piece(parent.output, parent.output_tokens))
        assert request.prompt[: len(said)] == said
    assert followed > 100
    names = [request.output for request in requests if request.output]
    assert len(set(names)) == len(names)


def test_chat_turns_are_twenty_blocks_and_histories_grow() -> None:
    requests = loads.generate("chat", requests=4000, running=128, seed=0).requests
    turns = [request.prompt[-1].tokens + request.output_tokens for request in requests]
    assert 18 * 16 < mean(turns) < 22 * 16
    lengths = [request.prompt_tokens for request in requests]
    assert mean(lengths[2000:]) > 1.5 * mean(lengths[:500])


def test_agents_share_long_system_prompts() -> None:
    requests = loads.generate("agent", requests=500, running=16, seed=0).requests
    systems = {request.prompt[0] for request in requests}
    assert len(systems) == 3
    assert min(system.tokens for system in systems) >= 3000
    assert mean(request.output_tokens for request in requests) < 150


def _request(arrival: float, after: int | None = None) -> TraceRequest:
    return TraceRequest(
        place="", prompt=(Piece("a", 1),), output_tokens=1, arrival=arrival, after=after
    )


def test_arrivals_in_order_of_the_trace_and_after_their_parents() -> None:
    arrivals = Arrivals([_request(9), _request(5, 0), _request(1)], timed=False, speed=1.0)
    assert [arrivals.due(0.0) for _ in range(3)] == [0, 2, None]
    assert arrivals.next_time() is None
    arrivals.ended(0, 3.0)
    assert arrivals.next_time() == 0.0
    assert arrivals.due(3.0) == 1


def test_a_child_does_not_wait_for_all_later_roots() -> None:
    """Without times a chat's next turn keeps its place in the trace. It once went behind every
    conversation that had not begun, so that no history was still cached."""
    arrivals = Arrivals(
        [_request(0), _request(0, 0), _request(0), _request(0)], timed=False, speed=1.0
    )
    assert [arrivals.due(0.0), arrivals.due(0.0)] == [0, 2]
    arrivals.ended(0, 5.0)
    assert [arrivals.due(5.0), arrivals.due(5.0)] == [1, 3]


def test_arrivals_at_their_times() -> None:
    requests = [_request(110), _request(100), _request(140, 1), _request(104, 1)]
    arrivals = Arrivals(requests, timed=True, speed=2.0)
    assert [arrivals.due(0.0), arrivals.due(4.9), arrivals.due(5.0)] == [1, None, 0]
    arrivals.ended(1, 7.0)
    # The first child's time is still to come, the other's is past: it comes when its parent ended.
    assert arrivals.next_time() == 7.0
    assert [arrivals.due(7.0), arrivals.due(19.9), arrivals.due(20.0)] == [3, None, 2]
