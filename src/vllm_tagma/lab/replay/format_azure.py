"""Azure's LLM inference CSV: ``TIMESTAMP,ContextTokens,GeneratedTokens``.

It says nothing of content, so every prompt is a stream of its own and no prefix can hit.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from vllm_tagma.lab.replay.json_fields import FieldError, checked
from vllm_tagma.lab.replay.trace import BadLine, Piece, TraceRequest

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def detect(head: str) -> bool:
    """True for a file whose first line names Azure's columns."""
    header = [name.strip() for name in head.lstrip("\ufeff").split("\n", 1)[0].split(",")]
    return set(COLUMNS) <= set(header)


def parse(path: Path) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order; arrivals count from the first request."""
    first: datetime | None = None
    with path.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        header = [name.strip() for name in next(rows, [])]
        if not set(COLUMNS) <= set(header):
            yield BadLine("line 1", f"lacks the columns {', '.join(COLUMNS)}")
            return
        columns = [header.index(name) for name in COLUMNS]
        for row in rows:
            place = f"line {rows.line_num}"
            if not row:
                continue
            if len(row) <= max(columns):
                yield BadLine(place, f"has {len(row)} of {len(header)} columns")
                continue
            time, context, generated = (row[column].strip() for column in columns)
            try:
                arrival = datetime.fromisoformat(time)
                prompt_tokens = checked(_number(context), "ContextTokens")
                output_tokens = checked(_number(generated), "GeneratedTokens")
                first = first or arrival
                elapsed = (arrival - first).total_seconds()
            except FieldError as error:
                yield BadLine(place, str(error))
            except (ValueError, TypeError) as error:
                yield BadLine(place, f"TIMESTAMP: {error}")
            else:
                yield TraceRequest(
                    place=place,
                    prompt=(Piece(f"azure {place}", prompt_tokens),),
                    output_tokens=output_tokens,
                    arrival=elapsed,
                )


def _number(text: str) -> object:
    """An integer if it is one; else the text, which the caller's check names."""
    return int(text) if text.isascii() and text.isdigit() else text
