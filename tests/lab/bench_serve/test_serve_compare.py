"""Intervals and verdicts, against tables and by cases worked out by hand."""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Sequence

import pytest

from vllm_tagma.lab.bench_serve import serve_compare
from vllm_tagma.lab.bench_serve.record import RunRecord, StageRecord
from vllm_tagma.lab.bench_serve.serve_compare import GAIN, LOSS, PARITY, UNKNOWN, Interval


def run(index: int, backend: str, pair: int | None, *, error: str | None = None, **client):
    return RunRecord(
        index=index,
        name=f"{index:02d}-{backend}",
        backend=backend,
        pair=pair,
        started="",
        stages={"chat-c4": StageRecord(seconds=1.0, client=client)},
        error=error,
    )


def series(paged: Sequence[float], tagma: Sequence[float]) -> list[RunRecord]:
    """Runs whose output throughput is given, pair by pair."""
    return [
        run(2 * pair + place, backend, pair, output_throughput=values[pair])
        for pair in range(len(paged))
        for place, (backend, values) in enumerate((("paged", paged), ("tagma", tagma)))
    ]


def throughput(runs: Sequence[RunRecord]) -> serve_compare.Row:
    return serve_compare.rows_of(runs, stages=["chat-c4"], confidence=0.95)[0]


@pytest.mark.parametrize(
    ("level", "pairs", "t"),  # from printed tables
    [
        (0.95, 2, 12.706),
        (0.95, 3, 4.303),
        (0.95, 4, 3.182),
        (0.99, 5, 4.604),
        (0.90, 8, 1.895),
        (0.95, 31, 2.042),
    ],
)
def test_an_interval_extends_by_t_standard_errors(level: float, pairs: int, t: float) -> None:
    logs = [0.01 * (-1) ** pair for pair in range(pairs)]
    interval = serve_compare.interval_of([math.exp(x) for x in logs], [1.0] * pairs, level=level)
    assert interval is not None
    error = statistics.stdev(logs) / math.sqrt(pairs)
    assert math.log(interval.high / interval.ratio) / error == pytest.approx(t, abs=6e-4)
    assert math.log(interval.ratio / interval.low) / error == pytest.approx(t, abs=6e-4)


def test_without_scipy_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scipy.special", None)
    with pytest.raises(serve_compare.CompareError, match=r"pip install 'vllm-tagma\[bench\]'"):
        throughput(series([100.0, 100.0], [110.0, 111.0]))


def test_the_interval_of_two_pairs_by_hand() -> None:
    interval = serve_compare.interval_of([110.0, 120.0], [100.0, 100.0], level=0.95)
    assert interval is not None
    a, b = math.log(1.1), math.log(1.2)
    half = 12.7062 * (abs(a - b) / math.sqrt(2)) / math.sqrt(2)
    assert interval.ratio == pytest.approx(math.sqrt(1.1 * 1.2))
    assert math.log(interval.low) == pytest.approx((a + b) / 2 - half, abs=1e-4)
    assert math.log(interval.high) == pytest.approx((a + b) / 2 + half, abs=1e-4)


def test_ratios_are_taken_within_pairs() -> None:
    # A machine that halves its speed after the first pair changes neither ratio.
    row = throughput(series([100.0, 50.0], [110.0, 55.0]))
    assert row.interval is not None
    assert row.interval.ratio == pytest.approx(1.1)
    assert row.interval.high == pytest.approx(1.1)


def test_a_failed_run_takes_its_pair_with_it() -> None:
    runs = series([100.0, 100.0, 100.0], [110.0, 111.0, 990.0])
    runs[4].error = "died"
    row = throughput(runs)
    assert row.interval is not None
    assert row.interval.pairs == 2
    assert row.interval.ratio < 1.2
    assert row.tagma == [110.0, 111.0, 990.0]  # shown, though not compared


