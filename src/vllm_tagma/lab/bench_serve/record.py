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

from pathlib import Path
from typing import Any

from msgspec import Struct, field

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab import json_file

KIND = "tagma-bench-serve"
RUN_KIND = "tagma-bench-serve-run"
SCHEMA_VERSION = 1


class RecordError(TagmaError, ValueError):
    """A file that is not of this benchmark, or of a version that this release cannot read."""


class StageRecord(Struct, kw_only=True):
    """One stage of one run.

    ``client``: the scalars of vLLM's client. ``counters``: differences of the server's counters
    over the stage; None where it has no such counter. ``kv``: peak share and blocks in use.
    ``memory``: peak bytes. ``ranges``: what the tagma backend reports of ranges.
    """

    seconds: float
    client: dict[str, Any] = field(default_factory=dict)
    counters: dict[str, int | float | None] = field(default_factory=dict)
    kv: dict[str, int | float | None] = field(default_factory=dict)
    memory: dict[str, int | float | None] = field(default_factory=dict)
    ranges: dict[str, int | float | None] = field(default_factory=dict)


class RunRecord(Struct, kw_only=True):
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


class Plan(Struct, kw_only=True):
    """What must not change between a series and its continuation."""

    settings: dict[str, Any]
    facts: dict[str, Any]
    """Of software, model, data and GPU: ``identity.py``."""


class SeriesRecord(Struct, kw_only=True):
    """What was to be measured, on what, and with which requests."""

    created: str
    command: str
    plan: Plan
    environment: dict[str, Any]
    workload: dict[str, Any] = field(default_factory=dict)
    runs: list[str] = field(default_factory=list)
    seconds: float = 0.0
    """Wall time of the invocations that measured, resumed ones added up."""

    @property
    def settings(self) -> dict[str, Any]:
        """The settings, as recorded."""
        return self.plan.settings


_SERIES = json_file.FileKind(
    KIND, SCHEMA_VERSION, command="tagma bench serve", schema=SeriesRecord, error=RecordError
)
_RUN = json_file.FileKind(
    RUN_KIND, SCHEMA_VERSION, command="tagma bench serve", schema=RunRecord, error=RecordError
)


def write_series(series: SeriesRecord, folder: Path) -> None:
    """Writes ``series.json``."""
    json_file.write(_SERIES.document(series), folder / "series.json")


def write_run(run: RunRecord, folder: Path) -> None:
    """Writes ``run.json`` of a run's folder."""
    json_file.write(_RUN.document(run), folder / "run.json")


def read_series(folder: Path) -> SeriesRecord:
    """Reads ``series.json``. Raises :class:`RecordError`."""
    return _SERIES.read(folder / "series.json")


def read_run(folder: Path) -> RunRecord:
    """Reads ``run.json`` of a run's folder. Raises :class:`RecordError`."""
    return _RUN.read(folder / "run.json")


def read_runs(folder: Path, series: SeriesRecord) -> list[RunRecord]:
    """The runs of a series that have ended, complete or failed, in order."""
    places = [folder / "runs" / name for name in series.runs]
    return [read_run(place) for place in places if (place / "run.json").is_file()]


def is_series(path: Path) -> bool:
    """Whether a folder holds a series."""
    return (path / "series.json").is_file()
