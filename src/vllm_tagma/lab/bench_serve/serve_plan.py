"""Which servers run in which order, and which stages each one is put through.

Backends alternate as A B B A A B …: run 2k and run 2k + 1 form a pair, neighbours in time, and the
order inside the pairs alternates, so that a machine that warms up or slows down favours neither.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm_tagma.lab.bench_serve.profiles import GUESSES
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS, Settings

OUTPUTS = "outputs"
KERNELS = "kernels"
_STOP_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One call of the client. ``kind``: outputs, chat, turns or kernels.

    ``concurrency`` requests are in flight at most (None: no limit); ``rate`` is arrivals a second
    (None: as fast as the concurrency lets them).
    """

    name: str
    kind: str
    num_requests: int
    concurrency: int | None
    rate: float | None = None

    @property
    def is_measured(self) -> bool:
        """Whether its times count: not those of requests sent one by one, nor under a profiler."""
        return self.kind not in (OUTPUTS, KERNELS)


@dataclass(frozen=True, kw_only=True)
class Run:
    """One server. ``pair`` numbers the pair it belongs to, from 0; None for a recorded run."""

    index: int
    backend: str
    pair: int | None
    stages: tuple[Stage, ...]

    @property
    def name(self) -> str:
        """The run's folder."""
        suffix = "" if self.pair is not None else f"-{KERNELS}"
        return f"{self.index:02d}-{self.backend}{suffix}"


def stages_of(settings: Settings) -> tuple[Stage, ...]:
    """The stages of a measured run, in order.

    The requests that are sent one by one come first and warm the server up for the others.
    """
    stages = []
    if settings.output_requests:
        stages.append(
            Stage(name=OUTPUTS, kind=OUTPUTS, num_requests=settings.output_requests, concurrency=1)
        )
    for workload in settings.workloads:
        stages += [
            Stage(
                name=f"{workload}-c{load}",
                kind=workload,
                num_requests=settings.num_requests,
                concurrency=load,
            )
            for load in settings.concurrency
        ]
        stages += [
            Stage(
                name=f"{workload}-r{rate:g}",
                kind=workload,
                num_requests=settings.num_requests,
                concurrency=None,
                rate=rate,
            )
            for rate in settings.request_rate
        ]
    return tuple(stages)


def runs_of(settings: Settings) -> list[Run]:
    """All runs in order: ABBA, then one recorded run of each backend if asked for."""
    stages = stages_of(settings)
    first, second = BACKENDS
    order = [
        (pair, backend)
        for pair in range(settings.repeats)
        for backend in ((first, second) if pair % 2 == 0 else (second, first))
    ]
    runs = [
        Run(index=number, backend=backend, pair=pair, stages=stages)
        for number, (pair, backend) in enumerate(order, start=1)
    ]
    if settings.profile_kernels:
        stage = Stage(
            name=KERNELS,
            kind=KERNELS,
            num_requests=settings.profile_requests,
            concurrency=max(settings.concurrency, default=8),
        )
        runs += [
            Run(index=len(order) + number, backend=backend, pair=None, stages=(stage,))
            for number, backend in enumerate(BACKENDS, start=1)
        ]
    return runs


class TimeLeft:
    """How long the rest takes: by phases already seen, else by a guess of the profile.

    A phase is ``start``, ``stop`` or a stage's name.
    """

    def __init__(self, settings: Settings) -> None:
        self._start, self._stage = GUESSES.get(settings.profile, GUESSES["gpu-16k"])
        self._seen: dict[str, list[float]] = {}

    def learn(self, phase: str, seconds: float) -> None:
        """A phase took this long."""
        self._seen.setdefault(phase, []).append(seconds)

    def seconds_of(self, phase: str) -> float:
        """What a phase may take."""
        if seen := self._seen.get(phase):
            return sum(seen) / len(seen)
        return {"start": self._start, "stop": _STOP_SECONDS}.get(phase, self._stage)

    def seconds(self, runs: list[Run], *, done: Mapping[str, int] | None = None) -> float:
        """What ``runs`` may take; ``done`` maps a run's name to the phases it is through."""
        total = 0.0
        for run in runs:
            phases = ["start", *(stage.name for stage in run.stages), "stop"]
            total += sum(map(self.seconds_of, phases[(done or {}).get(run.name, 0) :]))
        return total


def differences(old: Any, new: Any, prefix: str = "") -> list[str]:
    """What differs between two plans as recorded, one line a value: ``name: old -> new``."""
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        return [
            line
            for key in {**old, **new}
            for line in differences(
                old.get(key), new.get(key), f"{prefix}.{key}" if prefix else str(key)
            )
        ]
    return [] if old == new else [f"{prefix}: {old!r} -> {new!r}"]
