"""What the serve report says: from the files of a series to a document.

Every figure comes from the files; sentences about them are built from the figures.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm_tagma.lab.bench_serve import serve_compare
from vllm_tagma.lab.bench_serve.outputs import Agreement
from vllm_tagma.lab.bench_serve.record import RunRecord, SeriesRecord
from vllm_tagma.lab.bench_serve.serve_compare import Interval, Row, Verdict
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS
from vllm_tagma.lab.report import prose, serve_charts, serve_prose
from vllm_tagma.lab.report.document import Bullets, Document, Figure, Section, Table
from vllm_tagma.lab.report.serve_sections import (
    kernel_section,
    memory_section,
    number,
    requests_section,
    runs_section,
)

Blocks = list[str | Table | Figure | Bullets]
Latencies = Mapping[str, Mapping[str, Mapping[str, list[list[float]]]]]


@dataclass(kw_only=True)
class SeriesData:
    """A series as read from disk.

    ``measured``: stages whose times count. ``latencies``: stage to quantity to backend to runs of
    milliseconds. ``samples``: run name to samples.
    """

    series: SeriesRecord
    runs: list[RunRecord]
    measured: list[str]
    agreements: list[Agreement]
    latencies: Latencies = field(default_factory=dict)
    samples: Mapping[str, list[dict[str, Any]]] = field(default_factory=dict)


def build(data: SeriesData) -> Document:
    """The report of a series, complete or not."""
    settings = data.series.settings
    rows = serve_compare.rows_of(data.runs, stages=data.measured, confidence=settings["confidence"])
    found = serve_compare.verdicts(
        rows, margin=settings["margin"], confidence=settings["confidence"]
    )
    sections = [
        _summary(data, found),
        _verdict_table(found),
        _side_by_side(rows, confidence=settings["confidence"]),
        _answers(data.agreements),
        _distributions(data),
        memory_section(data.runs, data.measured, data.samples),
        kernel_section(data.runs),
        requests_section(data.series),
        runs_section(data.series, data.runs),
        Section(title="Method", blocks=[*serve_prose.METHOD, *serve_prose.FALSIFIES]),
        _machine(data.series),
        Section(
            title="What is not shown",
            blocks=[Bullets(items=serve_prose.not_shown(data.series, data.runs))],
        ),
    ]
    return Document(
        title="vllm-tagma: paged against tagma, end to end",
        subtitle=_subtitle(data),
        sections=[section for section in sections if section is not None],
    )


def verdict_line(data: SeriesData) -> str:
    """The verdict in one line, for the terminal."""
    settings = data.series.settings
    rows = serve_compare.rows_of(data.runs, stages=data.measured, confidence=settings["confidence"])
    found = serve_compare.verdicts(
        rows, margin=settings["margin"], confidence=settings["confidence"]
    )
    return f"Verdict: {serve_compare.overall(found)}. {_answers_in_words(data.agreements)}"


def _subtitle(data: SeriesData) -> str:
    versions = data.series.environment.get("versions", {})
    machine = data.series.environment.get("machine", {})
    gpus = data.series.environment.get("gpus") or []
    where = ", ".join(gpu["name"] for gpu in gpus) or machine.get("cpu")
    settings = data.series.settings
    return (
        f"vLLM {versions.get('vllm')} with vllm-tagma {versions.get('vllm_tagma')}, "
        f"{settings['model'].rstrip('/').rpartition('/')[2]}, profile "
        f"{settings['profile'] or 'none'}, begun {data.series.created} on {where}, "
        f"{data.series.seconds:.0f} s."
    )


def _summary(data: SeriesData, found: Sequence[Verdict]) -> Section:
    word = serve_compare.overall(found)
    complete = sum(run.is_complete and run.pair is not None for run in data.runs)
    wanted = 2 * data.series.settings["repeats"]
    blocks: Blocks = [f"Verdict: {word}. {_reasons(word, found)}"]
    blocks.append(_answers_in_words(data.agreements))
    if complete < wanted:
        blocks.append(
            f"Only {complete} of {wanted} runs are complete: read this as an interim report."
        )
    if found:
        blocks.append(
            serve_prose.rule(
                margin=data.series.settings["margin"],
                confidence=data.series.settings["confidence"],
                primary=len(found),
                level=found[0].level,
            )
        )
    return Section(title="In short", blocks=blocks)


def _reasons(word: str, found: Sequence[Verdict]) -> str:
    if word in (serve_compare.GAIN, serve_compare.LOSS):
        deciding = [v for v in found if v.word == word and v.row is not None]
        return (
            "It rests on "
            + "; ".join(
                f"{v.row.stage}, {v.row.measure.title} {_percent(v.interval)}"
                for v in deciding
                if v.row is not None
            )
            + "."
        )
    noisiest = max(
        (v.interval for v in found if v.interval),
        key=lambda interval: interval.high / interval.ratio,
        default=None,
    )
    if word == serve_compare.UNKNOWN or noisiest is None:
        return "There are not two pairs of complete runs to compare."
    return (
        "No primary measure shows a difference beyond the noise of these runs. In the noisiest of "
        f"them only a difference of {_resolution(noisiest)} would have shown, so this is no proof "
        "that there are none."
    )


def _verdict_table(found: Sequence[Verdict]) -> Section | None:
    rows = []
    for verdict in found:
        row, interval = verdict.row, verdict.interval
        if row is None:
            continue
        rows.append(
            [
                row.stage,
                f"{row.measure.title} ({row.measure.unit})",
                _median(row.paged),
                _median(row.tagma),
                _percent(interval),
                _bounds(interval),
                _resolution(interval),
                verdict.word,
            ]
        )
    if not rows:
        return None
    return Section(
        title="Verdict by measure",
        blocks=[
            Table(
                columns=[
                    *("Stage", "Measure", "paged", "tagma", "Difference"),
                    f"{found[0].level:.2%} interval",
                    "Would show from",
                    "Verdict",
                ],
                rows=rows,
                numeric=frozenset({2, 3, 4, 5, 6}),
            )
        ],
    )


def _side_by_side(rows: Sequence[Row], *, confidence: float) -> Section | None:
    if not rows:
        return None
    return Section(
        title="Side by side",
        blocks=[
            "Medians of the runs, with the least and the greatest run. Differences are of tagma "
            "against paged; for times less is better.",
            Table(
                columns=[
                    *("Stage", "Measure", "paged", "runs", "tagma", "runs", "Difference"),
                    f"{confidence:.0%} interval",
                ],
                rows=[
                    [
                        row.stage,
                        f"{row.measure.title} ({row.measure.unit})",
                        _median(row.paged),
                        _extremes(row.paged),
                        _median(row.tagma),
                        _extremes(row.tagma),
                        _percent(row.interval),
                        _bounds(row.interval),
                    ]
                    for row in rows
                ],
                numeric=frozenset(range(2, 8)),
            ),
        ],
    )


def _answers_in_words(agreements: Sequence[Agreement]) -> str:
    strict = [a for a in agreements if a.must_be_identical]
    if not strict:
        return "No requests were sent one by one, so whether answers agree was not tested."
    (one_by_one,) = strict
    n = one_by_one.requests
    if one_by_one.is_identical:
        return (
            f"Answers: all {n} requests that were sent one by one got the same text from both "
            "backends, in every run."
        )
    return (
        f"Answers DIFFER: {one_by_one.across} of {n} requests that were sent one by one got other "
        "text from tagma than from paged (or a backend differed from itself). That is an error of "
        "a backend, whatever the times say."
    )


def _answers(agreements: Sequence[Agreement]) -> Section | None:
    if not agreements:
        return None
    blocks: Blocks = [
        Table(
            columns=[
                *("Stage", "Requests", "paged ≠ tagma"),
                *(f"{backend} ≠ itself" for backend in BACKENDS),
                "Must be equal",
            ],
            rows=[
                [
                    a.stage,
                    str(a.requests),
                    str(a.across),
                    *("" if (n := a.within[b]) is None else str(n) for b in BACKENDS),
                    "yes" if a.must_be_identical else "no",
                ]
                for a in agreements
            ],
            numeric=frozenset({1, 2, 3, 4}),
        ),
        serve_prose.WITHIN,
    ]
    firsts = [
        f"{a.stage}, request {a.first[0] + 1}: paged {a.first[1]!r}, tagma {a.first[2]!r}"
        for a in agreements
        if a.first is not None
    ]
    if firsts:
        blocks += ["The first request of each stage that differs:", Bullets(items=firsts)]
    return Section(title="The same answers", blocks=blocks)


def _distributions(data: SeriesData) -> Section | None:
    blocks: Blocks = []
    for stage, panels in data.latencies.items():
        if not all(any(runs) for by_backend in panels.values() for runs in by_backend.values()):
            continue
        blocks.append(
            Figure(
                name=f"latency-{stage}",
                svg=serve_charts.distributions(panels, unit="ms"),
                alt=f"Cumulative distributions of latencies of {stage}, paged and tagma",
                caption=f"{stage}: one line a run, the first run of a backend solid, later ones "
                "broken. Further left is better.",
            )
        )
    return Section(title="Latency distributions", blocks=blocks) if blocks else None


def _machine(series: SeriesRecord) -> Section:
    rows = [[key, prose.readable(value)] for key, value in prose.leaves(series.environment)]
    rows += [[f"setting.{key}", prose.readable(value)] for key, value in series.settings.items()]
    rows += [[f"identity.{key}", prose.readable(value)] for key, value in series.plan.facts.items()]
    rows.append(["command", series.command])
    return Section(
        title="Machine, versions, settings",
        blocks=[Table(columns=["What", "Value"], rows=rows)],
    )


def _median(values: Sequence[float]) -> str:
    return number(statistics.median(values)) if values else ""


def _extremes(values: Sequence[float]) -> str:
    return f"{number(min(values))}..{number(max(values))}" if values else ""


def _percent(interval: Interval | None) -> str:
    return f"{100 * (interval.ratio - 1):+.1f} %" if interval else ""


def _bounds(interval: Interval | None) -> str:
    if interval is None:
        return ""
    high = 100 * (interval.high - 1)
    return f"{100 * (interval.low - 1):+.1f}..{f'{high:+.1f}' if high < 999 else 'over +999'} %"


def _resolution(interval: Interval | None) -> str:
    """The least difference from 1 that an interval of this width would have shown."""
    if interval is None:
        return ""
    share = interval.high / interval.ratio - 1.0
    return f"{100 * share:.1f} %" if share < 1.0 else "over 100 %"
