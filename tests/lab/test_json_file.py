"""Files with a schema: what a fault is called, and that a file is whole or absent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec import Struct

from vllm_tagma.errors import TagmaError
from vllm_tagma.lab import json_file
from vllm_tagma.lab.json_file import FileKind, SchemaError, convert


class Inner(Struct, kw_only=True):
    rounds: list[float]


class Outer(Struct, kw_only=True):
    groups: dict[str, dict[str, Inner]] = {}
    last: int = 0


class OuterError(TagmaError, ValueError):
    """Raised for a file that is not an outer."""


KIND = FileKind("outer", 3, command="tagma outer", schema=Outer, error=OuterError)


@pytest.mark.parametrize(
    ("document", "path", "value"),
    [
        ({"last": "x"}, "$.last", "x"),
        (
            {"groups": {"a": {"b": {"rounds": [1]}, "c": {"rounds": [1, None]}}}},
            "$.groups['a']['c'].rounds[1]",
            None,
        ),
        # With a fault behind it that would hide which key the first one has.
        (
            {"groups": {"a": {}, "d.e [f]": {"b": {"rounds": "x"}}}, "last": "x"},
            "$.groups['d.e [f]']['b'].rounds",
            "x",
        ),
        ({"groups": {"a": {"b": {}}}}, "$.groups['a']['b']", {}),
        ([], "$", []),
    ],
)
def test_a_fault_has_its_path_and_value(document: Any, path: str, value: object) -> None:
    before = json.dumps(document)
    with pytest.raises(SchemaError) as caught:
        convert(document, Outer)
    assert (caught.value.path, caught.value.value) == (path, value)
    assert json.dumps(document) == before


def test_long_values_are_cut() -> None:
    with pytest.raises(SchemaError) as caught:
        convert({"last": "x" * 1000}, Outer)
    assert len(str(caught.value)) < 120


def test_a_file_comes_back_and_nothing_else_is_left(tmp_path: Path) -> None:
    path = tmp_path / "new" / "outer.json"
    outer = Outer(groups={"a": {"b": Inner(rounds=[float("inf"), 0.5])}}, last=7)
    json_file.write(KIND.document(outer), path)
    assert KIND.read(path) == outer
    assert [found.name for found in path.parent.iterdir()] == ["outer.json"]
    with pytest.raises(TypeError):
        json_file.write({"last": object()}, path)
    assert KIND.read(path) == outer


def test_numbers_that_json_does_not_know_are_read(tmp_path: Path) -> None:
    path = tmp_path / "outer.json"
    path.write_text(
        '{"kind": "outer", "schema_version": 3, "groups": {"a": {"b": {"rounds": [NaN]}}}}'
    )
    (value,) = KIND.read(path).groups["a"]["b"].rounds
    assert value != value


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "outer.json is not JSON: "),
        ("[]", "outer.json is not a result of 'tagma outer' (no kind='outer')"),
        ('{"kind": "inner"}', "is not a result of 'tagma outer'"),
        ('{"kind": "outer"}', "has schema_version None; this release reads 3. Measure again"),
        (
            '{"kind": "outer", "schema_version": 3, "last": 1.5}',
            "outer.json: $.last is 1.5: expected `int`, got `float`. Measure again, or read it",
        ),
    ],
)
def test_what_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "outer.json"
    path.write_text(text)
    with pytest.raises(OuterError) as caught:
        KIND.read(path)
    assert words in str(caught.value)


def test_fields_of_later_releases_are_passed_over(tmp_path: Path) -> None:
    path = tmp_path / "outer.json"
    path.write_text('{"kind": "outer", "schema_version": 3, "more": 1, "last": 2}')
    assert KIND.read(path) == Outer(last=2)
