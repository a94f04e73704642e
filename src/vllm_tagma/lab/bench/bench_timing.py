"""The clock: rounds that alternate between the variants of a scenario, in one process.

A variant measures one round at a time and does its own preparation off the clock. Python's garbage
collector is switched off while rounds run, for every variant alike: where a collection falls is
chance, and the engine freezes its heap as well.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab.bench.schema import Variant


class BenchError(TagmaError, RuntimeError):
    """A scenario cannot be measured here, or what it compares does not agree."""


@dataclass(kw_only=True)
class Sample:
    """One round of one variant: ``value`` in the scenario's unit."""

    value: float
    counters: dict[str, float] = field(default_factory=dict)


Measure = Callable[[], Sample]
"""Measures one round, its warm-up call included."""


def measure_rounds(
    measures: Mapping[str, Measure],
    *,
    rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, Variant]:
    """Rounds of every variant, interleaved; the order is reversed every second round.

    Reversal keeps a drift of the machine from favouring whoever comes first.
    """
    if rounds < 1:
        raise ValueError(f"rounds={rounds} is below 1")
    variants = {name: Variant(rounds=[]) for name in measures}
    with quiet_collector():
        for number in range(rounds):
            names = list(measures)
            for name in names if number % 2 == 0 else reversed(names):
                sample = measures[name]()
                variants[name].rounds.append(sample.value)
                variants[name].counters = sample.counters
            on_round()
    return variants


@contextmanager
def quiet_collector() -> Iterator[None]:
    """No garbage collection inside; what is alive now is left out of later ones."""
    enabled = gc.isenabled()
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        if enabled:
            gc.enable()


def timed_calls(
    call: Callable[[], object],
    *,
    iterations: int,
    prepare: Callable[[], None] | None = None,
    finish: Callable[[], None] | None = None,
) -> Sample:
    """Nanoseconds a call over ``iterations`` calls, after one warm-up call.

    With ``prepare`` or ``finish``, which run off the clock around every call, each call is timed
    alone; the clock's own cost (about 0.1 us) is then part of it, so such calls should take long.
    """
    if iterations < 1:
        raise ValueError(f"iterations={iterations} is below 1")
    clock = perf_counter_ns
    if prepare is None and finish is None:
        call()
        begin = clock()
        for _ in range(iterations):
            call()
        return Sample(value=(clock() - begin) / iterations)
    total = 0
    for number in range(iterations + 1):
        if prepare is not None:
            prepare()
        begin = clock()
        call()
        spent = clock() - begin
        if finish is not None:
            finish()
        if number:  # the first is the warm-up
            total += spent
    return Sample(value=total / iterations)
