"""The JSON objects of a trace, however they are laid out: one a line, a list, or spread over lines.

Each comes with its place. What is no object comes as the reason, so that it costs nothing but
itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any, NamedTuple

from vllm_tagma.lab.replay.json_fields import Digits, FieldError, shown
from vllm_tagma.lab.replay.trace import BadLine, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source, undecodable

_PROBED = 20
"""Lines or entries that are looked at to find out what a file is."""
_SPACE = re.compile(r"[ \t\r\n]*")
_NESTED = "is nested too deeply; a request is one flat object"


class Record(NamedTuple):
    """One entry: ``entry`` is its object, or None and ``reason`` says why there is none."""

    place: str
    entry: dict[str, Any] | None
    reason: str = ""


def records(source: Source) -> Iterator[Record]:
    """All entries, in the order of the file; blank lines are passed over.

    A list or a spread-out object is held in memory as text, never as a whole tree of objects.
    """
    if _one_a_line(source):
        for number, line in source.lines():
            yield _record(f"line {number}", line)
    else:
        yield from _values(source.whole())


def probe(source: Source) -> list[dict[str, Any]]:
    """The objects among the first entries, to tell the format by."""
    return [r.entry for r in islice(records(source), _PROBED) if r.entry is not None]


def convert(
    source: Source, request_of: Callable[[dict[str, Any], str, int], TraceRequest]
) -> Iterator[TraceRequest | BadLine]:
    """A request or a bad line for each entry.

    ``request_of`` gets the object, its place and the number of requests before it, and raises
    :class:`FieldError` for a bad one.
    """
    before = 0
    for place, entry, reason in records(source):
        if entry is None:
            yield BadLine(place, reason)
            continue
        try:
            request = request_of(entry, place, before)
        except FieldError as error:
            yield BadLine(place, str(error))
        else:
            before += 1
            yield request


def _one_a_line(source: Source) -> bool:
    """Whether each line is an entry of its own: JSONL, even if the first lines are broken."""
    head = [line for _, line in islice(source.lines(), _PROBED)]
    if not head or head[0].lstrip()[0] not in "[{":
        return True
    # Inside of a spread-out value, whole objects are indented or end with a comma; but for the last
    # one of a list that is not indented.
    whole = sum(line[0] == "{" and _parses(line) for line in head)
    if whole >= (2 if head[0].lstrip()[0] == "[" else 1):
        return True
    return len(head) > 1 and _parses(head[0])


def _parses(line: str) -> bool:
    try:
        loads(line)
    except (ValueError, RecursionError):
        return False
    return True


def _values(text: str) -> Iterator[Record]:
    """The entries of a list, or of objects one after the other, in a text that has nothing else."""
    position = _skip(text, 0)
    in_list = text[position : position + 1] == "["
    position += in_list
    line, counted = 1, 0
    for number in count(1):
        position = _skip(text, position)
        if in_list and text[position : position + 1] == "]":
            position = _skip(text, position + 1)
            if position < len(text):
                line += text.count("\n", counted, position)
                yield Record(f"line {line}", None, "stands behind the end of the list; remove it")
            return
        if position >= len(text):
            if in_list:
                yield Record("the end", None, "comes before the list is closed: the file was cut")
            return
        line += text.count("\n", counted, position)
        counted = position
        place = f"entry {number}" if line == 1 else f"entry {number} (line {line})"
        try:
            value, end = _decode(text, position)
        except json.JSONDecodeError as error:
            reason = f"is not JSON: {error}; nothing behind it was read. Mend or remove it"
            yield Record(place, None, reason)
            return
        except RecursionError:
            yield Record(place, None, f"{_NESTED}; nothing behind it was read")
            return
        yield _checked(place, value, text[position:end])
        position = _skip(text, end)
        if in_list and text[position : position + 1] == ",":
            position += 1
        elif in_list and position < len(text) and text[position] != "]":
            reason = "is not followed by a comma; nothing behind it was read. Mend the list"
            yield Record(place, None, reason)
            return


def _skip(text: str, position: int) -> int:
    """Where the white space from ``position`` on ends."""
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _record(place: str, line: str) -> Record:
    try:
        value = loads(line)
    except json.JSONDecodeError as error:
        if (reason := undecodable(line)) is None:
            reason = f"is not JSON: {error}; write one object a line, whole"
        return Record(place, None, reason)
    except RecursionError:
        return Record(place, None, _NESTED)
    return _checked(place, value, line)


def _checked(place: str, value: object, text: str) -> Record:
    if (reason := undecodable(text)) is not None:
        return Record(place, None, reason)
    if not isinstance(value, dict):
        what = f"is {type(value).__name__}, not a JSON object"
        return Record(place, None, f"{what}; write a request as {{...}}, not as {shown(value)}")
    return Record(place, value)


def _integer(digits: str) -> int | Digits:
    return int(digits) if len(digits) < 1000 else Digits(digits)


_DECODER = json.JSONDecoder()
# Only where the faster one fails: the interpreter refuses integers of more than 4,300 digits.
_PATIENT = json.JSONDecoder(parse_int=_integer)


def loads(text: str) -> Any:
    """:func:`json.loads` for integers of any length; raises JSONDecodeError and RecursionError."""
    try:
        return _DECODER.decode(text)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _PATIENT.decode(text)


def _decode(text: str, position: int) -> tuple[Any, int]:
    try:
        return _DECODER.raw_decode(text, position)
    except json.JSONDecodeError:
        raise
    except ValueError:
        return _PATIENT.raw_decode(text, position)