def test_one_pair_is_no_comparison() -> None:
    row = throughput(series([100.0], [110.0]))
    assert row.interval is None
    (verdict,) = serve_compare.verdicts([row], margin=0.01, confidence=0.95)
    assert verdict.word == UNKNOWN
    assert serve_compare.overall([verdict]) == UNKNOWN


def test_recorded_runs_and_zeros_are_left_out() -> None:
    runs = [*series([100.0, 100.0], [110.0, 0.0]), run(9, "tagma", None, output_throughput=1.0)]
    row = throughput(runs)
    assert row.interval is None
    assert row.tagma == [110.0, 0.0]


@pytest.mark.parametrize(
    ("interval", "higher_is_better", "word"),
    [
        (Interval(1.10, 1.05, 1.15, 3), True, GAIN),
        (Interval(1.10, 1.05, 1.15, 3), False, LOSS),
        (Interval(0.90, 0.85, 0.95, 3), True, LOSS),
        (Interval(0.90, 0.85, 0.95, 3), False, GAIN),
        (Interval(1.10, 0.99, 1.22, 3), True, PARITY),
        (Interval(0.90, 0.80, 1.01, 3), True, PARITY),
        (Interval(1.005, 1.004, 1.006, 3), True, PARITY),  # certain, but below the margin
        (Interval(0.995, 0.994, 0.996, 3), True, PARITY),
        (None, True, UNKNOWN),
    ],
)
def test_the_rule_for_a_measure(interval: Interval, higher_is_better: bool, word: str) -> None:
    assert serve_compare.judge(interval, margin=0.01, higher_is_better=higher_is_better) == word


@pytest.mark.parametrize(
    ("words", "word"),
    [
        ([GAIN, LOSS, PARITY], LOSS),
        ([GAIN, PARITY], GAIN),
        ([PARITY, UNKNOWN], PARITY),
        ([UNKNOWN], UNKNOWN),
        ([], UNKNOWN),
    ],
)
def test_the_rule_for_the_series(words: list[str], word: str) -> None:
    assert (
        serve_compare.overall([serve_compare.Verdict(w, None, None, 0.95) for w in words]) == word
    )


def test_many_primary_measures_need_wider_intervals() -> None:
    ratios = [1.04, 1.06, 1.05, 1.055]
    runs = series([100.0] * 4, [100.0 * ratio for ratio in ratios])
    row = throughput(runs)
    alone = serve_compare.verdicts([row], margin=0.01, confidence=0.95)
    assert (alone[0].word, alone[0].level) == (GAIN, pytest.approx(0.95))
    among = serve_compare.verdicts([row] * 200, margin=0.01, confidence=0.95)
    assert among[0].level == pytest.approx(1 - 0.05 / 200)
    assert among[0].word == PARITY
    direct = serve_compare.interval_of(row.tagma, row.paged, level=among[0].level)
    assert among[0].interval == pytest.approx(direct)


def test_less_is_better_for_times() -> None:
    runs = [
        run(2 * pair + place, backend, pair, p50_ttft_ms=value + pair)
        for pair in range(3)
        for place, (backend, value) in enumerate((("paged", 100.0), ("tagma", 50.0)))
    ]
    rows = serve_compare.rows_of(runs, stages=["chat-c4"], confidence=0.95)
    assert [row.measure.key for row in rows] == ["ttft_p50"]
    (verdict,) = serve_compare.verdicts(rows, margin=0.01, confidence=0.95)
    assert verdict.word == GAIN


def test_hit_rate() -> None:
    counters = {"prefix_queries": 200.0, "prefix_hits": 50.0}
    assert serve_compare.hit_rate(StageRecord(seconds=1.0, counters=counters)) == 0.25
    assert (
        serve_compare.hit_rate(StageRecord(seconds=1.0, counters={"prefix_queries": 0.0})) is None
    )
    assert serve_compare.hit_rate(StageRecord(seconds=1.0)) is None
