"""The files of a series: ``series.json``, one ``run.json`` a run, and the way they are laid out.

    DIR/series.json              plan, environment, workload
    DIR/workload/STAGE.jsonl     the requests, the same for every run
    DIR/runs/01-paged/run.json   one run: times, counters, commands, failure
    DIR/runs/01-paged/STAGE.json what vLLM's client measured, request by request
    DIR/runs/01-paged/…          the logs, samples.jsonl, metrics.prom, gpu.csv, traces/
    DIR/report/                  report.html, report.md, figures/

``docs/bench-serve.md`` documents the fields. Within a schema version fields may be added.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from vllm_tagma.errors import TagmaError

KIND = "tagma-bench-serve"
RUN_KIND = "tagma-bench-serve-run"
SCHEMA_VERSION = 1


class RecordError(TagmaError, ValueError):
    """A file that is not of this benchmark, or of a version that this release cannot read."""


@dataclass(kw_only=True)
class StageRecord:
    """One stage of one run.

    ``client``: the scalars of vLLM's client. ``counters``: differences of the server's counters
    over the stage; None where it has no such counter. ``kv``: peak share and blocks in use.
    ``memory``: peak bytes. ``ranges``: what the tagma backend reports of ranges.
    """

    seconds: float
    client: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, float | None] = field(default_factory=dict)
    kv: dict[str, float | None] = field(default_factory=dict)
    memory: dict[str, float | None] = field(default_factory=dict)
    ranges: dict[str, float | None] = field(default_factory=dict)


@dataclass(kw_only=True)
class RunRecord:
    """One server and what it went through. ``error`` is None for a run that is complete;
    ``package`` is the hash of the tagma package that served."""

    index: int
    name: str
    backend: str
    pair: int | None
    started: str
    commands: dict[str, list[str]] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    start_seconds: float = 0.0
    stop_seconds: float = 0.0
    cache: dict[str, str] = field(default_factory=dict)
    num_blocks: int | None = None
    block_size: int | None = None
    stages: dict[str, StageRecord] = field(default_factory=dict)
    kernels: dict[str, Any] | None = None
    package: str = ""
    error: str | None = None
    log_tail: str = ""

    @property
    def is_complete(self) -> bool:
        """Whether the run got through all its stages."""
        return self.error is None


@dataclass(kw_only=True)
class SeriesRecord:
    """What was to be measured, on what, and with which requests."""

    created: str
    command: str
    plan: dict[str, Any]
    environment: dict[str, Any]
    workload: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Wall time of the invocations that measured, resumed ones added up."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as recorded."""
        settings: dict[str, Any] = self.plan["settings"]
        return settings


def write_json(document: object, path: Path) -> None:
    """Writes a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def write_series(series: SeriesRecord, folder: Path) -> None:
    """Writes ``series.json``."""
    header = {"kind": KIND, "schema_version": SCHEMA_VERSION}
    write_json({**header, **asdict(series)}, folder / "series.json")


def write_run(run: RunRecord, folder: Path) -> None:
    """Writes ``run.json`` of a run's folder."""
    header = {"kind": RUN_KIND, "schema_version": SCHEMA_VERSION}
    write_json({**header, **asdict(run)}, folder / "run.json")


def read_series(folder: Path) -> SeriesRecord:
    """Reads ``series.json``. Raises :class:`RecordError`."""
    document = _read(folder / "series.json", kind=KIND)
    series: SeriesRecord = _build(SeriesRecord, document, source=folder / "series.json")
    return series


def read_run(folder: Path) -> RunRecord:
    """Reads ``run.json`` of a run's folder. Raises :class:`RecordError`."""
    source = folder / "run.json"
    document = _read(source, kind=RUN_KIND)
    stages = document.pop("stages", {})
    run: RunRecord = _build(RunRecord, document, source=source)
    run.stages = {name: _build(StageRecord, stage, source=source) for name, stage in stages.items()}
    return run


def read_runs(folder: Path, series: SeriesRecord) -> list[RunRecord]:
    """The runs of a series that have ended, complete or failed, in order."""
    places = [folder / "runs" / name for name in series.runs]
    return [read_run(place) for place in places if (place / "run.json").is_file()]


def is_series(path: Path) -> bool:
    """Whether a folder holds a series."""
    return (path / "series.json").is_file()


def _read(path: Path, *, kind: str) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.get("kind") != kind:
        raise RecordError(f"{path} is not of 'tagma bench serve' (no kind={kind!r})")
    if document.get("schema_version") != SCHEMA_VERSION:
        raise RecordError(
            f"{path} has schema_version {document.get('schema_version')!r}; this release reads "
            f"{SCHEMA_VERSION}. Measure again, or read it with the release that wrote it."
        )
    return document


def _build(kind: Any, document: Any, *, source: Path) -> Any:
    try:
        known = {name: document[name] for name in kind.__dataclass_fields__ if name in document}
        return kind(**known)
    except TypeError as error:
        raise RecordError(f"{source} lacks a field: {error}") from None
