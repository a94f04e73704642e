"""The result file: round trip, what is derived, what is refused and in which words."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from vllm_tagma.lab.bench import schema
from vllm_tagma.lab.bench.schema import ResultError, Scenario, Variant

if TYPE_CHECKING:
    from conftest import Make


def test_round_trip(make_result: Make, tmp_path: Path) -> None:
    result = make_result()
    path = tmp_path / "new" / "host.json"
    schema.write(result, path)
    again = schema.read(path)
    assert again.source == str(path)
    again.source = ""
    assert again == result
    assert [p.name for p in path.parent.iterdir()] == ["host.json"]


def test_the_document_holds_rounds_and_summaries(make_result: Make) -> None:
    document = schema.to_json(make_result(factor=9.0))
    json.dumps(document)
    assert (document["kind"], document["schema_version"]) == ("tagma-bench-host", 1)
    decode = next(s for s in document["scenarios"] if s["name"] == "manager/decode_allocate/512")
    assert decode["variants"]["tagma"]["rounds"] == [100.0, 110.0, 90.0]
    assert decode["variants"]["tagma"]["summary"]["median"] == 100.0
    assert decode["ratio"]["median"] == pytest.approx(9.0)
    assert decode["target_met"] is True


def test_the_fields_are_documented(make_result: Make, request: pytest.FixtureRequest) -> None:
    text = (request.config.rootpath / "docs" / "bench-host.md").read_text(encoding="utf-8")
    document = schema.to_json(make_result())
    names = {*document, *document["scenarios"][0]}
    for variant in document["scenarios"][0]["variants"].values():
        names |= {*variant, *variant["summary"]}
    assert {name for name in names if f"`{name}`" not in text} == set()
    assert f"`schema_version` is {schema.SCHEMA_VERSION}" in text


def test_ratio_is_theirs_over_ours_and_ours_over_theirs_for_rates() -> None:
    variants = {"tagma": Variant(rounds=[2.0]), "vllm": Variant(rounds=[8.0])}
    shared: dict[str, Any] = {
        "name": "n",
        "group": "g",
        "title": "t",
        "iterations": 1,
        "baseline": "vllm",
        "variants": variants,
    }
    cost = Scenario(unit="ns/call", target=4.0, **shared)
    assert cost.ratio is not None
    assert cost.ratio.median == 4.0
    assert cost.target_met is True
    rate = Scenario(unit="tokens/s", higher_is_better=True, target=1.0, **shared)
    assert rate.ratio is not None
    assert rate.ratio.median == 0.25
    assert rate.target_met is False
    limit = Scenario(unit="bytes/block", target=1.9, target_is_limit=True, **shared)
    assert limit.target_met is False


def _broken(make_result: Make, **changes: Any) -> dict[str, Any]:
    return {**schema.to_json(make_result()), **changes}


def test_foreign_documents_are_refused(make_result: Make) -> None:
    for document in ([], {}, {"kind": "other"}):
        with pytest.raises(ResultError, match="is not a result of 'tagma bench host'"):
            schema.from_json(document)
    with pytest.raises(ResultError, match=r"schema_version 99; this release reads 1\. Measure"):
        schema.from_json(_broken(make_result, schema_version=99))


def test_a_missing_or_wrong_field_is_named(make_result: Make) -> None:
    document = schema.to_json(make_result())
    del document["seconds"]
    with pytest.raises(
        ResultError, match=r"^old\.json: \$: object missing required field `seconds`\. M"
    ):
        schema.from_json(document, source="old.json")
    with pytest.raises(ResultError, match=r"\$\.quick is 'yes': expected `bool`, got `str`"):
        schema.from_json(_broken(make_result, quick="yes"))
    with pytest.raises(ResultError, match=r"\$\.seconds is True: expected `float`, got `bool`"):
        schema.from_json(_broken(make_result, seconds=True))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"ours": "other"},
            "$.scenarios[0].ours is 'other', which is not among its variants: tagma",
        ),
        (
            {"variants": {"tagma": {"rounds": [1.0]}, "vllm": {"rounds": []}}},
            "$.scenarios[0].variants['vllm'].rounds is []: expected `array` of length >= 1",
        ),
        (
            {"variants": {"tagma": {"rounds": [1.0, "x"]}}},
            "$.scenarios[0].variants['tagma'].rounds[1] is 'x': expected `float`, got `str`",
        ),
        ({"variants": {"tagma": {}}}, "$.scenarios[0].variants['tagma']: object missing required"),
    ],
)
def test_a_bad_scenario_is_named(make_result: Make, change: dict[str, Any], words: str) -> None:
    document = schema.to_json(make_result())
    document["scenarios"][0].update(change)
    with pytest.raises(ResultError, match=re.escape(words)):
        schema.from_json(document)


def test_the_results_of_the_repository_are_read(pytestconfig: pytest.Config) -> None:
    path = pytestconfig.rootpath / "reports" / "host" / "host.json"
    result = schema.read(path)
    document = json.loads(path.read_text(encoding="utf-8"))
    written = schema.to_json(result)
    assert written.keys() == document.keys()
    for ours, theirs in zip(written["scenarios"], document["scenarios"], strict=True):
        assert ours["ratio"] == pytest.approx(theirs["ratio"])
        assert ours.keys() == theirs.keys()
        for name, variant in theirs["variants"].items():
            assert ours["variants"][name]["summary"] == pytest.approx(variant["summary"])
            assert ours["variants"][name]["rounds"] == variant["rounds"]


def test_a_file_that_is_absent_or_not_json(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match=r"nothing\.json cannot be read"):
        schema.read(tmp_path / "nothing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(ResultError, match=r"broken\.json is not JSON"):
        schema.read(broken)
