"""What ``vllm bench serve --save-result --save-detailed`` writes: one object for each run.

``input_lens`` and ``output_lens`` have an item for each request, and so have ``start_times`` and
``errors`` where the version writes them. Nothing is said of content, so no prefix can hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vllm_tagma.lab.replay import json_records
from vllm_tagma.lab.replay.json_fields import FieldError, checked, seconds, shown
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

_PROMPTS, _OUTPUTS = "input_lens", "output_lens"


def matches(entry: dict[str, Any]) -> bool:
    """True for the result of a run, detailed or not."""
    return _PROMPTS in entry or {"completed", "duration", "request_throughput"} <= entry.keys()


def parse(source: Source, _: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad entries of a file, in order."""
    for place, entry, reason in json_records.records(source):
        if entry is None:
            yield BadLine(place, reason)
            continue
        try:
            columns = _columns(entry)
        except FieldError as error:
            yield BadLine(place, str(error))
            continue
        for number in range(len(columns[_PROMPTS])):
            where = f"{place}, request {number + 1}"
            row = {name: values[number] for name, values in columns.items()}
            try:
                yield _request(row, where)
            except FieldError as error:
                yield BadLine(where, str(error))


def _columns(entry: dict[str, Any]) -> dict[str, list[Any]]:
    """The lists of a run that say something of each request, all of one length."""
    columns = {
        name: entry[name]
        for name in (_PROMPTS, _OUTPUTS, "start_times", "errors")
        if isinstance(entry.get(name), list) and (entry[name] or name in (_PROMPTS, _OUTPUTS))
    }
    for name in (_PROMPTS, _OUTPUTS):
        if name not in columns:
            raise FieldError(f"has no list {name}; run vllm bench serve with --save-detailed")
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise FieldError(f"has {counts}: not one for each request; write the file anew")
    return columns


def _request(row: dict[str, Any], place: str) -> TraceRequest:
    error = row.get("errors")
    if error:
        raise FieldError(f"failed ({shown(error)}); it is left out, run the benchmark again")
    return TraceRequest(
        place=place,
        prompt=(Piece(f"bench {place}", checked(row[_PROMPTS], _PROMPTS)),),
        output_tokens=checked(row[_OUTPUTS], _OUTPUTS),
        arrival=seconds(row, "start_times"),
    )
