"""What the clock calls, how often and in which order; never how long it takes."""

from __future__ import annotations

import gc

import pytest

from vllm_tagma.lab.bench import bench_timing
from vllm_tagma.lab.bench.bench_timing import Sample, measure_rounds, timed_calls


def test_rounds_alternate_and_reverse() -> None:
    order: list[str] = []

    def measure(name: str) -> Sample:
        order.append(name)
        return Sample(value=float(len(order)), counters={"seen": float(len(order))})

    ends: list[int] = []
    variants = measure_rounds(
        {"a": lambda: measure("a"), "b": lambda: measure("b")},
        rounds=3,
        on_round=lambda: ends.append(len(order)),
    )
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert ends == [2, 4, 6]
    assert variants["a"].rounds == [1.0, 4.0, 5.0]
    assert variants["b"].rounds == [2.0, 3.0, 6.0]
    assert variants["b"].counters == {"seen": 6.0}


def test_the_collector_is_off_inside_and_on_again_after_an_error() -> None:
    assert gc.isenabled()
    seen: list[bool] = []

    def fail() -> Sample:
        seen.append(gc.isenabled())
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        measure_rounds({"a": fail}, rounds=1)
    assert seen == [False]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0


def test_one_warm_up_call_a_round() -> None:
    calls: list[str] = []
    sample = timed_calls(lambda: calls.append("call"), iterations=4)
    assert len(calls) == 5
    assert sample.value > 0


def test_preparation_surrounds_every_call() -> None:
    calls: list[str] = []
    timed_calls(
        lambda: calls.append("call"),
        iterations=2,
        prepare=lambda: calls.append("prepare"),
        finish=lambda: calls.append("finish"),
    )
    assert calls == ["prepare", "call", "finish"] * 3


@pytest.mark.parametrize("bad", [0, -1])
def test_nothing_to_time_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="below 1"):
        timed_calls(lambda: None, iterations=bad)
    with pytest.raises(ValueError, match="below 1"):
        measure_rounds({}, rounds=bad)


@pytest.mark.parametrize("prepared", [False, True])
def test_the_warm_up_call_is_not_counted(monkeypatch: pytest.MonkeyPatch, prepared: bool) -> None:
    """On a clock of our own: the first call takes 1,000 ns, each later one 10."""
    now = 0
    calls = 0
    monkeypatch.setattr(bench_timing, "perf_counter_ns", lambda: now)

    def call() -> None:
        nonlocal now, calls
        now += 10 if calls else 1_000
        calls += 1

    def prepare() -> None:
        nonlocal now
        now += 500  # off the clock

    sample = timed_calls(call, iterations=4, prepare=prepare if prepared else None)
    assert sample.value == 10.0
