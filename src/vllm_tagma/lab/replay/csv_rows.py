"""The rows of a CSV file with their line numbers, and no row that a stray quote takes along.

A quoted field may hold line breaks, so a quote that is never closed makes one field of everything
behind it. Here it costs its own line: a row over several lines that has not the header's number of
columns is taken apart again.
"""

from __future__ import annotations

import csv
from collections import deque
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from vllm_tagma.lab.replay.trace_source import Source

DELIMITERS = ",;\t|"
MAX_LINES_OF_A_ROW = 10_000
"""A row of more lines is taken for an unclosed quote; there are prompts of thousands of lines."""

# Prompts are longer than the module's 128 KiB. Its own largest value, where C's long has 32 bits.
csv.field_size_limit(2**31 - 1)


class Row(NamedTuple):
    """A row: where it begins, and its fields, or None and why it has none."""

    line: int
    fields: list[str] | None
    reason: str = ""


class _Endless(Exception):
    """A row that goes on over more lines than any row has."""


class _Feed:
    """Hands lines to the CSV reader and remembers those of the row at hand, to take them back."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines
        self._again: deque[str] = deque()
        self._row: list[str] = []
        self.line = 1
        """Number of the first line of the row at hand."""
        self.ended = False
        """Whether the row at hand asked for more lines than there are."""

    def __iter__(self) -> Iterator[str]:
        return self

    def __next__(self) -> str:
        if len(self._row) >= MAX_LINES_OF_A_ROW:
            raise _Endless
        if self._again:
            line = self._again.popleft()
        else:
            try:
                line = next(self._lines)
            except StopIteration:
                self.ended = True
                raise
        self._row.append(line)
        return line

    def lines_of_row(self) -> int:
        return len(self._row)

    def end_row(self, *, keep: int | None = None) -> None:
        """Begins the next row, behind the first ``keep`` lines of this one; by default behind all.

        O(lines taken back).
        """
        lines = len(self._row) if keep is None else keep
        self._again.extendleft(reversed(self._row[lines:]))
        self._row.clear()
        self.line += lines
        self.ended = False


def delimiter_of(header: str) -> str:
    """The separator that a header line uses: the most frequent of the usual ones."""
    return max(DELIMITERS, key=header.count)


def header_fields(line: str) -> list[str]:
    """The names on a header line; none if it is no CSV."""
    try:
        fields = next(csv.reader([line], delimiter=delimiter_of(line), skipinitialspace=True), [])
    except csv.Error:
        return []
    return [name.strip().removeprefix("\ufeff").strip() for name in fields]


def rows(
    source: Source, *, columns: int, delimiter: str, short: Sequence[int] = ()
) -> Iterator[Row]:
    """All rows that hold anything, the header among them, in the order of the file.

    A row on one line is returned as it is, whatever its number of fields. Fields in the columns
    ``short`` never hold a line break.
    """
    with source.text(newline="") as text:
        feed = _Feed(iter(text))
        reader = csv.reader(feed, delimiter=delimiter, skipinitialspace=True)
        while True:
            try:
                fields = next(reader, None)
            except _Endless:
                fields = []
            except csv.Error as error:
                yield Row(feed.line, None, f"is no CSV: {error}; correct or remove it")
                feed.end_row(keep=1)
                reader = csv.reader(feed, delimiter=delimiter, skipinitialspace=True)
                continue
            if fields is None:
                return
            if feed.lines_of_row() > 1 and (
                len(fields) != columns
                or feed.ended
                or any(end in fields[column] for column in short for end in "\r\n")
            ):
                yield Row(
                    *(feed.line, None),
                    "has a quote that is not closed on it; double or remove the quote",
                )
                feed.end_row(keep=1)
                reader = csv.reader(feed, delimiter=delimiter, skipinitialspace=True)
                continue
            if any(field.strip("\ufeff \t") for field in fields):
                yield Row(feed.line, fields)
            feed.end_row()
