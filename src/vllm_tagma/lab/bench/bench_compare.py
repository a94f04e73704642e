"""``--compare OLD.json``: what moved between two runs.

A scenario has moved when the medians differ by more than both runs scatter: the bands between the
10th and the 90th percentile of the rounds must not touch, and the change must exceed 3 %. Ratios
against a baseline of the same run are compared where there are any, since they survive a change of
machine; otherwise the time of ours.
"""

from __future__ import annotations

from typing import NamedTuple

from vllm_tagma.lab.bench.schema import Result, Scenario
from vllm_tagma.lab.bench.statistics import Summary

LEAST_CHANGE = 0.03


class Change(NamedTuple):
    """One scenario in both runs. ``factor`` is new over old; ``verdict``: better, worse, same."""

    name: str
    measure: str
    old: float
    new: float
    factor: float
    verdict: str


class Comparison(NamedTuple):
    """Changes by scenario; names that only one run has; what differs between the environments."""

    changes: list[Change]
    only_old: list[str]
    only_new: list[str]
    environment: list[tuple[str, object, object]]


def compare(old: Result, new: Result) -> Comparison:
    """Compares two results, in the order of the new one."""
    before = {scenario.name: scenario for scenario in old.scenarios}
    after = {scenario.name: scenario for scenario in new.scenarios}
    return Comparison(
        changes=[
            change
            for name, scenario in after.items()
            if name in before
            for change in [_change(before[name], scenario)]
            if change is not None
        ],
        only_old=[name for name in before if name not in after],
        only_new=[name for name in after if name not in before],
        environment=_differences(old, new),
    )


def _change(old: Scenario, new: Scenario) -> Change | None:
    if old.unit != new.unit:
        return None
    old_ratio, new_ratio = old.ratio, new.ratio
    if old_ratio is not None and new_ratio is not None:
        return _judge(new.name, "ratio", old_ratio, new_ratio, higher_is_better=True)
    if old.ours not in old.variants or new.ours not in new.variants:
        return None
    return _judge(
        new.name,
        new.unit,
        old.variants[old.ours].summary,
        new.variants[new.ours].summary,
        higher_is_better=new.higher_is_better,
    )


def _judge(
    name: str, measure: str, old: Summary, new: Summary, *, higher_is_better: bool
) -> Change:
    factor = new.median / old.median if old.median else float("inf")
    apart = new.p10 > old.p90 or new.p90 < old.p10
    verdict = "same"
    if apart and abs(factor - 1.0) > LEAST_CHANGE:
        verdict = "better" if (factor > 1.0) == higher_is_better else "worse"
    return Change(name, measure, old.median, new.median, factor, verdict)


def _differences(old: Result, new: Result) -> list[tuple[str, object, object]]:
    """Leaves of the environment that differ; the load average always does and is left out."""
    before, after = dict(_leaves(old.environment)), dict(_leaves(new.environment))
    return [
        (key, before.get(key), after.get(key))
        for key in {**before, **after}
        if before.get(key) != after.get(key) and not key.endswith("load_average")
    ]


def _leaves(value: object, prefix: str = "") -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [
            leaf
            for key, inner in value.items()
            for leaf in _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
        ]
    return [(prefix, value)]
