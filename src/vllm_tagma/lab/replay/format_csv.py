"""CSV tables of lengths: Azure's LLM inference traces, BurstGPT's, and others with such columns.

They say nothing of content, so every prompt is a stream of its own and no prefix can hit.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from vllm_tagma.lab.replay import field_names
from vllm_tagma.lab.replay.csv_rows import delimiter_of, header_fields, rows
from vllm_tagma.lab.replay.json_fields import MAX_SECONDS, FieldError, checked, number, shown
from vllm_tagma.lab.replay.trace import BadLine, Piece, Reading, TraceRequest
from vllm_tagma.lab.replay.trace_source import Source

COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def kind_of(line: str) -> str | None:
    """``azure`` or ``burstgpt`` if ``line`` is the header of such a table; else None."""
    names = header_fields(line)
    plain = {field_names.plain(name) for name in names}
    if {"requesttokens", "responsetokens"} <= plain:
        return "burstgpt"
    if field_names.find(names, field_names.PROMPT) and field_names.find(names, field_names.OUTPUT):
        return "azure"
    return None


def parse(source: Source, reading: Reading) -> Iterator[TraceRequest | BadLine]:
    """The requests and bad lines of a file, in order; dates count from the first request."""
    line, head = next(source.lines(), (1, ""))
    header = header_fields(head)
    columns = _Columns(header)
    if columns.prompt is None or columns.output is None:
        reason = f"lacks the columns {', '.join(COLUMNS)}, or others that are known for these"
        yield BadLine(f"line {line}", f"{reason}; name them so in the header line")
        return
    clock = _Clock()
    delimiter = delimiter_of(head)
    for row in rows(source, columns=len(header), delimiter=delimiter, short=columns.needed):
        place = f"line {row.line}"
        if row.fields is None:
            yield BadLine(place, row.reason)
            continue
        fields = [field.strip().removeprefix("\ufeff") for field in row.fields]
        if fields == header:
            continue  # the first line, or that of a file that was appended to this one
        try:
            yield columns.request(fields, place, clock)
        except FieldError as error:
            yield BadLine(place, str(error))


class _Columns:
    """Where a table keeps what a request needs."""

    def __init__(self, header: list[str]) -> None:
        self._header = header
        self.prompt = self._place(field_names.PROMPT)
        self.output = self._place(field_names.OUTPUT)
        self._time = self._place(field_names.TIME)
        places = (self.prompt, self.output, self._time)
        self.needed = [column for column in places if column is not None]

    def _place(self, wanted: tuple[str, ...]) -> int | None:
        name = field_names.find(self._header, wanted)
        return None if name is None else self._header.index(name)

    def request(self, fields: list[str], place: str, clock: _Clock) -> TraceRequest:
        """The request of a row. Raises :class:`FieldError`."""
        if len(fields) <= max(self.needed):
            raise FieldError(
                f"has {len(fields)} of {len(self._header)} columns; complete or remove it"
            )
        assert self.prompt is not None
        assert self.output is not None
        prompt_tokens = self._tokens(fields, self.prompt)
        output = number(fields[self.output])
        if output == 0 and field_names.plain(self._header[self.output]) == "responsetokens":
            raise FieldError(
                "Response tokens is 0, which is how BurstGPT marks a request that failed; it is "
                "left out. BurstGPT has files without these as well"
            )
        output_tokens = self._tokens(fields, self.output)
        arrival = 0.0
        if self._time is not None:
            arrival = clock.seconds(fields[self._time], self._header[self._time])
        return TraceRequest(
            place=place,
            prompt=(Piece(f"row {place}", prompt_tokens),),
            output_tokens=output_tokens,
            arrival=arrival,
        )

    def _tokens(self, fields: list[str], column: int) -> int:
        name, text = self._header[column], fields[column]
        if not text:
            raise FieldError(f"{name} is empty; fill it in or remove the line")
        return checked(number(text), name)


class _Clock:
    """Times of a column, as numbers or as dates; dates count from the first good row."""

    def __init__(self) -> None:
        self._first: datetime | None = None

    def seconds(self, text: str, name: str) -> float:
        value = number(text)
        if isinstance(value, int | float) and abs(value) <= MAX_SECONDS:
            return value * (1e-3 if field_names.in_milliseconds(name) else 1.0)
        try:
            moment = datetime.fromisoformat(text)
            first = self._first or moment
            elapsed = (moment - first).total_seconds()
        except (ValueError, OverflowError):
            raise FieldError(
                f"{name}: Invalid isoformat string: {shown(text)}; write it as seconds or as "
                f"2024-05-10 00:00:00.5"
            ) from None
        except TypeError as error:
            raise FieldError(
                f"{name}: {error}; write all times with an offset from UTC, or none"
            ) from None
        self._first = first
        return elapsed
