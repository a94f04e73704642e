"""Trace files: which format it is, and the requests in it.

A parser yields requests and bad lines in the order of the file. Whether a bad line is skipped or
stops the replay is decided here, once, for all formats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from vllm_tagma.lab.replay import format_azure, format_mooncake, format_pieces, format_sharegpt
from vllm_tagma.lab.replay.trace import BadLine, Trace, TraceError, TraceRequest

Parser = Callable[[Path], Iterator[TraceRequest | BadLine]]

PARSERS: dict[str, Parser] = {
    "mooncake": format_mooncake.parse,
    "azure": format_azure.parse,
    "sharegpt": format_sharegpt.parse,
    "tagma": format_pieces.parse,
}
_DETECTORS: dict[str, Callable[[str], bool]] = {
    "azure": format_azure.detect,
    "mooncake": format_mooncake.detect,
    "tagma": format_pieces.detect,
    "sharegpt": format_sharegpt.detect,
}
_HEAD_CHARACTERS = 1 << 16


def detect(path: Path) -> str:
    """Format of a trace file, by its first kilobytes.

    Raises:
        TraceError: the file cannot be read or looks like none of the formats.
    """
    try:
        with path.open(encoding="utf-8") as file:
            head = file.read(_HEAD_CHARACTERS)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    for name, matches in _DETECTORS.items():
        if matches(head):
            return name
    raise TraceError(
        f"{path} looks like none of the formats {', '.join(PARSERS)}. Name its format with "
        f"--format, or see docs/replay.md for what each looks like."
    )


def read(
    path: Path, *, kind: str | None = None, limit: int | None = None, strict: bool = False
) -> Trace:
    """The first ``limit`` requests of a file; bad lines up to there are kept beside them.

    Raises:
        TraceError: unreadable, of no known format, no request in it; with ``strict`` also the
            first bad line.
    """
    trace = Trace(name=path.name, kind=kind or detect(path))
    try:
        for item in _until(PARSERS[trace.kind](path), limit):
            if isinstance(item, TraceRequest):
                trace.requests.append(item)
            elif strict:
                raise TraceError(f"{path}, {item.place}: {item.reason}")
            else:
                trace.bad.append(item)
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from None
    if not trace.requests:
        first = f"; the first: {trace.bad[0].place}: {trace.bad[0].reason}" if trace.bad else ""
        raise TraceError(
            f"{path} has no valid request ({len(trace.bad)} bad lines{first}). "
            f"It was read as {trace.kind}; --format names another format."
        )
    return trace


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
