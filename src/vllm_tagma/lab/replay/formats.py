"""Trace files: which format it is, and the requests in it.

A parser yields requests and bad lines in the order of the file. Whether a bad line is skipped or
stops the replay is decided here, once, for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_tagma.lab.replay import (
    format_batch,
    format_csv,
    format_mooncake,
    format_pieces,
    format_sharegpt,
    format_vllm_bench,
    format_vllm_log,
    json_records,
)
from vllm_tagma.lab.replay.json_fields import shown
from vllm_tagma.lab.replay.trace import BadLine, Reading, Trace, TraceError, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

Parser = Callable[[Source, Reading], Iterator[TraceRequest | BadLine]]

PARSERS: dict[str, Parser] = {
    "mooncake": format_mooncake.parse,
    "azure": format_csv.parse,
    "burstgpt": format_csv.parse,
    "sharegpt": format_sharegpt.parse,
    "openai-batch": format_batch.parse,
    "vllm-bench": format_vllm_bench.parse,
    "vllm-log": format_vllm_log.parse,
    "tagma": format_pieces.parse,
}
_OF_OBJECTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "tagma": format_pieces.matches,
    "openai-batch": format_batch.matches,
    "vllm-bench": format_vllm_bench.matches,
    "sharegpt": format_sharegpt.matches,
    "mooncake": format_mooncake.matches,
}


def detect(source: Source) -> str:
    """Format of a trace, by what stands first in it.

    Raises:
        TraceError: it looks like none of the formats, or cannot be read.
    """
    first = next((line for _, line in source.lines()), "")
    if (kind := format_csv.kind_of(first)) is not None:
        return kind
    objects = json_records.probe(source) if first else []
    for name, matches in _OF_OBJECTS.items():
        if any(matches(entry) for entry in objects):
            return name
    if format_vllm_log.matches(source):
        return "vllm-log"
    raise TraceError(
        f"{source} looks like none of the formats {', '.join(PARSERS)}: {_seen(first, objects)}. "
        f"Name its format with --format, or see docs/replay.md for what each looks like."
    )


def read(
    path: Path,
    *,
    kind: str | None = None,
    limit: int | None = None,
    strict: bool = False,
    trace_block_size: int | None = None,
) -> Trace:
    """The first ``limit`` requests of a file; bad lines up to there are kept beside them.

    ``path`` may be ``-`` for standard input. ``trace_block_size``: prompt tokens that one hash id
    covers, in formats that have any; None: found from the data.

    Raises:
        TraceError: unreadable, of no known format, no request in it; with ``strict`` also the
            first bad line.
    """
    with Source(path) as source:
        try:
            return _read(source, kind, limit, strict, Reading(trace_block_size=trace_block_size))
        except OSError as error:
            raise TraceError(f"{source} cannot be read: {error}") from None


def _read(
    source: Source, kind: str | None, limit: int | None, strict: bool, reading: Reading
) -> Trace:
    trace = Trace(name=source.name, kind=kind or detect(source), notes=reading.notes)
    if reading.trace_block_size is not None and trace.kind != "mooncake":
        raise TraceError(
            f"--trace-block-size {reading.trace_block_size} says what a hash id covers, and "
            f"{source}, read as {trace.kind}, has none. Leave the option out."
        )
    for item in _until(PARSERS[trace.kind](source, reading), limit):
        if isinstance(item, TraceRequest):
            trace.requests.append(item)
        elif strict:
            raise TraceError(f"{source}, {item.place}: {item.reason}")
        else:
            trace.bad.append(item)
    if not trace.requests:
        first = f"; the first: {trace.bad[0].place}: {trace.bad[0].reason}" if trace.bad else ""
        raise TraceError(
            f"{source} has no valid request ({len(trace.bad)} bad lines{first}). "
            f"It was read as {trace.kind}; --format names another format."
        )
    return trace


def _seen(first: str, objects: list[dict[str, Any]]) -> str:
    """What a file begins with, for the user to see what is missing or wrong in it."""
    if objects:
        return f"its first object has the fields {shown(list(objects[0]))}"
    if not first:
        return "it is empty"
    return f"it begins with {shown(first)}"


def _until(
    items: Iterator[TraceRequest | BadLine], limit: int | None
) -> Iterator[TraceRequest | BadLine]:
    if limit is None:
        yield from items
        return
    left = limit
    for item in items:
        yield item
        left -= isinstance(item, TraceRequest)
        if left <= 0:
            return
