"""Summaries of rounds: mean, standard deviation, median, extremes; ratios taken round by round.

Rounds of two variants alternate, so the ratio of each pair cancels what the machine did meanwhile;
the ratio of two medians would not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


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


def summarise(values: Sequence[float]) -> Summary:
    """The summary of at least one value. Raises ValueError for none."""
    if not values:
        raise ValueError("a summary of no rounds: measure at least one")
    sample = np.sort(np.asarray(values, dtype=np.float64))
    p10, median, p90 = np.quantile(sample, (0.1, 0.5, 0.9)).tolist()
    return Summary(
        rounds=len(sample),
        mean=float(sample.mean()),
        sd=float(sample.std(ddof=1)) if len(sample) > 1 else 0.0,
        median=median,
        p10=p10,
        p90=p90,
        minimum=float(sample[0]),
        maximum=float(sample[-1]),
    )


def ratios_of(numerators: Sequence[float], denominators: Sequence[float]) -> list[float]:
    """Ratios of the rounds that both variants have, in order. Raises ValueError on a zero."""
    pairs = list(zip(numerators, denominators, strict=False))
    if any(below <= 0 for _, below in pairs):
        raise ValueError("a round took no measurable time: raise the iterations")
    return [above / below for above, below in pairs]
