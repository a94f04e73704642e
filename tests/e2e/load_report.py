"""What a load has to show, and its table. Works on the report of load_run.py alone."""

from __future__ import annotations

import statistics
from typing import Any

Report = dict[str, Any]
MEMORY_GROWTH = 24 << 20
"""Bytes that a process may grow by between the second and the last quarter: allocators breathe, and
the API server keeps some figures of every request it served."""
RANGES_GROWTH = 1.25
"""Mean ranges of a request in the last quarter against those of the second."""
DRIFT_MINUTES = 5.0
"""Below that a quarter is too short for a mean."""


def quarters(series: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The measurements of each quarter of the time."""
    end = series[-1]["at"] + 1e-9
    found: list[list[dict[str, Any]]] = [[], [], [], []]
    for entry in series:
        found[int(4 * entry["at"] / end)].append(entry)
    return found


def ranges_by_quarter(series: list[dict[str, Any]]) -> list[float]:
    """Mean ranges of the requests that ended in each quarter."""
    found = []
    before = series[0]["metrics"]
    for quarter in quarters(series):
        after = quarter[-1]["metrics"] if quarter else before
        ended, ranges = (
            after[f"tagma_request_ranges_{name}"] - before[f"tagma_request_ranges_{name}"]
            for name in ("count", "sum")
        )
        found.append(ranges / ended if ended else 0.0)
        before = after
    return found


def memory_by_quarter(series: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Median resident bytes of each process in each quarter."""
    parts = quarters(series)
    return {
        name: [
            statistics.median([e["memory"][name] for e in part if name in e["memory"]] or [0])
            for part in parts
        ]
        for name in series[-1]["memory"]
    }


def check(report: Report) -> list[dict[str, Any]]:
    """Each law of the load: name, what was found, whether it holds."""
    counts, left, series = report["counts"], report["left"], report["series"]
    found: list[dict[str, Any]] = []

    def add(name: str, passed: bool, seen: object) -> None:
        found.append({"name": name, "passed": bool(passed), "found": str(seen)})

    kinds = {"chat", "agent", "long", "hang_up", "abort", "reset_running"}
    add("every kind of client came", kinds <= counts.keys(), counts)
    add("no request failed", not report["errors"], report["errors"][:3] or "none")
    add("no law was broken", not report["complaints"], report["complaints"][:3] or "none")
    last = left["after"]
    moved = last["tagma_moved_blocks_total.live"]
    add("blocks of running requests moved", moved > 0, f"{moved:.0f} blocks")
    add("requests were preempted", last["num_preemptions_total"] > 0, last["num_preemptions_total"])
    add(
        "every slot was audited, on both ranks",
        report["audits"].keys() == {"Worker_TP0", "Worker_TP1"},
        report["audits"],
    )
    add(
        "the end: nothing runs, no block is held",
        left["idle"] and not last["tagma_requests"] and not last["tagma_pool_blocks.live"],
        {n: last[n] for n in ("tagma_requests", "tagma_pool_blocks.live", "kv_cache_usage_perc")},
    )
    empty = left["empty"]
    whole = sum(empty[f"tagma_pool_blocks.{state}"] for state in ("live", "cached", "hole"))
    add(
        "after a reset the pool is one hole",
        left["reset"] and empty["tagma_largest_hole_blocks"] == whole and empty["tagma_holes"] == 1,
        f"{empty['tagma_holes']:.0f} holes, the largest of {empty['tagma_largest_hole_blocks']:.0f}"
        f" of {whole:.0f} blocks",
    )
    samples = report["samples"]
    stable = set(range(samples["count"])) - set(samples["stock_unstable"])
    for name, different in samples["different"].items():
        wrong = [n for n in different if n in stable]
        add(f"tokens of the samples: {name}", not wrong, f"{len(wrong)} of {len(stable)} differ")
    add(
        "the model's tokens do not depend on the batch",
        len(stable) >= 0.9 * samples["count"] and samples["count"] > 0,
        f"{samples['count'] - len(stable)} of {samples['count']} samples were left out",
    )
    if report["minutes"] >= DRIFT_MINUTES:
        for name, bytes_ in memory_by_quarter(series).items():
            growth = bytes_[3] - bytes_[1]
            add(f"no leak: {name}", growth <= MEMORY_GROWTH, f"{growth / 2**20:+.1f} MiB")
        ranges = ranges_by_quarter(series)
        add(
            "ranges of a request do not drift",
            ranges[3] <= RANGES_GROWTH * ranges[1],
            " ".join(f"{value:.2f}" for value in ranges),
        )
    return found


def table(report: Report) -> str:
    """The report as text."""
    last, seconds = report["left"]["after"], report["seconds"]
    rows = [
        ("minutes, seed", f"{report['minutes']:g}, {report['seed']}"),
        ("requests", ", ".join(f"{count} {kind}" for kind, count in report["counts"].items())),
        ("tokens of finished requests", f"{report['tokens']}"),
        ("seconds of a request", _spread(seconds)),
        ("preemptions", f"{last['num_preemptions_total']:.0f}"),
        (
            "blocks moved, live and cached",
            f"{last['tagma_moved_blocks_total.live']:.0f},"
            f" {last['tagma_moved_blocks_total.cached']:.0f}",
        ),
        ("blocks evicted", f"{last['tagma_evicted_blocks_total']:.0f}"),
        (
            "prefix hits",
            f"{last['prefix_cache_hits_total'] / last['prefix_cache_queries_total']:.1%}",
        ),
        (
            "ranges of a request, by quarter",
            " ".join(f"{value:.2f}" for value in ranges_by_quarter(report["series"])),
        ),
    ]
    rows += [
        (f"MiB of {name}, by quarter", " ".join(f"{value / 2**20:.1f}" for value in bytes_))
        for name, bytes_ in memory_by_quarter(report["series"]).items()
    ]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:{width}}  {value}" for name, value in rows]
    lines.append("")
    for found in report["checks"]:
        mark = "ok  " if found["passed"] else "FAIL"
        lines.append(f"{mark}  {found['name']}: {found['found']}")
    return "\n".join(lines)


def _spread(seconds: list[float]) -> str:
    if not seconds:
        return "none"
    middle, high = seconds[len(seconds) // 2], seconds[int(len(seconds) * 0.95)]
    return f"{middle:.2f} in the middle, {high:.2f} of 95 %, {seconds[-1]:.2f} at most"
