"""From the runs to differences, confidence intervals and a verdict by a stated rule.

Runs come in pairs, neighbours in time. Of each pair the ratio tagma / paged is taken, so that what
the machine did meanwhile cancels; over the pairs, on the logarithm of the ratio, the mean and its
Student-t interval. Pairs are what is independent here: a server that starts anew, not a request.
With two pairs the t factor is 12.7, so that little can be shown; the report says what could.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench_serve.record import RunRecord, StageRecord
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS

GAIN, PARITY, LOSS = "gain", "parity within noise", "loss"
UNKNOWN = "not measured"


class CompareError(TagmaError, RuntimeError):
    """scipy is not installed."""


class Measure(NamedTuple):
    """One quantity of a stage. ``is_primary``: the verdict rests on it."""

    key: str
    title: str
    unit: str
    higher_is_better: bool
    is_primary: bool
    of: Callable[[StageRecord], float | None]


class Interval(NamedTuple):
    """A ratio tagma / paged over the pairs: geometric mean and its confidence interval."""

    ratio: float
    low: float
    high: float
    pairs: int


class Row(NamedTuple):
    """A measure of a stage: the values of the complete runs by backend, pair by pair."""

    stage: str
    measure: Measure
    paged: list[float]
    tagma: list[float]
    interval: Interval | None


class Verdict(NamedTuple):
    """One word for a primary row, or for all. ``level``: of the interval it rests on."""

    word: str
    row: Row | None
    interval: Interval | None
    level: float


def _client(key: str) -> Callable[[StageRecord], float | None]:
    return lambda stage: _finite(stage.client.get(key))


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def hit_rate(stage: StageRecord) -> float | None:
    """Prompt tokens found in the prefix cache, as a share of those looked up."""
    queries, hits = stage.counters.get("prefix_queries"), stage.counters.get("prefix_hits")
    return None if not queries or hits is None else hits / queries


MEASURES: Final[tuple[Measure, ...]] = (
    Measure(
        "output_throughput", "output tokens", "tokens/s", True, True, _client("output_throughput")
    ),
    Measure("ttft_p50", "time to first token, p50", "ms", False, True, _client("p50_ttft_ms")),
    Measure("ttft_p99", "time to first token, p99", "ms", False, False, _client("p99_ttft_ms")),
    Measure("tpot_p50", "time per output token, p50", "ms", False, True, _client("p50_tpot_ms")),
    Measure("tpot_p99", "time per output token, p99", "ms", False, False, _client("p99_tpot_ms")),
    Measure("itl_p50", "inter-token latency, p50", "ms", False, False, _client("p50_itl_ms")),
    Measure("itl_p99", "inter-token latency, p99", "ms", False, False, _client("p99_itl_ms")),
    Measure("e2el_p50", "whole request, p50", "ms", False, False, _client("p50_e2el_ms")),
    Measure("e2el_p99", "whole request, p99", "ms", False, False, _client("p99_e2el_ms")),
    Measure("request_throughput", "requests", "1/s", True, False, _client("request_throughput")),
    Measure(
        "total_throughput",
        "prompt and output tokens",
        "tokens/s",
        True,
        False,
        _client("total_token_throughput"),
    ),
)


def rows_of(runs: Sequence[RunRecord], *, stages: Sequence[str], confidence: float) -> list[Row]:
    """A row for each stage and measure that at least one complete run has."""
    rows = []
    for stage in stages:
        for measure in MEASURES:
            paged, tagma = paired(runs, stage=stage, of=measure.of)
            all_paged, all_tagma = (_values(runs, stage, name, measure.of) for name in BACKENDS)
            if all_paged or all_tagma:
                interval = interval_of(tagma, paged, level=confidence)
                rows.append(Row(stage, measure, all_paged, all_tagma, interval))
    return rows


def paired(
    runs: Sequence[RunRecord], *, stage: str, of: Callable[[StageRecord], float | None]
) -> tuple[list[float], list[float]]:
    """Values of the pairs of which both runs are complete: paged, tagma, in the same order."""
    by_pair: dict[int, dict[str, float]] = {}
    for run in runs:
        if run.pair is not None and run.is_complete and stage in run.stages:
            value = of(run.stages[stage])
            if value is not None:
                by_pair.setdefault(run.pair, {})[run.backend] = value
    whole = [pair for _, pair in sorted(by_pair.items()) if set(pair) == set(BACKENDS)]
    return [pair["paged"] for pair in whole], [pair["tagma"] for pair in whole]


def _values(
    runs: Sequence[RunRecord],
    stage: str,
    backend: str,
    of: Callable[[StageRecord], float | None],
) -> list[float]:
    found = [
        of(run.stages[stage])
        for run in runs
        if run.pair is not None
        and run.is_complete
        and run.backend == backend
        and stage in run.stages
    ]
    return [value for value in found if value is not None]


def interval_of(tagma: Sequence[float], paged: Sequence[float], *, level: float) -> Interval | None:
    """The interval of the ratios; None without two pairs, or with a value that is not positive.

    Raises :class:`CompareError` without scipy.
    """
    if len(tagma) < 2 or min(*tagma, *paged) <= 0:
        return None
    logs = [math.log(ours / theirs) for ours, theirs in zip(tagma, paged, strict=True)]
    mean, pairs = statistics.fmean(logs), len(logs)
    half = _t(level, pairs) * statistics.stdev(logs) / math.sqrt(pairs)
    return Interval(math.exp(mean), math.exp(mean - half), math.exp(mean + half), pairs)


def verdicts(rows: Sequence[Row], *, margin: float, confidence: float) -> list[Verdict]:
    """The verdict on each primary row, at a level at which all of them hold together.

    k intervals of level 1 - (1 - confidence) / k contain all true ratios with ``confidence`` at
    least (Bonferroni).
    """
    primary = [row for row in rows if row.measure.is_primary]
    level = 1.0 - (1.0 - confidence) / max(len(primary), 1)
    found = []
    for row in primary:
        interval = row.interval
        if interval is not None:
            interval = interval_at(interval, confidence, level)
        found.append(
            Verdict(
                judge(interval, margin=margin, higher_is_better=row.measure.higher_is_better),
                row,
                interval,
                level,
            )
        )
    return found


def interval_at(interval: Interval, level: float, other: float) -> Interval:
    """The interval of the same ratios at another level."""
    if interval.low == interval.high:
        return interval
    factor = _t(other, interval.pairs) / _t(level, interval.pairs)
    mean = math.log(interval.ratio)
    half = (math.log(interval.high) - mean) * factor
    return Interval(interval.ratio, math.exp(mean - half), math.exp(mean + half), interval.pairs)


def judge(interval: Interval | None, *, margin: float, higher_is_better: bool) -> str:
    """The rule for one measure.

    Gain: the whole interval lies on the better side of 1, and the ratio differs from 1 by more than
    ``margin``. Loss: the same on the worse side. Parity within noise: everything else, which says
    that no difference was shown, not that there is none.
    """
    if interval is None:
        return UNKNOWN
    is_apart = interval.low > 1.0 or interval.high < 1.0
    if not is_apart or abs(interval.ratio - 1.0) <= margin:
        return PARITY
    return GAIN if (interval.ratio > 1.0) == higher_is_better else LOSS


def overall(found: Sequence[Verdict]) -> str:
    """The rule for the series: loss if any primary measure is one, else gain if any is one, else
    parity within noise; not measured if nothing could be judged."""
    words = {verdict.word for verdict in found} - {UNKNOWN}
    if not words:
        return UNKNOWN
    return next((word for word in (LOSS, GAIN) if word in words), PARITY)


def _t(level: float, pairs: int) -> float:
    """How many standard errors an interval of ``level`` over ``pairs`` extends to either side."""
    try:
        from scipy.special import stdtrit
    except ImportError:
        raise CompareError(
            "Student's t of the intervals is scipy's, which is not installed; "
            "install it with: pip install 'vllm-tagma[bench]'"
        ) from None
    return float(stdtrit(pairs - 1, (1.0 + level) / 2.0))
