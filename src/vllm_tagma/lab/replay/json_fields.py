"""Checked access to the fields of one JSON object, with reasons that name field and value."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vllm_tagma.lab.replay.trace import BadLine, TraceRequest

MAX_TOKENS = 10_000_000
"""Longer sequences are taken for a mistake: a typing error must not ask for a pool of terabytes."""


class FieldError(ValueError):
    """A field is missing or no valid value; the text is the reason that is reported."""


def integer(entry: dict[str, Any], name: str, *, least: int = 1, default: int | None = None) -> int:
    """An integer field of at least ``least``. Raises :class:`FieldError`."""
    value = entry.get(name, default)
    if value is None:
        raise FieldError(f"{name} is missing")
    return checked(value, name, least=least)


def checked(value: object, name: str, *, least: int = 1) -> int:
    """``value`` if it is an integer from ``least`` to the limit. Raises :class:`FieldError`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise FieldError(f"{name} is {value!r}, not an integer")
    if not least <= value <= MAX_TOKENS:
        raise FieldError(f"{name} is {value}, not between {least} and {MAX_TOKENS}")
    return value


def seconds(entry: dict[str, Any], name: str, *, scale: float = 1.0) -> float:
    """A time field in seconds, 0 if it is absent. Raises :class:`FieldError`."""
    value = entry.get(name, 0)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise FieldError(f"{name} is {value!r}, not a time")
    return value * scale


def json_lines(
    path: Path, convert: Callable[[dict[str, Any], str, int], TraceRequest]
) -> Iterator[TraceRequest | BadLine]:
    """Converts each line of a JSONL file. ``convert`` gets the object, its place and the number of
    requests before it, and raises :class:`FieldError` for a bad line. Empty lines are passed over.
    """
    count = 0
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            place = f"line {number}"
            try:
                entry = json.loads(line)
                if not isinstance(entry, dict):
                    raise FieldError(f"is {type(entry).__name__}, not a JSON object")
                request = convert(entry, place, count)
            except json.JSONDecodeError as error:
                yield BadLine(place, f"is not JSON: {error}")
            except FieldError as error:
                yield BadLine(place, str(error))
            else:
                count += 1
                yield request


def first_object(head: str) -> dict[str, Any] | None:
    """The JSON object on the first line that holds one, for detection."""
    for line in head.split("\n")[:20]:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(entry, dict):
            return entry
    return None
