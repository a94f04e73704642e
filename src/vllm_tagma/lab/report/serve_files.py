"""From the folder of a series to the files of its report."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vllm_tagma.lab.bench_serve import outputs, record
from vllm_tagma.lab.bench_serve.record import RunRecord
from vllm_tagma.lab.bench_serve.serve_plan import stages_of
from vllm_tagma.lab.bench_serve.serve_settings import BACKENDS, from_json
from vllm_tagma.lab.report import serve_content
from vllm_tagma.lab.report.files import write_document
from vllm_tagma.lab.report.serve_content import SeriesData

_MS = 1000.0


def write_series_report(folder: Path, output: Path) -> tuple[list[Path], str]:
    """Writes ``report.html``, ``report.md`` and ``figures/`` of the series in ``folder``.

    Returns the first two and the verdict in one line. Raises ``RecordError`` for a folder that
    holds no series, ``CompareError`` without scipy, ``ChartError`` without matplotlib.
    """
    data = read(folder)
    return write_document(serve_content.build(data), output), serve_content.verdict_line(data)


def read(folder: Path) -> SeriesData:
    """Everything that the report needs. Raises ``RecordError``."""
    series = record.read_series(folder)
    runs = record.read_runs(folder, series)
    stages = stages_of(from_json(series.settings, source=str(folder / "series.json")))
    measured = [stage.name for stage in stages if stage.is_measured]
    agreements = [outputs.agreement(folder, runs, stage=stage.name) for stage in stages]
    complete = [run for run in runs if run.is_complete and run.pair is not None]
    return SeriesData(
        series=series,
        runs=runs,
        measured=measured,
        agreements=[found for found in agreements if found is not None],
        latencies={stage: _latencies(folder, complete, stage) for stage in measured},
        samples={run.name: _samples(folder / "runs" / run.name) for run in complete},
    )


def _latencies(
    folder: Path, runs: list[RunRecord], stage: str
) -> dict[str, dict[str, list[list[float]]]]:
    """Quantity to backend to runs of milliseconds."""
    panels: dict[str, dict[str, list[list[float]]]] = {
        title: {backend: [] for backend in BACKENDS}
        for title in ("time to first token", "time per output token", "inter-token latency")
    }
    for run in runs:
        try:
            path = folder / "runs" / run.name / f"{stage}.json"
            document = json.loads(path.read_text(encoding="utf-8"))
            ttfts, itls = document["ttfts"], document["itls"]
        except (OSError, ValueError, KeyError):
            continue
        first, per_token, between = panels.values()
        first[run.backend].append([_MS * value for value in ttfts])
        per_token[run.backend].append([_MS * sum(gaps) / len(gaps) for gaps in itls if gaps])
        between[run.backend].append([_MS * gap for gaps in itls for gap in gaps])
    return panels


def _samples(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    return [json.loads(line) for line in lines if line.endswith("}")]
