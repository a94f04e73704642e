"""Sections of the serve report about memory, kernels, requests and runs."""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from vllm_tagma.lab.bench_serve import serve_compare, serve_kernels
from vllm_tagma.lab.bench_serve.record import RunRecord, SeriesRecord
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS
from vllm_tagma.lab.report import serve_charts, serve_prose
from vllm_tagma.lab.report.document import Bullets, Figure, Section, Table

_GIB = 1 << 30
Blocks = list[str | Table | Figure | Bullets]
Samples = Mapping[str, list[dict[str, Any]]]


def number(value: float | None) -> str:
    """A figure for people: three or four digits that count; empty for None."""
    if value is None:
        return ""
    if value != 0 and abs(value) < 1:
        return f"{value:.3g}"
    if abs(value) < 100:
        return f"{value:.2f}".rstrip("0").rstrip(".")
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.1f}".rstrip("0").rstrip(".")


def memory_section(runs: Sequence[RunRecord], stages: Sequence[str], samples: Samples) -> Section:
    """KV blocks, hits, preemptions, ranges and memory by stage, and memory over time."""
    complete = [run for run in runs if run.is_complete and run.pair is not None]
    blocks: Blocks = []
    pools = {run.backend: (run.num_blocks, run.block_size) for run in complete}
    for backend, (blocks_of, size) in pools.items():
        if blocks_of and size:
            blocks.append(f"{backend}: {blocks_of:,} blocks of {size} positions.")
    blocks.append(
        Table(
            columns=["Stage", "Measure", *BACKENDS],
            rows=[
                [stage, title, *(_over_runs(complete, stage, backend, of) for backend in BACKENDS)]
                for stage in stages
                for title, of in _ROWS
                if any(_found(complete, stage, backend, of) for backend in BACKENDS)
            ],
            numeric=frozenset({2, 3}),
        )
    )
    blocks.append(serve_prose.MEMORY)
    figure = _memory_figure(complete, samples)
    if figure is not None:
        blocks.append(figure)
    return Section(title="KV cache and memory", blocks=blocks)


def _counter(name: str) -> Any:
    return lambda stage: stage.counters.get(name)


def _range(name: str) -> Any:
    return lambda stage: stage.ranges.get(name)


_ROWS: tuple[tuple[str, Any], ...] = (
    ("peak KV blocks in use", lambda s: s.kv.get("peak_blocks")),
    ("peak share of the pool (%)", lambda s: _times(s.kv.get("peak_usage"), 100)),
    ("prefix-hit rate (%)", lambda s: _times(serve_compare.hit_rate(s), 100)),
    ("preemptions", _counter("preemptions")),
    ("ranges a request held at its end, mean", _range("request_ranges_mean")),
    ("half of the requests held at most", _range("request_ranges_p50")),
    ("99 % of the requests held at most", _range("request_ranges_p99")),
    ("most ranges of a running request", _range("max_ranges_peak")),
    ("cached blocks evicted", _range("evicted_blocks_total")),
    ("blocks moved by compaction", _range("moved_blocks_total")),
    ("refused for the cap of ranges", _range("cap_refusals_total")),
    ("peak resident memory (GiB)", lambda s: _times(s.memory.get("rss_peak"), 1 / _GIB)),
    ("peak GPU memory (GiB)", lambda s: _times(s.memory.get("gpu_peak"), 1 / _GIB)),
)


