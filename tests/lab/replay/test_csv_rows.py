"""Rows of CSV: long fields, line breaks in quotes, quotes that are never closed."""

from __future__ import annotations

import csv
import io
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_tagma.lab.replay import csv_rows, formats
from vllm_tagma.lab.replay.csv_rows import delimiter_of, header_fields, rows
from vllm_tagma.lab.replay.trace_source import Source

if TYPE_CHECKING:
    from conftest import Write

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens,Prompt"


def table(*lines: str) -> str:
    return "\n".join((HEADER, *lines)) + "\n"


CELLS = st.text(alphabet="ab\" ',;\n\r1", max_size=8)


@settings(deadline=None)
@given(
    written=st.lists(st.lists(CELLS, min_size=3, max_size=3), min_size=1, max_size=6),
    delimiter=st.sampled_from(csv_rows.DELIMITERS),
)
def test_what_a_csv_writer_wrote_is_read_back(written: list[list[str]], delimiter: str) -> None:
    out = io.StringIO()
    csv.writer(out, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(written)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "table")
        path.write_text(out.getvalue(), encoding="utf-8", newline="")
        with Source(path) as source:
            found = list(rows(source, columns=3, delimiter=delimiter))
    assert [row.fields for row in found] == [r for r in written if any(c.strip(" \t") for c in r)]
    reader = csv.reader(io.StringIO(out.getvalue(), newline=""), delimiter=delimiter)
    begins, line = {}, 1
    for row in reader:
        begins[line] = row
        line = reader.line_num + 1
    assert all(begins[row.line] == row.fields for row in found)


def test_a_field_of_any_length(write: Write) -> None:
    """The csv module refuses more than 128 KiB unless it is told otherwise."""
    long = "x" * 140_000
    trace = formats.read(write(table("1,10,20,y", f"2,11,21,{long}", f'3,12,22,"{long}\n{long}"')))
    assert trace.bad == []
    assert [request.prompt_tokens for request in trace.requests] == [10, 11, 12]


def test_line_breaks_in_quotes_are_no_lines(write: Write) -> None:
    trace = formats.read(write(table('1,10,20,"a\n\nb"', "2,11,x,y", '3,0,22,"c\nd"', "4,13,23,z")))
    assert [request.place for request in trace.requests] == ["line 2", "line 8"]
    assert [line.place for line in trace.bad] == ["line 5", "line 6"]


@pytest.mark.parametrize(
    "stray",
    ['2,11,"21,y', '"2,11,21,y', '2,11,21,"y', '2,"11,21,y', '2,11,21,"y""', '"2,11,21,"y"'],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_a_quote_that_is_not_closed_costs_one_line(write: Write, stray: str, quoted: bool) -> None:
    def line(i: int) -> str:
        return f'"{i}","{i + 9}","{i + 19}","z"' if quoted else f"{i},{i + 9},{i + 19},z"

    trace = formats.read(write(table(line(1), stray, *(line(i) for i in range(3, 60)))))
    assert [request.prompt_tokens for request in trace.requests] == [
        *(10, *((11,) if not trace.bad else ()), *range(12, 69))
    ]
    assert [bad.place for bad in trace.bad] in (["line 3"], [])


def test_a_quote_is_given_up_after_many_lines(
    write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(csv_rows, "MAX_LINES_OF_A_ROW", 10)
    good = [f"{i},10,20,z" for i in range(50)]
    trace = formats.read(write(table('1,10,20,"x', *good, '2,11,21,"x', *good)))
    assert len(trace.requests) == 100
    assert [line.place for line in trace.bad] == ["line 2", "line 53"]
    assert "quote that is not closed on it; double or remove" in trace.bad[0].reason


def test_headers() -> None:
    assert header_fields('"TIMESTAMP" , "a b","c,d"') == ["TIMESTAMP", "a b", "c,d"]
    assert header_fields('"a", "b') == ["a", "b"]
    assert [delimiter_of(line) for line in ("a,b", "a;b,c;d", "a\tb", "a|b|c")] == [*",;\t|"]
