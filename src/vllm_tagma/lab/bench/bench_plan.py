"""What is run: a scenario before it is measured, its sizes, and the run itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from vllm_tagma.lab.bench.bench_timing import Measure, measure_rounds
from vllm_tagma.lab.bench.schema import OURS, Scenario


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to measure. ``scale`` multiplies a scenario's calls a round."""

    quick: bool
    rounds: int
    scale: float

    def calls(self, full: int) -> int:
        """Calls a round, given those of the full run; at least one."""
        return max(1, int(full * self.scale))


FULL = Effort(quick=False, rounds=20, scale=1.0)
QUICK = Effort(quick=True, rounds=5, scale=0.25)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A scenario to run. ``open`` yields one measure per variant, and cleans up behind it.

    ``rounds`` caps the rounds for scenarios whose rounds are long. ``quick`` says whether the
    quick run includes it.
    """

    name: str
    group: str
    title: str
    iterations: int
    open: Callable[[], AbstractContextManager[Mapping[str, Measure]]]
    unit: str = "ns/call"
    ours: str = OURS
    baseline: str | None = None
    higher_is_better: bool = False
    target: float | None = None
    target_is_limit: bool = False
    note: str = ""
    rounds: int | None = None
    quick: bool = True

    def num_rounds(self, effort: Effort) -> int:
        """Rounds at this effort."""
        return effort.rounds if self.rounds is None else min(effort.rounds, self.rounds)


def selected(planned: Iterable[Planned], patterns: Iterable[str]) -> list[Planned]:
    """Those whose name contains one of the patterns; all, without patterns.

    Raises:
        ValueError: a pattern that matches nothing; the message lists the names.
    """
    everything, patterns = list(planned), list(patterns)
    for pattern in patterns:
        if not any(pattern in plan.name for plan in everything):
            names = ", ".join(plan.name for plan in everything)
            raise ValueError(f"no scenario matches {pattern!r}. There are: {names}")
    if not patterns:
        return everything
    return [plan for plan in everything if any(pattern in plan.name for pattern in patterns)]


def run(
    planned: Iterable[Planned],
    *,
    effort: Effort,
    on_start: Callable[[Planned], None] = lambda plan: None,
    on_round: Callable[[Planned], None] = lambda plan: None,
    on_end: Callable[[Planned, Scenario], None] = lambda plan, scenario: None,
) -> tuple[list[Scenario], dict[str, str]]:
    """Measures the scenarios in order; returns them, and the reason for each that was left out."""
    measured: list[Scenario] = []
    skipped: dict[str, str] = {}
    for plan in planned:
        if effort.quick and not plan.quick:
            skipped[plan.name] = "not part of --quick"
            continue
        on_start(plan)
        with plan.open() as measures:
            variants = measure_rounds(
                measures,
                rounds=plan.num_rounds(effort),
                on_round=lambda plan=plan: on_round(plan),  # type: ignore[misc]
            )
        scenario = Scenario(
            name=plan.name,
            group=plan.group,
            title=plan.title,
            unit=plan.unit,
            iterations=plan.iterations,
            ours=plan.ours,
            baseline=plan.baseline,
            higher_is_better=plan.higher_is_better,
            target=plan.target,
            target_is_limit=plan.target_is_limit,
            note=plan.note,
            variants=variants,
        )
        measured.append(scenario)
        on_end(plan, scenario)
    return measured, skipped


class Stopwatch:
    """Wall seconds since construction."""

    def __init__(self) -> None:
        self._begin = time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return time.monotonic() - self._begin
