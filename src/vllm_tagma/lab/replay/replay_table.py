"""Terminal output: counters side by side, then times, then what was left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vllm_tagma.lab.replay.counters import Spread
from vllm_tagma.lab.replay.result import BackendResult, Result

_Row = tuple[str, Callable[[BackendResult], str]]


def print_result(console: Console, result: Result) -> None:
    """The whole result."""
    settings = result.settings
    pool = f"{result.num_blocks:,} blocks of {settings.block_size} tokens"
    console.print(
        f"{result.trace.name} ({result.trace.kind}): {len(result.trace.requests):,} requests, "
        f"pool of {pool}, {settings.max_num_seqs} requests at most, "
        f"watermark {settings.watermark:g}, arrivals {settings.arrivals}",
        highlight=False,
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in result.backends:
        table.add_column(name, justify="right", no_wrap=True)
    results = list(result.backends.values())
    for label, cell in _rows(results):
        table.add_row(label, *(cell(backend) for backend in results))
    console.print(table)
    if {"paged", "tagma"} <= result.backends.keys():
        console.print(comparison(result), highlight=False)
    for line in _remarks(result):
        console.print(line, style="yellow", highlight=False)


def comparison(result: Result) -> str:
    """What tagma did against paged, in one line. Both must be in the result."""
    paged, tagma = (result.backends[name].counters for name in ("paged", "tagma"))
    fewer = paged.own_ranges.mean / tagma.own_ranges.mean if tagma.own_ranges.mean else 0.0
    return (
        f"tagma against paged: {fewer:.1f} times fewer own ranges, "
        f"hit rate {100 * (tagma.hit_rate - paged.hit_rate):+.2f} points, "
        f"preemptions {tagma.preemptions - paged.preemptions:+,}, "
        f"running requests {tagma.concurrency - paged.concurrency:+.2f}"
    )


def _rows(results: list[BackendResult]) -> Iterator[_Row]:
    for name, spread in (
        ("own ranges", lambda r: r.counters.own_ranges),
        ("total ranges", lambda r: r.counters.total_ranges),
    ):
        yield f"{name}: mean", _spread(spread, "mean")
        yield "  p50 / p95", _pair(spread, "p50", "p95")
        yield "  p99 / max", _pair(spread, "p99", "max")
    for index, group in enumerate(results[0].counters.groups):
        if len(results[0].counters.groups) > 1:
            yield f"own ranges: {group.name}", _own_of_group(index)
    yield "own part in one range", lambda r: f"{r.counters.one_range_share:.1%}"
    yield "prefix-hit rate (tokens)", lambda r: f"{r.counters.hit_rate:.2%}"
    yield "preemptions", lambda r: f"{r.counters.preemptions:,}"
    yield "running requests a step", lambda r: f"{r.counters.concurrency:.2f}"
    yield "live occupancy", lambda r: f"{r.counters.live_occupancy:.1%}"
    yield "blocks evicted", lambda r: f"{r.counters.evicted_blocks:,}"
    yield "blocks moved", lambda r: f"{r.counters.moved_blocks:,}"
    yield "descriptors a request: mean", _spread(lambda r: r.counters.descriptors, "mean")
    yield "steps", lambda r: f"{r.counters.steps:,}"
    yield (
        "step: mean / p99",
        lambda r: f"{r.times.step_us.mean:,.0f} / {r.times.step_us.p99:,.0f} us",
    )
    for name in results[0].times.calls:
        yield f"  {name}", _call(name)
    yield "replayed in", lambda r: f"{r.times.wall_seconds:,.1f} s"
    yield "requests a second", lambda r: f"{r.times.requests_per_second:,.1f}"


def _own_of_group(index: int) -> Callable[[BackendResult], str]:
    return lambda result: _number(result.counters.groups[index].own_ranges.mean)


def _spread(spread: Callable[[BackendResult], Spread], name: str) -> Callable[[BackendResult], str]:
    return lambda result: _number(getattr(spread(result), name))


def _pair(
    spread: Callable[[BackendResult], Spread], low: str, high: str
) -> Callable[[BackendResult], str]:
    return lambda r: f"{_number(getattr(spread(r), low))} / {_number(getattr(spread(r), high))}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1000 else f"{value:.3f}"


def _call(name: str) -> Callable[[BackendResult], str]:
    return lambda result: f"{result.times.calls[name]['us']:.2f} us"


def _remarks(result: Result) -> Iterator[str]:
    for name, backend in result.backends.items():
        if backend.unfit:
            yield (
                f"{name}: {len(backend.unfit)} requests need more than the whole pool and were "
                f"left out, the first at {backend.unfit[0]}; give more --memory"
            )
        if backend.stuck:
            yield (
                f"{name}: {len(backend.stuck)} requests were never admitted and given up, the "
                f"first at {backend.stuck[0]}"
            )
