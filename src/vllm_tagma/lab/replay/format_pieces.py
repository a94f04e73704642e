"""Our own JSONL: prompts as pieces of named content. ``docs/replay.md`` describes it.

    {"id": "a1", "arrival": 0.0, "prompt": [["system", 320], ["a-user-1", 55]], "output": 180}
    {"id": "a2", "after": "a1", "arrival": 9.5,
     "prompt": [["system", 320], ["a-user-1", 55], ["a1", 180], ["a-user-2", 31]], "output": 90}

A request's ``id`` names the content that it generates, so a later prompt can contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from vllm_tagma.lab.replay import json_records
from vllm_tagma.lab.replay.json_fields import FieldError, checked, integer, seconds, shown
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

_FIELDS = {"id", "arrival", "prompt", "output", "max_tokens", "abort_after", "after"}


def matches(entry: dict[str, Any]) -> bool:
    """True for an object with a prompt of pieces."""
    return {"prompt", "output"} <= entry.keys()


def parse(source: Source, _: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order."""
    seen: dict[str, int] = {}

    def convert(entry: dict[str, Any], place: str, count: int) -> TraceRequest:
        request = _request(entry, place, seen)
        if request.output is not None:
            seen[request.output] = count
        return request

    return json_records.convert(source, convert)


def dump(request: TraceRequest, requests: Sequence[TraceRequest]) -> str:
    """The line that reads back as ``request``, of the trace ``requests``; no newline at its end."""
    entry: dict[str, Any] = {} if request.output is None else {"id": request.output}
    entry["arrival"] = request.arrival
    entry["prompt"] = [list(piece) for piece in request.prompt]
    entry["output"] = request.output_tokens
    if request.after is not None:
        entry["after"] = requests[request.after].output
    for name in ("max_tokens", "abort_after"):
        if getattr(request, name) is not None:
            entry[name] = getattr(request, name)
    return json.dumps(entry)


def _request(entry: dict[str, Any], place: str, seen: dict[str, int]) -> TraceRequest:
    unknown = sorted(entry.keys() - _FIELDS)
    if unknown:
        raise FieldError(f"has unknown fields {unknown}; known: {sorted(_FIELDS)}")
    name, after = entry.get("id"), entry.get("after")
    for field, value in (("id", name), ("after", after)):
        if value is not None and not isinstance(value, str):
            raise FieldError(f"{field} is {shown(value)}, not a string; put it in quotes")
    if name is not None and name in seen:
        raise FieldError(f"id {shown(name)} stands on an earlier line already; give each its own")
    if after is not None and after not in seen:
        raise FieldError(
            f"after is {shown(after)}, which no earlier line has as its id; order the lines"
        )
    output = integer(entry, "output")
    limit = entry.get("max_tokens")
    if limit is not None and checked(limit, "max_tokens") < output:
        raise FieldError(f"max_tokens is {limit}, less than the output of {output}; raise it")
    abort = entry.get("abort_after")
    if abort is not None and checked(abort, "abort_after", least=0) >= output:
        raise FieldError(
            f"abort_after is {abort}, not before the end of the output of {output}; lower it"
        )
    return TraceRequest(
        place=place,
        prompt=_pieces(entry.get("prompt")),
        output_tokens=output,
        arrival=seconds(entry, "arrival"),
        output=name,
        max_tokens=limit,
        abort_after=abort,
        after=seen[after] if after is not None else None,
    )


def _pieces(value: object) -> tuple[Piece, ...]:
    if not isinstance(value, list) or not value:
        raise FieldError("prompt is missing or no list of [content, tokens]; write it as one")
    pieces = []
    for item in value:
        if not isinstance(item, list) or len(item) != 2 or not isinstance(item[0], str):
            raise FieldError(f"prompt has {shown(item)}, not [content, tokens]; write it so")
        pieces.append(Piece(_content(item[0]), checked(item[1], f"tokens of {shown(item[0])}")))
    return tuple(pieces)


def _content(name: str) -> str:
    """A name that can be hashed: JSON can write half of a surrogate pair, which is no character."""
    return name.encode("utf-8", "backslashreplace").decode()
