"""JSON as lines, lists and spread-out objects; what is broken costs itself and is named."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trace_samples import MOONCAKE, lines

from vllm_tagma.lab.replay import formats
from vllm_tagma.lab.replay.json_fields import FieldError, checked, number, seconds, shown
from vllm_tagma.lab.replay.json_records import loads, probe, records
from vllm_tagma.lab.replay.trace import TraceError
from vllm_tagma.lab.replay.trace_source import Source

if TYPE_CHECKING:
    from conftest import Write

A, B, C = {"a": 1}, {"b": [{"c": 2}]}, {"d": {"e": 3}}
SPREAD = json.dumps(A, indent=2), json.dumps(B, indent=2)


def read(write: Write, text: str) -> list[tuple[str, dict[str, Any] | None, str]]:
    with Source(write(text)) as source:
        return [tuple(record) for record in records(source)]


@pytest.mark.parametrize(
    ("text", "places"),
    [
        (lines(A, B, C), ["line 1", "line 2", "line 3"]),
        ("\n\n" + lines(A, "", B, C), ["line 3", "line 5", "line 6"]),
        (lines(f"  {json.dumps(A)}", B, C), ["line 1", "line 2", "line 3"]),
        (json.dumps([A, B, C]), ["entry 1", "entry 2", "entry 3"]),
        (
            "[\n" + ",\n".join(map(json.dumps, (A, B, C))) + "\n]\n",
            ["entry 1 (line 2)", "entry 2 (line 3)", "entry 3 (line 4)"],
        ),
        (
            json.dumps([A, B, C], indent=1),
            ["entry 1 (line 2)", "entry 2 (line 5)", "entry 3 (line 12)"],
        ),
        (
            "\n".join((*SPREAD, json.dumps(C, indent=2))),
            ["entry 1", "entry 2 (line 4)", "entry 3 (line 11)"],
        ),
    ],
)
def test_layouts(write: Write, text: str, places: list[str]) -> None:
    found = read(write, text)
    assert [entry for _, entry, _ in found] == [A, B, C]
    assert [place for place, _, _ in found] == places


@pytest.mark.parametrize(
    ("text", "place", "reason"),
    [
        (lines(A, "{", B), "line 2", "is not JSON: Expecting property name"),
        (lines(A, "[1]", B), "line 2", "is list, not a JSON object; write a request as {...}"),
        (lines("[1]", A, B), "line 1", "is list, not a JSON object"),
        (lines("{", A, B), "line 1", "is not JSON"),
        (lines(A, '{"a": 1} x', B), "line 2", "is not JSON: Extra data"),
        (lines(A, '{"a": 1}{"b": 2}', B), "line 2", "write one object a line"),
        (lines(A, B, "[" * 100_000), "line 3", "is nested too deeply"),
        (lines('{"a":' * 100_000, A, B), "line 1", "is nested too deeply"),
        (f"[{json.dumps(A)}, 7, {json.dumps(B)}]", "entry 2", "is int, not a JSON object"),
        (f"[{json.dumps(A)}, {json.dumps(B)}", "the end", "before the list is closed"),
        (f"[{json.dumps(A)}, {json.dumps(B)}] x", "line 1", "stands behind the end of the list"),
        (f"[{json.dumps(A)}, {json.dumps(B)}, {{x", "entry 3", "nothing behind it was read"),
        (f"[{json.dumps(A)}, {json.dumps(B)} {json.dumps(C)}]", "entry 2", "is not followed by a"),
        (f"[{json.dumps(A)}, {json.dumps(B)}, {'[' * 100_000}", "entry 3", "nested too deeply"),
    ],
)
def test_what_is_broken_costs_only_itself(write: Write, text: str, place: str, reason: str) -> None:
    found = read(write, text)
    ((bad_place, _, bad_reason),) = [record for record in found if record[1] is None]
    assert bad_place == place
    assert reason in bad_reason
    assert [entry for _, entry, _ in found if entry is not None] == [A, B]


def test_an_object_on_a_line_of_its_own_inside_of_another(write: Write) -> None:
    """As in a conversation that was spread out by hand."""
    inner = ",\n    ".join(map(json.dumps, (A, C)))
    ((place, entry, _),) = read(write, f'{{"list": [\n    {inner}\n]}}\n')
    assert (place, entry) == ("entry 1", {"list": [A, C]})


def test_a_first_line_that_is_nested_too_deeply(write: Write) -> None:
    (first, *rest) = read(write, lines("[" * 100_000 + "]" * 100_000, A, B))
    assert first[2].startswith("is nested too deeply")
    assert [entry for _, entry, _ in rest] == [A, B]


def test_integers_of_any_length(write: Write) -> None:
    """The interpreter refuses more than 4,300 digits with an error that is no JSON error."""
    digits = "1" + "0" * 5000
    line = MOONCAKE.splitlines()[0]
    for name in ("timestamp", "input_length", "output_length", "hash_ids"):
        entry = json.loads(line)
        value = "[" + digits + "]" if name == "hash_ids" else digits
        old = json.dumps(entry[name])
        broken = line.replace(f'"{name}": {old}', f'"{name}": {value}')
        assert broken != line
        for text in (lines(line, broken, line), f"[{line}, {broken}, {line}]"):
            trace = formats.read(write(text))
            assert len(trace.requests) == 2
            ((place, reason),) = trace.bad
            assert place in ("line 2", "entry 2")
            assert name in reason
            assert len(reason) < 200
    assert loads(digits[:900]) == int(digits[:900])


def test_a_format_is_found_past_a_first_object_of_any_length(write: Write) -> None:
    """It once was looked for in the first 64 Ki characters."""
    long = {"note": "x" * 200_000, **json.loads(MOONCAKE.splitlines()[0])}
    assert formats.read(write(lines("", "oops", long))).kind == "mooncake"
    with Source(write(lines("oops", long))) as source:
        assert len(probe(source)) == 1


def test_an_unknown_file_is_shown(write: Write) -> None:
    with pytest.raises(TraceError, match=r"its first object has the fields \['speed', 'colour'\]"):
        formats.read(write('{"speed": 1, "colour": 2}'))
    with pytest.raises(TraceError, match=r"it begins with 'when,in,out'"):
        formats.read(write("when,in,out\n1,2,3\n"))
    with pytest.raises(TraceError, match=r"it is empty"):
        formats.read(write("\n \n"))


@given(st.integers(1, 10_000_000))
def test_a_length_can_be_written_as_a_float(tokens: int) -> None:
    for value in (tokens, float(tokens), number(f"{tokens}.0"), number(f"{tokens}E0")):
        assert checked(value, "x") == tokens


@pytest.mark.parametrize(
    "value", [0, -1, 10_000_001, 1e300, float("nan"), float("inf"), 1.5, True, "7", None, [1]]
)
def test_no_length(value: object) -> None:
    with pytest.raises(FieldError, match=r"^x is .*; (correct|give) it"):
        checked(value, "x")


@pytest.mark.parametrize("text", ["", "x", "1,345", "1_0", "٣", "0x10", "1e99999", "--1", "nan"])
def test_no_number(text: str) -> None:
    assert number(text) == text


def test_times() -> None:
    read = [seconds({"t": value}, "t", scale=0.5) for value in (3, 3.0, "3", "1970-01-01 00:00:03")]
    assert read == [1.5, 1.5, 1.5, 3.0]
    assert seconds({}, "t") == 0.0
    assert seconds({"t": "2024-05-10T01:00:00+01:00"}, "t") == 1715299200 + 3600
    for value in ("now", True, [], float("nan"), float("-inf"), 10**400, "9" * 5000, "1e400"):
        with pytest.raises(FieldError, match=r"^t is .*, not a time; give a number, or a date"):
            seconds({"t": value}, "t")


def test_what_is_shown_is_short() -> None:
    for value in ("x" * 10**6, list(range(10**5)), {"a": ["b" * 10**5]}, 10**4000):
        assert len(shown(value)) < 200
