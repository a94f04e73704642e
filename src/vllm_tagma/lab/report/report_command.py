"""``tagma report``: the sub-command."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_tagma.errors import TagmaError


def report(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Results of 'tagma bench host --json', one of 'tagma bench transfer --json', or "
            "one folder of 'tagma bench serve'.",
            metavar="FILES...",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder to write to.")],
) -> None:
    """One HTML page and one Markdown file from benchmark results.

    Of results of 'bench host' the newest is reported, older ones are compared with it; a folder of
    'bench serve' and a result of 'bench transfer' are reported alone. Nothing is measured. Exit
    status: 0 written, 1 not. Example: tagma report host.json --output report
    """
    try:
        written = write_report(files, output)
    except TagmaError as error:
        typer.echo(f"tagma report: {error}", err=True)
        raise typer.Exit(1) from None
    for path in written:
        typer.echo(str(path))


def write_report(files: list[Path], output: Path) -> list[Path]:
    """Writes ``report.html``, ``report.md`` and ``figures/*.svg``; returns the first two.

    Raises ``ResultError`` or ``TransferResultError`` for a file that is no result, ``RecordError``
    for a folder that is no series, ``ChartError`` without matplotlib, ``CompareError`` without
    scipy.
    """
    series = [path for path in files if path.is_dir()]
    if series:
        return _write_series(series, files, output)
    from vllm_tagma.lab.bench_transfer import transfer_result

    if any(transfer_result.is_result(path) for path in files):
        return _write_transfer(files, output)
    from vllm_tagma.lab.bench import core_source, schema
    from vllm_tagma.lab.report import content
    from vllm_tagma.lab.report.files import write_document

    results = [schema.read(path) for path in files]
    newest = max(results, key=lambda result: result.created)
    for difference in core_source.differences(newest.environment.get("source") or {}):
        typer.echo(f"tagma report: {newest.source}: {difference}", err=True)
    return write_document(content.build(results), output)


def _write_series(series: list[Path], files: list[Path], output: Path) -> list[Path]:
    from vllm_tagma.lab.bench_serve.record import RecordError
    from vllm_tagma.lab.report.serve_files import write_series_report

    if len(files) > 1:
        raise RecordError(
            f"{series[0]} is a folder: a series of 'tagma bench serve' is reported alone"
        )
    return write_series_report(series[0], output)[0]


def _write_transfer(files: list[Path], output: Path) -> list[Path]:
    from vllm_tagma.lab.bench_transfer.transfer_result import FILE, TransferResultError
    from vllm_tagma.lab.report import transfer_content
    from vllm_tagma.lab.report.files import write_document

    if len(files) > 1:
        raise TransferResultError("a result of 'tagma bench transfer' is reported alone")
    return write_document(transfer_content.build(FILE.read(files[0])), output)