def _times(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _found(runs: Sequence[RunRecord], stage: str, backend: str, of: Any) -> list[float]:
    values = [
        of(run.stages[stage]) for run in runs if run.backend == backend and stage in run.stages
    ]
    return [value for value in values if value is not None]


def _over_runs(runs: Sequence[RunRecord], stage: str, backend: str, of: Any) -> str:
    values = _found(runs, stage, backend, of)
    if not values:
        return "–"
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{number(statistics.median(values))} ({low}..{high})"


def _memory_figure(runs: Sequence[RunRecord], samples: Samples) -> Figure | None:
    panels = {}
    for title, key, factor in (
        ("KV blocks in use (% of the pool)", "kv_usage", 100.0),
        ("requests running", "running", 1.0),
        ("mean ranges of the running requests", "mean_ranges", 1.0),
        ("resident memory of the server (GiB)", "rss_bytes", 1 / _GIB),
        ("memory in use on the GPU (GiB)", "gpu_bytes", 1 / _GIB),
    ):
        lines = {
            backend: [
                _line(samples.get(run.name, []), key, factor)
                for run in runs
                if run.backend == backend
            ]
            for backend in BACKENDS
        }
        if any(line for by_run in lines.values() for line in by_run):
            panels[title] = lines
    if not panels:
        return None
    return Figure(
        name="memory",
        svg=serve_charts.over_time(panels),
        alt="KV use, running requests and memory over time, one line a run",
        caption="One line a run, the first run of a backend solid, later ones broken. Pauses are "
        "the client starting for the next stage.",
    )


def _line(samples: list[dict[str, Any]], key: str, factor: float) -> list[tuple[float, float]]:
    """Samples since the first one, which is taken when the server is ready."""
    return [
        (sample["t"] - samples[0]["t"], sample[key] * factor)
        for sample in samples
        if sample.get(key) is not None
    ]


def kernel_section(runs: Sequence[RunRecord]) -> Section | None:
    """Shares of a step by backend, and whether they justify range reads in attention."""
    recorded = {run.backend: run.kernels for run in runs if run.kernels and run.is_complete}
    if not recorded:
        return None
    shares = {backend: found["shares"] for backend, found in recorded.items()}
    rows = [
        [
            category,
            *(f"{found['shares'][category]:.2%}" for found in recorded.values()),
            *(f"{found['us'][category] / found['steps']:,.0f}" for found in recorded.values()),
        ]
        for category in serve_kernels.CATEGORIES
    ]
    steps = ", ".join(f"{found['steps']} of {backend}" for backend, found in recorded.items())
    on = next(iter(recorded.values()))["on"]
    return Section(
        title="Where a step goes",
        blocks=[
            _read_path_in_words(shares, on=on),
            Table(
                columns=[
                    "Part",
                    *(f"{b}, share" for b in recorded),
                    *(f"{b}, us a step" for b in recorded),
                ],
                rows=rows,
                numeric=frozenset(range(1, 1 + 2 * len(recorded))),
            ),
            Figure(
                name="kernels",
                svg=serve_charts.stacked_shares(shares),
                alt="Stacked bars: shares of a step by backend",
                caption=f"Recorded steps: {steps}.",
            ),
            f"{serve_prose.KERNELS_ON[on]} The profiler slows a step down, the host's part of it "
            "most; these runs are not part of the comparison above.",
            Table(
                columns=["Backend", "Longest kernels or operators", "ms"],
                rows=[
                    [backend, name, f"{us / 1000:,.1f}"]
                    for backend, found in recorded.items()
                    for name, us in found["top"][:6]
                ],
                numeric=frozenset({2}),
            ),
        ],
    )


def _read_path_in_words(shares: Mapping[str, Mapping[str, float]], *, on: str) -> str:
    backend = "tagma" if "tagma" in shares else next(iter(shares))
    ours = dict(shares[backend])
    bound = serve_kernels.best_case(ours)
    answer = "justifies" if bound >= serve_kernels.WORTH else "does not justify"
    where = "" if on == "gpu" else " This was a CPU; the question is asked of a GPU."
    return (
        f"The share {answer} range reads in attention by this rule: they would spare the table's "
        f"gather or expansion ({ours[serve_kernels.TABLE]:.2%} of a step of {backend}) and, as an "
        f"assumption, {serve_kernels.TABLE_LOADS:.0%} of attention "
        f"({ours[serve_kernels.ATTENTION]:.2%}) for its loads of block ids, {bound:.2%} together "
        f"at best; from {serve_kernels.WORTH:.0%} on they are worth building.{where}"
    )


def requests_section(series: SeriesRecord) -> Section | None:
    """The requests of each stage."""
    if not series.workload:
        return None
    return Section(
        title="Requests",
        blocks=[
            Table(
                columns=[
                    *("Stage", "Requests", "Prompt tokens", "least", "median", "most"),
                    *("Output tokens", "sha256"),
                ],
                rows=[
                    [
                        stage,
                        *(
                            f"{facts[key]:,}"
                            for key in (
                                *("requests", "prompt_tokens", "prompt_tokens_least"),
                                *("prompt_tokens_median", "prompt_tokens_most", "output_tokens"),
                            )
                        ),
                        facts["sha256"][:12],
                    ]
                    for stage, facts in series.workload.items()
                ],
                numeric=frozenset(range(1, 7)),
            ),
            "A number behind c in a stage's name is the requests in flight, behind r the arrivals "
            "a second. Requests of 'chat' share no prefix; those of 'turns' are conversations "
            "behind one system prompt, each turn repeating the ones before; 'outputs' has both, "
            "sent one by one.",
        ],
    )


def runs_section(series: SeriesRecord, runs: Sequence[RunRecord]) -> Section:
    """Every run with its times, failures with the end of their log, and the commands."""
    rows = [
        [
            run.name,
            run.started,
            number(run.start_seconds),
            *(number(run.stages[s].seconds) if s in run.stages else "" for s in series.workload),
            number(run.stop_seconds),
            run.error or "complete",
        ]
        for run in runs
    ]
    blocks: Blocks = [
        "Seconds of the server's start, of each stage (the client's start included), and of the "
        "stop.",
        Table(
            columns=["Run", "Started", "start", *series.workload, "stop", "Result"],
            rows=rows,
            numeric=frozenset(range(2, 4 + len(series.workload))),
        ),
    ]
    for run in runs:
        if run.log_tail:
            blocks += [
                f"The end of the log of {run.name}:",
                Bullets(items=run.log_tail.split("\n")),
            ]
    first = {run.backend: run for run in reversed(runs) if run.commands}
    blocks.append(
        Table(
            columns=["Command", "Words"],
            rows=[
                [f"{backend}: {name}", shlex.join(words)]
                for backend, run in sorted(first.items())
                for name, words in run.commands.items()
                if name == "server" or backend == BACKENDS[0]
            ],
        )
    )
    return Section(title="Runs", blocks=blocks)
