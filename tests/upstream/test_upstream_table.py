"""Comparison of a run with what is expected, the page, and a part of vLLM's tests themselves."""

from __future__ import annotations

from pathlib import Path

import pytest
import upstream_run
import upstream_table as table
from upstream_classes import Observation, Verdict
from upstream_table import Comparison, Judgement

import vllm_tests
from prerequisites import missing
from progress import Progress

ROOT = Path(__file__).resolve().parents[2]
ASSERTION = {"type": "AssertionError", "message": "([6],) == ([5],)", "place": "test a.py:3"}
JUDGEMENT = Judgement(("a.py::test_*",), r"\[6\]", "ids", "headroom")


def passed(test: str, built: int = 1) -> Observation:
    return Observation(test=test, outcome="passed", built=built)


def failed(test: str, error: dict[str, str] = ASSERTION) -> Observation:
    return Observation(test=test, outcome="failed", built=1, error=error)


def compare(ours: list[Observation], *judgements: Judgement) -> Comparison:
    stock = [passed("a.py::test_1"), passed("a.py::test_2"), failed("a.py::test_3")]
    return table.compare(stock=stock, ours=ours, judgements=judgements)


def test_only_what_passes_on_stock_is_counted() -> None:
    found = compare([passed("a.py::test_1"), passed("a.py::test_2", 0), passed("a.py::test_3")])
    assert found.verdicts == {
        "a.py::test_1": Verdict("pass"),
        "a.py::test_2": Verdict("untouched"),
    }
    assert found.not_here == {"a.py::test_3": "AssertionError: ([6],) == ([5],)"}


def test_a_test_that_did_not_run_differs() -> None:
    found = compare([passed("a.py::test_1")])
    assert found.unjudged == ["a.py::test_2"]
    assert table.complaints(found, Comparison()) == [
        "a.py::test_2: differs (did not run on vllm-tagma)"
    ]


def test_a_judgement_holds_for_its_error_only() -> None:
    found = compare([passed("a.py::test_1"), failed("a.py::test_2")], JUDGEMENT)
    assert found.verdicts["a.py::test_2"] == Verdict("ids", "headroom")
    assert table.complaints(found, found) == []
    other = {**ASSERTION, "message": "False"}
    found = compare([passed("a.py::test_1"), failed("a.py::test_2", other)], JUDGEMENT)
    assert found.unjudged == ["a.py::test_2"]
    assert [line.split(":")[0] for line in table.complaints(found, found)] == [
        "a.py",
        "judged.toml",
    ]


def test_a_change_of_class_is_named(tmp_path: Path) -> None:
    before = compare([passed("a.py::test_1"), passed("a.py::test_2")])
    table.write_expected(before, tmp_path / "expected.json")
    expected = table.read_expected(tmp_path / "expected.json")
    assert (expected.verdicts, expected.not_here) == (before.verdicts, before.not_here)
    now = compare([passed("a.py::test_1"), failed("a.py::test_2")], JUDGEMENT)
    assert table.complaints(now, expected) == ["a.py::test_2: was pass, is ids (headroom)"]


def test_reasons_survive_the_file(tmp_path: Path) -> None:
    found = Comparison(verdicts={"a.py::test[x: y]": Verdict("refused", "one: two")})
    table.write_expected(found, tmp_path / "expected.json")
    assert table.read_expected(tmp_path / "expected.json").verdicts == found.verdicts


def test_the_page_is_current() -> None:
    page = (ROOT / table.DOCUMENT).read_text(encoding="utf-8")
    assert page == table.render(table.read_expected()), "run `make upstream ACCEPT=1`"


def test_no_difference_was_accepted() -> None:
    expected = table.read_expected()
    assert expected.unjudged == []
    assert sum(verdict.name == "pass" for verdict in expected.verdicts.values()) > 100


@pytest.mark.slow
def test_prefix_caching_tests_of_vllm_are_in_the_expected_classes(tmp_path: Path) -> None:
    """Those of vLLM's tests of prefix caching that get a manager here; all of them and the others:
    ``make upstream``."""
    if not vllm_tests.is_ready(ROOT):
        message = "NOT TESTED with vLLM's own tests: run `make test`, which unpacks them."
        missing(message)
    expected = table.read_expected()
    tests = [
        test
        for test, verdict in expected.verdicts.items()
        if test.startswith("tests/v1/core/test_prefix_caching.py")
        and verdict.name in ("pass", "peeks", "ids")
    ]
    assert len(tests) > 20
    progress = Progress(total=1, log_dir=tmp_path)
    seen = upstream_run.run_tests(
        progress, backend="tagma", jobs=1, paths=tuple(tests), results=tmp_path / "tagma.jsonl"
    )
    found = table.compare(
        stock=[passed(test) for test in tests], ours=seen, judgements=table.read_judgements()
    )
    found.idle_judgements.clear()
    assert table.complaints(found, expected) == []
