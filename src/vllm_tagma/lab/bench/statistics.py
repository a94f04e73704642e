"""Summaries of rounds: mean, standard deviation, median, extremes; ratios taken round by round.

Rounds of two variants alternate, so the ratio of each pair cancels what the machine did meanwhile;
the ratio of two medians would not.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple


class Summary(NamedTuple):
    """Of a sample: ``sd`` is the sample standard deviation, 0 for a single value; ``p10`` and
    ``p90`` interpolate linearly."""

    rounds: int
    mean: float
    sd: float
    median: float
    p10: float
    p90: float
    minimum: float
    maximum: float

    def to_json(self) -> dict[str, Any]:
        """As written to the result file."""
        return dict(self._asdict())


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value. Raises ValueError for none."""
    if not values:
        raise ValueError("a summary of no rounds: measure at least one")
    ordered = sorted(values)
    return Summary(
        rounds=len(ordered),
        mean=statistics.fmean(ordered),
        sd=statistics.stdev(ordered) if len(ordered) > 1 else 0.0,
        median=statistics.median(ordered),
        p10=quantile(ordered, 0.1),
        p90=quantile(ordered, 0.9),
        minimum=ordered[0],
        maximum=ordered[-1],
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of the sorted sample lies, linearly interpolated."""
    if not ordered or not 0.0 <= share <= 1.0:
        raise ValueError(f"quantile {share} of {len(ordered)} values")
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def ratios_of(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of the rounds that both variants have, in order. Raises ValueError on a zero."""
    pairs = list(zip(numerators, denominators, strict=False))
    if any(below <= 0 for _, below in pairs):
        raise ValueError("a round took no measurable time: raise the iterations")
    return [above / below for above, below in pairs]
