"""Summaries and ratios, on samples whose answers are known."""

from __future__ import annotations

import pytest

from vllm_tagma.lab.bench.statistics import ratios_of, summarise


def test_summary_of_a_known_sample() -> None:
    summary = summarise([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0])
    assert summary.rounds == 8
    assert summary.mean == 5.0
    assert summary.sd == pytest.approx((32 / 7) ** 0.5)  # n - 1, not n
    assert summary.median == 4.5
    assert (summary.minimum, summary.maximum) == (2.0, 9.0)
    assert summary.p10 == pytest.approx(2.0 + 0.7 * 2.0)
    assert summary.p90 == pytest.approx(7.0 + 0.3 * 2.0)


def test_one_round_has_no_spread() -> None:
    summary = summarise([3.0])
    assert (summary.sd, summary.p10, summary.p90) == (0.0, 3.0, 3.0)


def test_order_does_not_matter() -> None:
    assert summarise([3.0, 1.0, 2.0]) == summarise([1.0, 2.0, 3.0])


def test_no_rounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rounds"):
        summarise([])


def test_ratios_pair_rounds_in_order() -> None:
    """The machine slows down by half in the last round: the ratios do not notice."""
    assert ratios_of([10.0, 10.0, 20.0], [1.0, 1.0, 2.0]) == [10.0, 10.0, 10.0]


def test_a_round_that_took_no_time_is_named() -> None:
    with pytest.raises(ValueError, match="raise the iterations"):
        ratios_of([1.0], [0.0])
