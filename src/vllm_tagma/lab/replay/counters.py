"""What a replay counted, as plain values: the same for the same input, and the times apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from vllm_tagma.lab.replay.drive import TIMED_EVERY, Replay
from vllm_tagma.lab.replay.model_groups import group_name, group_regions


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Mean and nearest-rank percentiles (each a value that occurred)."""

    mean: float
    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: npt.NDArray[Any]) -> Spread:
        """Of at least no value; all zero for none."""
        if not len(values):
            return cls(mean=0.0, p50=0, p95=0, p99=0, max=0)
        p50, p95, p99 = np.percentile(values, (50, 95, 99), method="inverted_cdf").tolist()
        return cls(mean=float(values.mean()), p50=p50, p95=p95, p99=p99, max=values.max().item())


@dataclass(frozen=True, kw_only=True)
class GroupCounters:
    """The ranges of a request's row in one KV-cache group."""

    name: str
    regions: int
    own_ranges: Spread
    total_ranges: Spread


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Counts of one backend; no time enters, so equal inputs give equal counters.

    ``docs/replay.md`` says what each means and when it is taken.
    """

    requests: int
    """Requests that ended with a row: finished, or aborted after admission."""
    unfit: int
    stuck: int
    steps: int
    scheduled_tokens: int
    own_ranges: Spread
    total_ranges: Spread
    one_range_share: float
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    preemptions: int
    concurrency: float
    live_occupancy: float
    evicted_blocks: int
    moved_blocks: int
    descriptors: Spread
    groups: list[GroupCounters]


@dataclass(frozen=True, kw_only=True)
class Times:
    """Host times of one backend; they differ from run to run."""

    wall_seconds: float
    requests_per_second: float
    step_us: Spread
    """``schedule()`` and ``update_from_output()``, without the steps whose calls were timed."""
    calls: dict[str, dict[str, float]]
    """By method: number of calls timed and microseconds a call."""
    calls_timed_every_steps: int = TIMED_EVERY


def counters_of(replay: Replay, *, regions: int) -> Counters:
    """Counters of a replay that has run. ``regions``: stretches of memory that hold a block, the
    same for all groups; 0: keys and values of the group's layers. O(requests + steps + blocks of
    the pool)."""
    probe = replay.probe
    own = np.asarray(probe.own)
    live = np.asarray(replay.live)
    edge = len(live) // 10
    middle = live[edge : len(live) - edge]
    prompt, hit = sum(replay.admitted_tokens), sum(replay.hit_tokens)
    total = np.asarray(probe.total)
    groups = [
        GroupCounters(
            name=group_name(group),
            regions=regions or group_regions(group),
            own_ranges=Spread.of(np.asarray(probe.group_own[index])),
            total_ranges=Spread.of(np.asarray(probe.group_total[index])),
        )
        for index, group in enumerate(replay.groups)
    ]
    descriptors = sum(
        group.regions * np.asarray(probe.group_total[index]) for index, group in enumerate(groups)
    )
    return Counters(
        requests=len(own),
        unfit=len(replay.unfit),
        stuck=len(replay.stuck),
        steps=replay.step,
        scheduled_tokens=replay.scheduled_tokens,
        own_ranges=Spread.of(own),
        total_ranges=Spread.of(total),
        one_range_share=float((own <= len(groups)).mean()) if len(own) else 0.0,
        prompt_tokens=prompt,
        hit_tokens=hit,
        hit_rate=hit / prompt if prompt else 0.0,
        preemptions=replay.preemptions,
        concurrency=float(np.mean(replay.running)) if replay.step else 0.0,
        live_occupancy=float(middle.mean()) if len(middle) else 0.0,
        evicted_blocks=replay.view.evicted(),
        moved_blocks=replay.view.moved(),
        descriptors=Spread.of(np.asarray(descriptors)),
        groups=groups,
    )


def times_of(replay: Replay, *, wall_seconds: float) -> Times:
    """Times of a replay that has run."""
    calls: dict[str, dict[str, float]] = {}
    for name, record in replay.probe.call_times.items():
        per_call = record.total_ns / record.calls / 1e3 if record.calls else 0.0
        calls[name] = {"calls": record.calls, "us": per_call}
    return Times(
        wall_seconds=wall_seconds,
        requests_per_second=replay.ended / wall_seconds if wall_seconds else 0.0,
        step_us=Spread.of(np.asarray(replay.step_ns) / 1e3),
        calls=calls,
    )
